"""A model's process with a fake model, to test the protocol without torch.

The spec's `path` says how it (mis)behaves: `fake:delay_ms=5,die_after=3`. A step takes `delay_ms`; the one
numbered `die_after` is its last, `stuck_in` takes for ever, `raise_in_step` raises, and so do the following
ones, `raise_times` in all. Loading: `fail_load`, `crash_load`, `die_in_load`, `slow_load`. And: `slots`.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

from fairlead.engine.sequence import Plan
from fairlead.engine.step import Pick
from fairlead.errors import LoadFailed
from fairlead.worker import main, wire

VOCABULARY = 1000
EOS = 0
BLOCKS = 8000
BLOCK_SIZE = 1024


def next_token(token_ids: list[int]) -> int:
    """What the fake model says after these; never `EOS`."""
    return 1 + (31 * sum(token_ids) + len(token_ids)) % (VOCABULARY - 1)


def answer(prompt: list[int], tokens: int) -> list[int]:
    """The fake model's whole output of that many tokens."""
    token_ids = list(prompt)
    for _ in range(tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


class FakeRunner:
    def __init__(self, options: dict[str, int]) -> None:
        self._options = options
        self._steps = 0

    def launch(self, plan: Plan) -> "FakeRunner":
        self._plan = plan
        return self

    def wait(self) -> list[Pick | None]:
        self._steps += 1
        time.sleep(self._options.get("delay_ms", 0) / 1000)
        if self._steps == self._options.get("stuck_in"):
            time.sleep(600)
        if self._steps == self._options.get("die_after"):
            os.kill(os.getpid(), signal.SIGKILL)
        first = self._options.get("raise_in_step", 0)
        if first and first <= self._steps < first + self._options.get("raise_times", 1):
            raise RuntimeError("the fake device is on fire")
        return [
            Pick(next_token(chunk.sequence.token_ids)) if chunk.samples else None
            for chunk in self._plan.chunks
        ]


def load(spec: wire.WorkerSpec, report: Callable[[float, str], None]) -> SimpleNamespace:
    pairs = (option.partition("=") for option in spec.path.removeprefix("fake:").split(",") if option)
    options = {name: int(value or 1) for name, _, value in pairs}
    report(0.5, "weights")
    if "fail_load" in options:
        raise LoadFailed("no such fake model")
    if "crash_load" in options:
        raise RuntimeError("a bug in loading")
    if "die_in_load" in options:
        sys.stderr.write("about to die\n")
        sys.exit(3)
    if "slow_load" in options:
        time.sleep(600)
    return SimpleNamespace(
        runner=FakeRunner(options),
        slots=options.get("slots", 4),
        max_batch=options.get("slots", 4),
        max_batched_tokens=4096,
        max_model_len=1_000_000,
        vocab_size=VOCABULARY,
        blocks_total=BLOCKS,
        block_size=BLOCK_SIZE,
        eos_token_ids=(EOS,),
        device="cpu",
        dtype="fake",
        weight_bytes=1,
        kv_cache_bytes=1,
    )


if __name__ == "__main__":
    sys.exit(main.main(load))
