"""Tokens per second of a model on the CPU kernel, with and without speculation, on two kinds of text.

    python bench/random_model.py SmolLM2-135M smollm2
    OMP_WAIT_POLICY=PASSIVE python bench/speculation.py smollm2 --out bench/results/speculation.json

`repeats`: the prompt repeats a passage of random tokens, which the greedy answer goes on repeating. `random`:
a prompt of random tokens, and an answer drawn at a high temperature. Both settings must make the same tokens.
Rounds with and without alternate; the fastest count.
"""

import argparse
import json
import platform
import random
import time
from pathlib import Path

from fairlead.base.job import Sampling
from fairlead.base.messages import Speculation, StepOutputs, WorkerSpec
from fairlead.engine.engine import Engine
from fairlead.engine.loading import LoadedModel, load_runner

TOKENS = 64
SETTINGS = {"off": None, "on": Speculation(ngram=3, drafts=4)}
Request = tuple[list[int], Sampling]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    spec = WorkerSpec(
        path=str(options.model), device="cpu", slots=8, max_model_len=1024, threads=options.threads
    )
    loaded = load_runner(spec, lambda *_: None)
    results = {}
    for kind in ("repeats", "random"):
        for streams in options.streams:
            requests = [request_of(kind, seed, loaded.vocab_size) for seed in range(streams)]
            results[f"{kind}, {streams} streams"] = compare(loaded, requests, options.rounds)
    report = {
        "model": options.model.name,
        "kernel": loaded.kernel,
        "threads": options.threads,
        "tokens": TOKENS,
        "machine": platform.processor() or platform.machine(),
        "results": results,
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


def request_of(kind: str, seed: int, vocabulary: int) -> Request:
    """Return a request whose answer repeats its prompt, or does not."""
    rng = random.Random(seed)
    if kind == "random":
        prompt = [rng.randrange(vocabulary) for _ in range(240)]
        return prompt, Sampling(max_tokens=TOKENS, temperature=1.5, seed=seed, ignore_eos=True)
    passage = [rng.randrange(vocabulary) for _ in range(24)]
    return passage * 10, Sampling(max_tokens=TOKENS, temperature=0, ignore_eos=True)


def compare(loaded: LoadedModel, requests: list[Request], rounds: int) -> dict[str, object]:
    """Return the tokens per second of both settings, their ratio, and how many drafts were right."""
    seconds: dict[str, list[float]] = {name: [] for name in SETTINGS}
    answers = {}
    share = 0.0
    for _ in range(rounds):
        for name, speculation in SETTINGS.items():
            took_s, answers[name], drafts = run(loaded, requests, speculation)
            seconds[name].append(took_s)
            share = drafts
    assert answers["off"] == answers["on"]
    rates = {name: round(TOKENS * len(requests) / min(times), 1) for name, times in seconds.items()}
    return {"tokens_per_s": rates, "ratio": round(rates["on"] / rates["off"], 2), "drafts_accepted": share}


def run(
    loaded: LoadedModel, requests: list[Request], speculation: Speculation | None
) -> tuple[float, dict[int, list[int]], float]:
    """Return the seconds after the first tokens, the answers, and the share of drafts that were right."""
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
        speculation=speculation,
    )
    answers: dict[int, list[int]] = {key: [] for key in range(len(requests))}
    for key, (prompt, sampling) in enumerate(requests):
        engine.submit(key, prompt, sampling)
    began_s = time.perf_counter()
    while not engine.idle:
        step = engine.plan(0.0)
        assert step is not None
        outcome = engine.commit(step, loaded.runner.launch(step, engine.batch).wait())
        frame = StepOutputs(
            outcome.keys, outcome.tokens, outcome.outputs, engine.statistics(), outcome.counts
        )
        had_all = all(answers.values())
        for key, token_id in frame.plain():
            answers[key].append(token_id)
        for output in outcome.outputs:
            answers[output.key] += output.token_ids
        if not had_all and all(answers.values()):
            began_s = time.perf_counter()  # prompts are computed as before
    counts = engine.statistics()
    share = counts.accepted_tokens / counts.draft_tokens if counts.draft_tokens else 0.0
    return time.perf_counter() - began_s, answers, round(share, 2)


if __name__ == "__main__":
    main()
