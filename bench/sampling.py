"""Measure the sampling of tokens by the compiled kernel and by torch.

    python bench/sampling.py [--vocabularies 49152 151936] [--rows 1 8 32] [--threads 2] [--json FILE]

Logits are random. "steep" logits put the probability on a few dozen tokens, like those of trained models;
"flat" logits distribute it over most of the vocabulary, which is the worst case for top_p. It reports
milliseconds per step, the minimum of the rounds, and how many rows sampled the same token with both.
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

from fairlead.engine.sampling.row_parameters import RowParameters
from fairlead.engine.sampling.sampler import choose_compiled
from fairlead.engine.sampling.torch_sampler import choose_by_torch
from fairlead.engine.threads import set_threads

DISTRIBUTIONS = {"steep": 8.0, "flat": 1.0}
PARAMETERS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 40},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k and top_p": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
}
SAMPLERS: dict[str, Callable[[Tensor, RowParameters], tuple[Any, Any]]] = {
    "kernel": lambda logits, parameters: choose_compiled(logits.numpy(), parameters),
    "torch": choose_by_torch,
}


def parameters(rows: int, requested: dict[str, float]) -> RowParameters:
    """Return the same parameters for every row, with a different seed for each."""
    columns = {name: np.full(rows, value) for name, value in requested.items()}
    return RowParameters({**columns, "seed": np.arange(rows, dtype=np.uint64)}, np.full(rows, 100))


def measure(vocabulary: int, rows: int, distribution: str, name: str, rounds: int) -> dict[str, Any]:
    """Measure one set of parameters."""
    generator = torch.Generator().manual_seed(vocabulary + rows)
    logits = torch.randn(rows, vocabulary, generator=generator) * DISTRIBUTIONS[distribution]
    requested = parameters(rows, PARAMETERS[name])
    times_s: dict[str, list[float]] = {sampler: [] for sampler in SAMPLERS}
    tokens = {}
    for _ in range(rounds):
        for sampler, choose in SAMPLERS.items():
            began = time.perf_counter()
            tokens[sampler], _ = choose(logits, requested)
            times_s[sampler].append(time.perf_counter() - began)
    minimum = {f"{sampler}_ms": round(min(seconds) * 1e3, 3) for sampler, seconds in times_s.items()}
    same = int((tokens["kernel"] == tokens["torch"].numpy()).sum())
    return {
        "vocabulary": vocabulary,
        "rows": rows,
        "logits": distribution,
        "asked": name,
        **minimum,
        "same": same,
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vocabularies", type=int, nargs="+", default=[49_152, 151_936], help="sizes of the vocabulary"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="rows of a step")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads that compute")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of which the minimum counts")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    set_threads(options.threads)
    results = []
    for vocabulary in options.vocabularies:
        for rows in options.rows:
            for distribution in DISTRIBUTIONS:
                for name in PARAMETERS:
                    results.append(measure(vocabulary, rows, distribution, name, options.rounds))
                    print(*(f"{key} {value}" for key, value in results[-1].items()), sep="  ", flush=True)
    if options.json is not None:
        machine = platform.processor() or platform.machine()
        document = {"machine": machine, "threads": options.threads, "results": results}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
