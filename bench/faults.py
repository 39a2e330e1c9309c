"""Is anything lost or wrong when nodes die, stop and slow down at random?

    python bench/faults.py [--rounds 1000] [--seed 0] [--requests 400] [--json bench/results/faults.json]

Rounds are in virtual time, and a seed's comes out the same on every machine; `simulation/faults.py` says
what they are and what must not be. What is there all the same is printed, and the exit status 1.
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
    parser.add_argument("--rounds", type=int, default=1000, help="rounds in the simulation")
    parser.add_argument("--seed", type=int, default=0, help="the first round's; the next one's is one more")
    parser.add_argument("--requests", type=int, default=400, help="in a round; half of them stream")
    parser.add_argument("--json", type=Path, help="where to write what came out")
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
    told = {
        "rounds": options.rounds,
        "first_seed": options.seed,
        "requests": options.rounds * options.requests,
        "outcomes": dict(sorted(outcomes.items())),
        "answered_after_more_than_one_attempt": replayed,
        "attempts": attempts,
        "problems": problems,
        "took_s": round(time.monotonic() - began, 1),
    }
    print(json.dumps(told, indent=1))
    if options.json:
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
