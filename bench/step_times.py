"""Time between tokens of eight streams while long prompts are computed beside them, with `targetStep` or not.

    python bench/random_model.py SmolLM2-135M smollm2
    OMP_WAIT_POLICY=PASSIVE python bench/step_times.py smollm2 --out bench/results/step_times.json

`off` is a chunk of 512 tokens a step, `on` the default target of 50 ms. The work is the same: eight streams
of `--tokens` tokens, and `--prompts` prompts of 2,000 tokens, one after another. `tokens_per_s` counts the
tokens of prompts and answers until all have ended. The rounds alternate, and the results are of all rounds.

The clock is the processor time of the process, with one thread, so that other load on the machine changes
little; `--wall` uses the time of day, for more threads.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairlead.base.job import Sampling
from fairlead.base.messages import StepOutputs, WorkerSpec
from fairlead.engine.engine import Engine
from fairlead.engine.loading import LoadedModel, load_runner
from machine import machine

STREAMS, PROMPT = 8, 2000
TARGETS = {"off": 0.0, "on": 0.05}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--wall", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    spec = WorkerSpec(
        path=str(options.model),
        device="cpu",
        dtype=options.dtype,
        slots=STREAMS + 1,
        max_model_len=4096,
        threads=options.threads,
    )
    loaded = load_runner(spec, lambda *_: None)
    clock = time.perf_counter if options.wall else time.process_time
    gaps: dict[str, list[float]] = {name: [] for name in TARGETS}
    rates: dict[str, list[float]] = {name: [] for name in TARGETS}
    firsts: dict[str, list[float]] = {name: [] for name in TARGETS}
    for _ in range(options.rounds):
        for name, target_s in TARGETS.items():
            found, first_s, rate = run(loaded, target_s, options.tokens, options.prompts, clock)
            gaps[name] += found
            firsts[name] += first_s
            rates[name].append(rate)
    report = {
        "machine": machine(),
        "model": options.model.name,
        "kernel": loaded.kernel,
        "dtype": loaded.dtype,
        "threads": options.threads,
        "clock": "time of day" if options.wall else "processor time",
        "results": {name: summary(gaps[name], firsts[name], rates[name]) for name in TARGETS},
        "rate_on_off": round(statistics.median(rates["on"]) / statistics.median(rates["off"]), 3),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.out is not None:
        earlier = json.loads(options.out.read_text()) if options.out.exists() else []
        options.out.write_text(json.dumps([*earlier, report], indent=2) + "\n")


def summary(gaps: list[float], firsts: list[float], rates: list[float]) -> dict[str, Any]:
    """Return the figures of one setting; times in milliseconds."""
    ordered = sorted(gaps)
    return {
        "between_tokens_p50_ms": round(1000 * ordered[len(ordered) // 2], 1),
        "between_tokens_p99_ms": round(1000 * ordered[int(0.99 * len(ordered))], 1),
        "between_tokens_most_ms": round(1000 * ordered[-1], 1),
        "first_token_of_a_long_prompt_ms": round(1000 * statistics.median(firsts)),
        "tokens_per_s": round(statistics.median(rates), 1),
    }


def run(
    loaded: LoadedModel, target_s: float, tokens: int, prompts: int, clock: Callable[[], float]
) -> tuple[list[float], list[float], float]:
    """Return the times between tokens of the streams while prompts are computed, the first tokens' times of
    the prompts, and the tokens per second of all.
    """
    rng = random.Random(1)
    engine = Engine(
        loaded.runner,
        slots=loaded.slots,
        max_batch=loaded.max_batch,
        max_batched_tokens=loaded.max_batched_tokens,
        max_model_len=loaded.max_model_len,
        blocks_total=loaded.blocks_total,
        windows=loaded.windows,
        block_size=loaded.block_size,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        draw_seed=lambda: 0,
        prefix_cache=False,
        target_step_s=target_s,
    )
    for key in range(STREAMS):
        prompt = [rng.randrange(loaded.vocab_size) for _ in range(40)]
        engine.submit(key, prompt, Sampling(max_tokens=tokens, temperature=0, ignore_eos=True))
    latest: dict[int, float] = {}
    gaps: list[float] = []
    firsts: list[float] = []
    count, left, submitted_s, began_s = 0, prompts, 0.0, clock()
    steps = 0
    while not engine.idle:
        if steps >= 20 and left and len(firsts) == prompts - left:
            long = [rng.randrange(loaded.vocab_size) for _ in range(PROMPT)]
            engine.submit(1000 + left, long, Sampling(max_tokens=1, temperature=0, ignore_eos=True), tenant=1)
            left, submitted_s = left - 1, clock()
            count += PROMPT
        step = engine.plan(clock())
        assert step is not None
        outcome = engine.commit(step, loaded.runner.launch(step, engine.batch).wait())
        now_s = clock()
        steps += 1
        frame = StepOutputs(
            outcome.keys, outcome.tokens, outcome.outputs, engine.statistics(), outcome.counts
        )
        received = [key for key, _ in frame.plain()] + [output.key for output in outcome.outputs]
        is_beside = len(firsts) < prompts - left
        for key in received:
            count += 1
            if key >= 1000:
                firsts.append(now_s - submitted_s)
            else:
                if key in latest and is_beside:
                    gaps.append(now_s - latest[key])
                latest[key] = now_s
    return gaps, firsts, count / (clock() - began_s)


if __name__ == "__main__":
    main()
