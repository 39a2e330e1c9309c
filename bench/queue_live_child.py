"""A model's process for queue_live.py: the real one but for its runner, which picks a token in no time.

Started with the spec's path `pretend:slots=500,step_ms=30`. Like a GPU's steps, these take the same time
whatever they hold: the runner sleeps what the engine's own work has left of it.
"""

import sys
import time
from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace

from fairlead._cext.inputbatch import InputBatch, Step
from fairlead.engine.step import Picks
from fairlead.worker import main, wire

VOCABULARY = 1000


class Pretender:
    """A runner whose steps end `step_s` apart, or that long after they began if there was a pause."""

    overlaps = False
    arenas = 1

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._ended = 0.0

    def launch(self, step: Step, _batch: InputBatch) -> "Pretender":
        """Begin a step."""
        self._samples = step.samples
        now = time.monotonic()
        due = self._ended + self._step_s
        self._ends = due if due > now else now + self._step_s
        return self

    def release(self, blocks: Sequence[Sequence[int]]) -> None:
        """It has no memory."""

    def wait(self) -> Picks:
        """End it."""
        time.sleep(max(0.0, self._ends - time.monotonic()))
        self._ended = self._ends
        number = int(self._ends * 1000) % (VOCABULARY - 1)
        return Picks(array("i", [1 + number]) * self._samples)


def load(spec: wire.WorkerSpec, report: Callable[[float, str], None]) -> SimpleNamespace:
    """Return the model."""
    options = dict(option.split("=") for option in spec.path.removeprefix("pretend:").split(","))
    report(1.0, "pretending")
    slots = int(options["slots"])
    return SimpleNamespace(
        runner=Pretender(float(options["step_ms"]) / 1000),
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
        dtype="pretended",
        weight_bytes=1,
        kv_cache_bytes=1,
        kernel="none",
        embeds=False,
    )


if __name__ == "__main__":
    sys.exit(main.main(load))
