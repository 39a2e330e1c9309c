"""What does choosing the next tokens cost beside a step? By the compiled kernel and, beside it, by torch.

    python bench/sampling.py [--vocabularies 49152 151936] [--rows 1 8 32] [--threads 2] [--json FILE]

Logits are drawn: "steep" ones have their weight on a few dozen tokens, as trained models' have; "flat" ones
on most of the vocabulary, which is the worst that a top_p can meet. Milliseconds a step, the least of the
rounds. Both ways take turns, and must choose the same tokens.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairlead.engine.draws import choose_by_torch
from fairlead.engine.logits import Changes
from fairlead.engine.sampler import Parameters, choose_compiled

SPREADS = {"steep": 8.0, "flat": 1.0}
ASKED: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperatures": 0.8},
    "top_k": {"temperatures": 0.8, "top_k": 40},
    "top_p": {"temperatures": 0.8, "top_p": 0.9},
    "top_k and top_p": {"temperatures": 0.8, "top_k": 40, "top_p": 0.9},
}
WAYS: dict[str, Callable[[Tensor, Parameters], tuple[Tensor, Tensor]]] = {
    "kernel": choose_compiled,
    "torch": choose_by_torch,
}


def parameters(rows: int, asked: dict[str, float]) -> Parameters:
    """Make every row ask for the same, with a seed of its own."""
    columns = dict.fromkeys(("temperatures", "top_k", "top_p", "min_p", "logprobs"))
    columns.update({name: np.full(rows, value) for name, value in asked.items()})
    seeds = np.arange(rows, dtype=np.uint64)
    return Parameters(**columns, seeds=seeds, positions=np.full(rows, 100), changes=Changes())


def measure(vocabulary: int, rows: int, spread: str, name: str, rounds: int) -> dict[str, Any]:
    """Time one way of asking, in milliseconds a step."""
    generator = torch.Generator().manual_seed(vocabulary + rows)
    logits = torch.randn(rows, vocabulary, generator=generator) * SPREADS[spread]
    asked = parameters(rows, ASKED[name])
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    tokens = {}
    for _ in range(rounds):
        for way, choose in WAYS.items():
            begun = time.perf_counter()
            tokens[way], _ = choose(logits, asked)
            taken[way].append(time.perf_counter() - begun)
    least = {f"{way}_ms": round(min(seconds) * 1e3, 3) for way, seconds in taken.items()}
    same = int((tokens["kernel"] == tokens["torch"]).sum())
    return {"vocabulary": vocabulary, "rows": rows, "logits": spread, "asked": name, **least, "same": same}


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[49_152, 151_936])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = []
    for vocabulary in options.vocabularies:
        for rows in options.rows:
            for spread in SPREADS:
                for name in ASKED:
                    results.append(measure(vocabulary, rows, spread, name, options.rounds))
                    print(*(f"{key} {value}" for key, value in results[-1].items()), sep="  ", flush=True)
    if options.json is not None:
        machine = platform.processor() or platform.machine()
        told = {"machine": machine, "threads": options.threads, "results": results}
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
