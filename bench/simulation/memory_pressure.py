"""A KV cache that is too small for the load: the real scheduler and kernels with a simulated device.

Lengths of prompts and outputs are lognormal, as in traces of chats, and sequences always wait. A step takes
16 ms, plus 0.25 ms for each decode and 0.1 ms for each prompt token. A seed gives the same figures on every
machine.
"""

import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import numpy as np

from fairlead._cext.inputbatch import InputBatch, Step
from fairlead.base.job import Sampling
from fairlead.engine.admission import Counts, Predictor
from fairlead.engine.engine import Engine
from fairlead.engine.step import SampledTokens

EOS = 2
MOST_TOKENS = 2048
LONGEST_PROMPT = 4000
PENDING = 400
BLOCK_SIZE = 16


class Figures(NamedTuple):
    """The result. `preemptions`: per 1,000 sequences; `recomputed`: recomputed tokens as a part of all."""

    tokens_per_s: float
    preemptions: float
    recomputed: float
    mean_running: float
    ended: int


class Lengths:
    """The prompt and output length of each sequence, by its key. All begin with the same `shared` tokens."""

    def __init__(self, seed: int, number: int = 20_000, *, shared: int = 0) -> None:
        rng = np.random.default_rng(seed)
        prompts = rng.lognormal(math.log(220), 0.8, number)
        outputs = rng.lognormal(math.log(180), 0.9, number)
        self.prompts: Counts = np.clip(prompts, 8, LONGEST_PROMPT).astype(np.int64)
        self.outputs: Counts = np.clip(outputs, 2, MOST_TOKENS).astype(np.int64)
        self.prompts += shared
        self._shared = rng.integers(3, 30_000, shared, dtype=np.int32)
        self._rng = rng

    def prompt(self, key: int) -> bytes:
        own = int(self.prompts[key]) - len(self._shared)
        return self._shared.tobytes() + self._rng.integers(3, 30_000, own, dtype=np.int32).tobytes()


class Rule:
    """A predictor that does not learn."""

    def __init__(self, lengths: Lengths) -> None:
        self.lengths = lengths

    def learn(self, length: int) -> None:
        """Do nothing."""

    def on_preemption(self) -> None:
        """Do nothing."""


class Oracle(Rule):
    """Predicts the true length of every output."""

    def remaining(self, keys: Counts, outputs: Counts, limits: Counts) -> Counts:
        remaining: Counts = np.minimum(self.lengths.outputs[keys] - outputs, limits)
        return remaining


class WorstCase(Rule):
    """Predicts `max_tokens` for every output: no sequence is preempted, but most of the cache stays empty."""

    def remaining(self, keys: Counts, outputs: Counts, limits: Counts) -> Counts:  # noqa: ARG002  the signature is the protocol's
        return limits


class Now(Rule):
    """Predicts that every output ends at once: each sequence that fits now is admitted."""

    def remaining(self, keys: Counts, outputs: Counts, limits: Counts) -> Counts:  # noqa: ARG002  the signature is the protocol's
        return np.zeros_like(limits)


class FormulaRunner:
    """Ends each sequence at its length, and adds up the simulated time of the steps."""

    overlaps = False
    samples_several = True
    columns: ClassVar[dict[str, int]] = {}
    arenas = 2

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self.elapsed_s = 0.0

    def run(self, step: Step, batch: InputBatch) -> SampledTokens:
        self.elapsed_s += 0.016 + 0.00025 * step.decodes + 0.0001 * (step.tokens - step.decodes)
        slots = np.asarray(step.sample_slots)
        keys = [batch.state(slot).key for slot in step.sample_slots]
        last = np.asarray(batch.output_tokens)[slots] + 1 >= self._lengths.outputs[keys]
        return SampledTokens(np.where(last, EOS, 7).astype(np.int32).data)


def simulate(
    seed: int,
    rule: Callable[[Lengths], Predictor] | None = None,
    *,
    steps: int = 2500,
    cache_tokens: int = 24_576,
    slots: int = 128,
    max_batched_tokens: int = 1024,
    windows: tuple[int | None, ...] = (None,),
    shared: int = 0,
    prefix_cache: bool = True,
) -> Figures:
    """Run steps with one admission rule; None is the engine's own.

    `cache_tokens`: of each group; `windows`: the groups' windows. All prompts begin with the same `shared`
    tokens. `prefix_cache`: whether the engine has one.
    """
    lengths = Lengths(seed, shared=shared)
    runner = FormulaRunner(lengths)
    engine = Engine(
        runner,  # type: ignore[arg-type]  # only `run` is used
        slots=slots,
        max_batch=slots,
        max_batched_tokens=max_batched_tokens,
        max_model_len=LONGEST_PROMPT + MOST_TOKENS + shared,
        blocks_total=[cache_tokens // BLOCK_SIZE] * len(windows),
        windows=windows,
        prefix_cache=prefix_cache,
        block_size=BLOCK_SIZE,
        vocab_size=30_000,
        eos_token_ids=(EOS,),
        draw_seed=lambda: 1,
        hash_key=bytes(16),
        predictor=None if rule is None else rule(lengths),
    )
    submitted = ended = prompt_tokens = row_steps = 0
    for _ in range(steps):
        while engine.statistics().pending < PENDING:
            engine.submit(submitted, lengths.prompt(submitted), Sampling(max_tokens=MOST_TOKENS))
            submitted += 1
        step = engine.plan(runner.elapsed_s)
        assert step is not None
        row_steps += engine.statistics().running
        outcome = engine.commit(step, runner.run(step, engine.batch))
        for output in outcome.outputs:
            assert output.error is None
            if output.finish_reason is None:
                continue  # it says how many tokens of the prompt were cached
            assert output.finish_reason == "stop"
            ended += 1
            prompt_tokens += int(lengths.prompts[output.key])
    counts = engine.statistics()
    useful = counts.generated_tokens + prompt_tokens
    return Figures(
        tokens_per_s=useful / runner.elapsed_s,
        preemptions=1000 * counts.preemptions / ended,
        recomputed=engine.recomputed_tokens / useful,
        mean_running=row_steps / steps,
        ended=ended,
    )
