"""Simulate nodes that crash, hang and slow down, and check that no request is lost or answered wrongly.

    python bench/faults.py [--rounds 1000] [--seed 0] [--requests 400] [--json bench/results/faults.json]

Rounds run in virtual time; a seed has the same result on every machine. `simulation/faults.py` describes a
round and its checks. Problems are printed, and the exit status is then 1.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

from simulation.faults import run_round


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1000, help="number of rounds")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first round; each round adds 1")
    parser.add_argument("--requests", type=int, default=400, help="requests in a round; half of them stream")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = parser.parse_args()

    began = time.monotonic()
    outcomes: Counter[str] = Counter()
    problems: list[str] = []
    replayed = attempts = 0
    for seed in range(options.seed, options.seed + options.rounds):
        verdict = run_round(seed, streams=options.requests // 2, plain=options.requests // 2)
        outcomes += verdict.outcomes
        replayed += verdict.replayed
        attempts += verdict.attempts
        problems += [f"round {seed}: {problem}" for problem in verdict.problems]
    result = {
        "rounds": options.rounds,
        "first_seed": options.seed,
        "requests": options.rounds * options.requests,
        "outcomes": dict(sorted(outcomes.items())),
        "answered_after_more_than_one_attempt": replayed,
        "attempts": attempts,
        "problems": problems,
        "took_s": round(time.monotonic() - began, 1),
    }
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
