"""Measure the engine's scheduling on the host, without the model.

    python bench/engine_scheduler.py [--rounds 5] [--steps 300] [--json FILE]

8, 64, 256 and 1024 sequences run. Each step adds a token to every sequence. With a churn of 1 or 10 %, as
many sequences end in each step and are replaced by new ones. It measures `plan` and `commit` together: the
selection, the step's inputs, blocks, ends, the prefix index and the outputs in wire format. `submit` has a
column of its own. Prompts are short (64 tokens) and all different, so that prefill does not dominate. With
"waiting", one more sequence of a lower class always waits, and the memory forecast rejects it again after
every sequence that ends.

Times are the thread's CPU time. The median over the rounds is reported. Work on the processor's other threads
makes steps slower by a half and more, so the tenth of the steps that was quickest has a column too.
"""

import argparse
import gc
import json
import os
import platform
import random
import statistics
import time
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fairlead.base.job import Sampling
from fairlead.engine.admission import FILL, Counts, PastLengths
from fairlead.engine.engine import Engine
from fairlead.engine.step import SampledTokens

RUNNING = (8, 64, 256, 1024)
PROMPT_TOKENS = 64
BLOCK_SIZE = 16
VOCABULARY = 32_000
LONGEST = 4096
WARM_UP = 40


class Load(NamedTuple):
    """`lifetime`: steps from a sequence's first token to its last; None: no sequence ends."""

    name: str
    lifetime: int | None
    waiting: bool = False


LOADS = (
    Load("decode only", None),
    Load("1 % churn", 100),
    Load("10 % churn", 10),
    Load("decode only, waiting", None, waiting=True),
    Load("1 % churn, waiting", 100, waiting=True),
)


class NoRunner:
    """A runner without a device; the benchmark supplies the tokens."""

    overlaps = False
    samples_several = True
    columns: ClassVar[dict[str, int]] = {}
    arenas = 2


class Pessimist(PastLengths):
    """Computes the engine's prediction, then predicts the maximum."""

    def remaining(self, keys: Counts, outputs: Counts, limits: Counts) -> Counts:
        super().remaining(keys, outputs, limits)
        return limits


