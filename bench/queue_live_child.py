"""A model's process for queue_live.py: the real one but for its runner, which picks a token in no time.

Started with the spec's path `pretend:slots=500,step_ms=30`. Like a GPU's steps, these take the same time
whatever they hold: the runner sleeps what the engine's own work has left of it.
"""

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

from fairlead.engine.sequence import Plan
from fairlead.engine.step import Pick
from fairlead.worker import main, wire

VOCABULARY = 1000


class Pretender:
    """A runner whose steps end `step_s` apart, or that long after they began if there was a pause."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._ended = 0.0

    def launch(self, plan: Plan) -> "Pretender":
        """Begin a step."""
        self._plan = plan
        now = time.monotonic()
        due = self._ended + self._step_s
        self._ends = due if due > now else now + self._step_s
        return self

    def wait(self) -> list[Pick | None]:
        """End it."""
        time.sleep(max(0.0, self._ends - time.monotonic()))
        self._ended = self._ends
        number = int(self._ends * 1000) % (VOCABULARY - 1)
        return [Pick(1 + number) if chunk.samples else None for chunk in self._plan.chunks]


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
        vocab_size=VOCABULARY,
        blocks_total=100 * slots,
        block_size=1024,
        eos_token_ids=(0,),
        device="cpu",
        dtype="pretended",
        weight_bytes=1,
        kv_cache_bytes=1,
    )


if __name__ == "__main__":
    sys.exit(main.main(load))
