"""A model's process for queue_live.py: the real one with a simulated runner.

The path of its specification is for example `simulated:slots=500,step_ms=30`. Every step takes the same time,
like a GPU's: the runner sleeps for the rest of the time after the engine's own work.
"""

import sys
import time
from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

from fairlead._cext.inputbatch import InputBatch, Step
from fairlead.base import messages
from fairlead.engine.step import SampledTokens
from fairlead.engine.worker import main

VOCABULARY = 1000


class SimulatedRunner:
    """A runner with steps that end `step_s` apart, or `step_s` after their start if the runner was idle."""

    overlaps = False
    samples_several = True
    columns: ClassVar[dict[str, int]] = {}
    arenas = 1

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._ended = 0.0

    def launch(self, step: Step, _batch: InputBatch) -> "SimulatedRunner":
        """Begin a step."""
        self._samples = step.samples
        now = time.monotonic()
        due = self._ended + self._step_s
        self._ends = due if due > now else now + self._step_s
        return self

    def release(self, blocks: Sequence[Sequence[int]]) -> None:
        """Do nothing: there is no memory to release."""

    def wait(self) -> SampledTokens:
        """Wait until the end of the step; return its tokens."""
        time.sleep(max(0.0, self._ends - time.monotonic()))
        self._ended = self._ends
        number = int(self._ends * 1000) % (VOCABULARY - 1)
        return SampledTokens(array("i", [1 + number]) * self._samples)


def load(spec: messages.WorkerSpec, report: Callable[[float, str], None]) -> Any:
    """Return the model."""
    options = dict(option.split("=") for option in spec.path.removeprefix("simulated:").split(","))
    report(1.0, "simulated")
    slots = int(options["slots"])
    return SimpleNamespace(
        runner=SimulatedRunner(float(options["step_ms"]) / 1000),
        slots=slots,
        max_batch=slots,
        max_batched_tokens=4096,
        max_model_len=1_000_000,
        max_input_tokens=1_000_000,
        max_output_tokens=1_000_000,
        vocab_size=VOCABULARY,
        windows=(None,),
        blocks_total=(100 * slots,),
        block_size=1024,
        eos_token_ids=(0,),
        device="cpu",
        dtype="simulated",
        weight_bytes=1,
        kv_cache_bytes=1,
        kernel="none",
        embeds=False,
        gpu_bytes=0,
        gpu_total_bytes=0,
    )


if __name__ == "__main__":
    sys.exit(main.main(load))