class Requests:
    """An endless sequence of requests, determined by the seed."""

    def __init__(self, load: Load, running: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._load = load
        self._first = running
        self._number = count()

    def next(self) -> tuple[int, list[int], int]:
        """Return a key, a prompt and its `max_tokens`. The ends of the first requests are spread evenly."""
        key = next(self._number)
        prompt = self._rng.choices(range(5, VOCABULARY), k=PROMPT_TOKENS)
        lifetime = self._load.lifetime
        if lifetime is None:
            return key, prompt, LONGEST - PROMPT_TOKENS
        return key, prompt, 1 + key % lifetime if key < self._first else lifetime


class MeasuredEngine:
    """Fairlead's engine under one load, with the nanoseconds of its calls."""

    def __init__(self, load: Load, running: int, seed: int) -> None:
        # If a sequence waits, the memory holds all running sequences at their longest, and no other.
        share = FILL if load.waiting else 0.5
        longest = LONGEST if load.lifetime is None else PROMPT_TOKENS + load.lifetime
        blocks = int(running * longest / share) // BLOCK_SIZE + 1
        self.engine = Engine(
            NoRunner(),  # type: ignore[arg-type]  # nothing is launched
            slots=running + (8 if load.waiting else 0),
            max_batch=running + 8,
            max_batched_tokens=max(2048, running * (1 + PROMPT_TOKENS // 4)),
            max_model_len=LONGEST,
            blocks_total=blocks,
            block_size=BLOCK_SIZE,
            vocab_size=VOCABULARY,
            eos_token_ids=(2,),
            draw_seed=lambda: 1,
            hash_key=bytes(16),
            predictor=Pessimist() if load.waiting else None,
        )
        self.requests = Requests(load, running, seed)
        self.tokens = np.full(2 * running + 16, 7, np.int32)
        self.plan_ns = self.commit_ns = self.submit_ns = 0
        self.waiting = load.waiting
        self.running = running
        self.steps = self.ended = self.row_steps = 0
        self.step_us: list[float] = []  # of each step, a sequence

    def submit(self, number: int) -> None:
        for _ in range(number):
            key, prompt, max_tokens = self.requests.next()
            buffer = np.array(prompt, np.int32).tobytes()
            began = time.thread_time_ns()
            self.engine.submit(key, buffer, Sampling(max_tokens=max_tokens, ignore_eos=True))
            self.submit_ns += time.thread_time_ns() - began

    def step(self, now_s: float) -> int:
        """Run one step; return how many sequences ended."""
        began = time.thread_time_ns()
        step = self.engine.plan(now_s)
        planned = time.thread_time_ns()
        assert step is not None
        picks = SampledTokens(self.tokens[: step.samples].data)
        launched = time.thread_time_ns()
        outcome = self.engine.commit(step, picks)
        done = time.thread_time_ns()
        self.plan_ns += planned - began
        self.commit_ns += done - launched
        self.steps += 1
        self.row_steps += step.rows
        self.step_us.append((planned - began + done - launched) / 1000 / step.rows)
        return len(outcome.outputs)

    def run(self, steps: int) -> None:
        self.submit(self.running)
        now = count()
        for _ in range(WARM_UP):
            self.submit(self.step(next(now) * 0.02))
        if self.waiting:
            self.submit_waiting()
        self.plan_ns = self.commit_ns = self.submit_ns = self.steps = self.row_steps = 0
        self.step_us.clear()
        for _ in range(steps):
            ended = self.step(next(now) * 0.02)
            self.ended += ended
            self.submit(ended)

    def submit_waiting(self) -> None:
        """Submit a sequence that must wait as long as the others run."""
        key, _, _ = self.requests.next()
        tokens = min(LONGEST - 8, self.engine.statistics().blocks_total * BLOCK_SIZE // 2)
        self.engine.submit(key, bytes(4 * tokens), Sampling(max_tokens=8, ignore_eos=True), priority=2)


def measure(load: Load, running: int, steps: int, seed: int) -> dict[str, float]:
    """Return microseconds per step, per running sequence, and per submitted sequence."""
    engine = MeasuredEngine(load, running, seed)
    gc.collect()
    gc.disable()
    engine.run(steps)
    gc.enable()
    measured = figures(
        engine.plan_ns, engine.commit_ns, engine.submit_ns, engine.steps, engine.row_steps, engine.ended
    )
    return measured | {"quickest_tenth_us": statistics.quantiles(engine.step_us, n=10)[0]}


def figures(
    plan_ns: int, commit_ns: int, submit_ns: int, steps: int, row_steps: int, submitted: int
) -> dict[str, float]:
    return {
        "plan_us": plan_ns / 1000 / steps,
        "commit_us": commit_ns / 1000 / steps,
        "us_a_running_sequence": (plan_ns + commit_ns) / 1000 / row_steps,
        "submit_us": submit_ns / 1000 / max(1, submitted),
    }


# The report ----------------------------------------------------------------------------------------

Rows = dict[tuple[str, int], list[dict[str, float]]]


def measure_all(rounds: int, steps: int) -> Rows:
    rows: Rows = {}
    for round_number in range(rounds):
        for load in LOADS:
            for running in RUNNING:
                measured = measure(load, running, steps, seed=round_number)
                rows.setdefault((load.name, running), []).append(measured)
    return rows


def report(rows: Rows, rounds: int, steps: int) -> dict[str, Any]:
    results = []
    for (load, running), measured in rows.items():
        medians = {what: statistics.median(one[what] for one in measured) for what in measured[0]}
        rounded = {what: round(value, 3) for what, value in medians.items()}
        worst = max(one["us_a_running_sequence"] for one in measured)
        results.append({"load": load, "running": running, **rounded, "worst_round_us": round(worst, 3)})
    return {
        "benchmark": "engine_scheduler",
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "python": platform.python_version(),
        "rounds": rounds,
        "steps": steps,
        "results": results,
    }


def show(result: dict[str, Any]) -> None:
    print(
        f"{'':24}{'running':>8}{'plan':>9}{'commit':>9}{'a sequence':>12}{'submit':>9}"
        f"{'quickest tenth':>16}  µs"
    )
    for row in result["results"]:
        print(
            f"{row['load']:24}{row['running']:8}{row['plan_us']:9.1f}{row['commit_us']:9.1f}"
            f"{row['us_a_running_sequence']:12.2f}{row['submit_us']:9.1f}"
            f"{row.get('quickest_tenth_us', 0):16.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = report(measure_all(options.rounds, options.steps), options.rounds, options.steps)
    show(result)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
