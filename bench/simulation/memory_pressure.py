"""A cache too small for all who want it: the real scheduler and kernels, over a device that is a formula.

Lengths of prompts and outputs are log-normal, as in traces of chats; the line is never empty. A step takes
16 ms, 0.25 ms a decode and 0.1 ms a token of prefill. Counts and simulated time: the same seed gives the
same figures on every machine.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fairlead._cext.inputbatch import InputBatch, Step
from fairlead.engine.admission import Counts, Predictor
from fairlead.engine.engine import Engine
from fairlead.engine.step import Picks
from fairlead.job import Sampling

EOS = 2
MOST_TOKENS = 2048
LONGEST_PROMPT = 4000
IN_LINE = 400
BLOCK_SIZE = 16


class Figures(NamedTuple):
    """What came of it. `preemptions` per 1,000 sequences that ended; `recomputed`: its part of all tokens."""

    tokens_per_s: float
    preemptions: float
    recomputed: float
    mean_running: float
    ended: int


class Lengths:
    """What each sequence, by its key, asks and how much it will say."""

    def __init__(self, seed: int, number: int = 20_000) -> None:
        chance = np.random.default_rng(seed)
        prompts = chance.lognormal(math.log(220), 0.8, number)
        outputs = chance.lognormal(math.log(180), 0.9, number)
        self.prompts: Counts = np.clip(prompts, 8, LONGEST_PROMPT).astype(np.int64)
        self.outputs: Counts = np.clip(outputs, 2, MOST_TOKENS).astype(np.int64)
        self._chance = chance

    def prompt(self, key: int) -> bytes:
        return self._chance.integers(3, 30_000, int(self.prompts[key]), dtype=np.int32).tobytes()


class Rule:
    """A prediction that learns nothing."""

    def __init__(self, lengths: Lengths) -> None:
        self.lengths = lengths

    def learn(self, length: int) -> None:
        """It need not know."""

    def regret(self) -> None:
        """It has none."""


class Oracle(Rule):
    """Knows how long every output will be."""

    def remaining(self, keys: Counts, outputs: Counts, limits: Counts) -> Counts:
        remaining: Counts = np.minimum(self.lengths.outputs[keys] - outputs, limits)
        return remaining


class WorstCase(Rule):
    """Takes everyone to use all of `max_tokens`: nobody is ever preempted, and most of the cache is empty."""

    def remaining(self, keys: Counts, outputs: Counts, limits: Counts) -> Counts:  # noqa: ARG002  whatever
        return limits


class Now(Rule):
    """Takes everyone to end at once: whoever fits now comes in."""

    def remaining(self, keys: Counts, outputs: Counts, limits: Counts) -> Counts:  # noqa: ARG002  whatever
        return np.zeros_like(limits)


class FormulaRunner:
    """Ends each sequence where its length says, and adds up what the steps would have taken."""

    overlaps = False
    arenas = 2

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self.elapsed_s = 0.0

    def run(self, step: Step, batch: InputBatch) -> Picks:
        self.elapsed_s += 0.016 + 0.00025 * step.decodes + 0.0001 * (step.tokens - step.decodes)
        slots = np.asarray(step.sample_slots)
        keys = [batch.state(slot).key for slot in step.sample_slots]
        last = np.asarray(batch.output_tokens)[slots] + 1 >= self._lengths.outputs[keys]
        return Picks(np.where(last, EOS, 7).astype(np.int32).data)


def simulate(
    seed: int,
    rule: Callable[[Lengths], Predictor] | None = None,
    *,
    steps: int = 2500,
    cache_tokens: int = 24_576,
    slots: int = 128,
    max_batched_tokens: int = 1024,
) -> Figures:
    """Run so many steps under one rule of admission; None is the engine's own."""
    lengths = Lengths(seed)
    runner = FormulaRunner(lengths)
    engine = Engine(
        runner,  # type: ignore[arg-type]  # steps are run by hand
        slots=slots,
        max_batch=slots,
        max_batched_tokens=max_batched_tokens,
        max_model_len=LONGEST_PROMPT + MOST_TOKENS,
        blocks_total=cache_tokens // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        vocab_size=30_000,
        eos_token_ids=(EOS,),
        draw_seed=lambda: 1,
        hash_key=bytes(16),
        predictor=None if rule is None else rule(lengths),
    )
    submitted = ended = prompt_tokens = row_steps = 0
    for _ in range(steps):
        while engine.statistics().pending < IN_LINE:
            engine.submit(submitted, lengths.prompt(submitted), Sampling(max_tokens=MOST_TOKENS))
            submitted += 1
        step = engine.plan(runner.elapsed_s)
        assert step is not None
        row_steps += engine.statistics().running
        outcome = engine.commit(step, runner.run(step, engine.batch))
        for output in outcome.outputs:
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
