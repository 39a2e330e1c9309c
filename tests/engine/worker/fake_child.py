"""A child process with a fake model, to test the protocol without torch.

The spec's `path` has options: `fake:delay_ms=5,die_after=3`. The file after `;` is the marker.

Steps: each takes `delay_ms`. Step `die_after` is the last; `stuck_in` never ends; `raise_in_step` and later
ones raise, `raise_times` in all. With `rows=2`, a step of fewer sequences has no number. `stuck_once=3`
creates the marker in step 3, which then never ends; it has no effect if the marker exists. Loading:
`fail_load`, `crash_load`, `no_compiler` (as Triton), `die_in_load`, `slow_load`; `fail_again` fails if the
marker exists. Model: `slots`; `batched` tokens in a step; with `overlap`, a launch returns before its step is
done; with `embeds`, it returns vectors of prompts: their sum and length. With `weights_mb`, it allocates
weights and a KV cache on the `FakeGpu` in the file after `;`.
"""

import os
import signal
import struct
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fairlead._cext.inputbatch import InputBatch, SequenceState, Step
from fairlead.base import messages
from fairlead.base.errors import LoadFailed
from fairlead.engine.device_memory import cache_bytes
from fairlead.engine.step import PendingStep, Runner, SampledTokens
from fairlead.engine.worker import main

sys.path.insert(0, str(Path(__file__).parents[2]))
from engine.worker.fake_gpu import MIB, FakeGpu

VOCABULARY = 1000
EOS = 0
BLOCKS = 8000
BLOCK_SIZE = 1024
MODULUS = VOCABULARY - 1


def next_token(token_ids: Sequence[int]) -> int:
    """Return the fake model's next token after these; never `EOS`."""
    return 1 + (31 * sum(token_ids) + len(token_ids)) % MODULUS


def answer(prompt: list[int], tokens: int) -> list[int]:
    """Return the fake model's output of that many tokens."""
    token_ids = list(prompt)
    for _ in range(tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


class FakeRunner:
    """Reads a step's inputs from its arena, and keeps a running sum by slot instead of a KV cache."""

    def __init__(self, options: dict[str, int], marker: Path | None) -> None:
        self.overlaps = "overlap" in options
        self.arenas = 2
        self.samples_several = True
        self.columns: dict[str, int] = {}
        self._options = options
        self._marker = marker
        self._steps = 0
        self._sums: dict[int, tuple[int, int, int]] = {}  # by slot: key, number of tokens, and their sum
        self._latest = array("i")

    def release(self, blocks: Sequence[Sequence[int]]) -> None:
        """Do nothing: there is no device memory."""

    def launch(self, step: Step, batch: InputBatch) -> "FakeStep":
        """Compute the results at once, in the order of launches; `wait` adds the delay."""
        number = 0
        if step.rows >= self._options.get("rows", 1):
            self._steps = number = self._steps + 1
        first = self._options.get("raise_in_step", 0)
        if first and first <= number < first + self._options.get("raise_times", 1):
            raise RuntimeError("the fake device failed")
        token_ids = array("i")
        vectors = {}
        sampled = set(step.sample_tokens)
        for row in range(step.rows):
            slot, begin, end = step.slots[row], step.query_starts[row], step.query_starts[row + 1]
            ids = [
                token_id if token_id >= 0 else self._latest[-1 - token_id]
                for token_id in step.input_ids[begin:end]
            ]
            total = self._sum_up_to(batch.state(slot), slot, step.positions[begin]) + sum(ids)
            length = step.positions[end - 1] + 1
            self._sums[slot] = (batch.state(slot).key, length, total)
            if end - 1 in sampled:
                vectors[len(token_ids)] = struct.pack("<2f", total, length)
                token_ids.append(1 + (31 * total + length) % MODULUS)
        self._latest = token_ids
        return FakeStep(self, number, SampledTokens(token_ids, vectors=vectors))

    def _sum_up_to(self, state: SequenceState, slot: int, start: int) -> int:
        key, length, total = self._sums.get(slot, (0, 0, 0))
        if (key, length) == (state.key, start):
            return total
        return sum(state.tokens_view()[:start])  # a prefix hit: computed for another sequence

    def finish(self, number: int) -> None:
        """Sleep or end the process, as the options say."""
        if delay_ms := self._options.get("delay_ms", 0):
            time.sleep(delay_ms / 1000)
        if number == self._options.get("stuck_in"):
            time.sleep(600)
        if (
            number == self._options.get("stuck_once")
            and self._marker is not None
            and not self._marker.exists()
        ):
            self._marker.touch()
            time.sleep(600)
        if number == self._options.get("die_after"):
            os.kill(os.getpid(), signal.SIGKILL)


_runner_type: type[Runner] = FakeRunner  # mypy checks that the protocol is implemented


class FakeStep(PendingStep):
    def __init__(self, runner: FakeRunner, number: int, sampled: SampledTokens) -> None:
        self._runner, self._number, self._sampled = runner, number, sampled

    def wait(self) -> SampledTokens:
        self._runner.finish(self._number)
        return self._sampled


def load(spec: messages.WorkerSpec, report: Callable[[float, str], None]) -> Any:
    written, _, marker = spec.path.removeprefix("fake:").partition(";")
    pairs = (option.partition("=") for option in written.split(",") if option)
    options = {name: int(value or 1) for name, _, value in pairs}
    report(0.5, "weights")
    if "fail_load" in options or ("fail_again" in options and Path(marker).exists()):
        raise LoadFailed("no such fake model")
    if "crash_load" in options:
        raise RuntimeError("a bug in loading")
    if "no_compiler" in options:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")
    if "die_in_load" in options:
        sys.stderr.write("about to die\n")
        sys.exit(3)
    if "slow_load" in options:
        time.sleep(600)
    gpu = None
    if "weights_mb" in options:
        gpu = FakeGpu(Path(marker))
        gpu.allocate(options["weights_mb"] * MIB)
        gpu.allocate(cache_bytes(gpu, spec.gpu_memory))
    max_model_len = 1_000_000
    return SimpleNamespace(
        runner=FakeRunner(options, Path(marker) if marker else None),
        slots=options.get("slots", 4),
        max_batch=spec.max_batch or options.get("slots", 4),
        max_batched_tokens=options.get("batched", 4096),
        max_model_len=max_model_len,
        max_input_tokens=spec.max_input_tokens or max_model_len,
        max_output_tokens=spec.max_output_tokens or max_model_len,
        vocab_size=VOCABULARY,
        windows=(None,),
        blocks_total=(BLOCKS,),
        block_size=BLOCK_SIZE,
        eos_token_ids=(EOS,),
        device="cpu" if gpu is None else "cuda:0",
        dtype="fake",
        weight_bytes=1,
        kv_cache_bytes=1,
        kernel="torch",
        embeds="embeds" in options,
        gpu_bytes=0 if gpu is None else gpu.taken(),
        gpu_total_bytes=0 if gpu is None else gpu.free_and_total()[1],
    )


if __name__ == "__main__":
    sys.exit(main.main(load))
