"""Compare the engine's admission rule with an oracle that has all output lengths, when memory is short.

    python bench/admission.py [--seeds 4] [--steps 6000] [--json bench/results/admission.json]

The real scheduler and kernels run with a simulated device (see simulation/memory_pressure.py). The rules:
the engine's; an oracle, which is the same code with the true output lengths; reserving all of `max_tokens`;
and admitting each sequence that fits now. Tokens/s are simulated: a seed gives the same figures on every
machine.

The result contains the mean and the worst over the seeds, and which of `GOALS` the engine's rule reached.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from fairlead.engine.admission import Predictor
from simulation.memory_pressure import Figures, Lengths, Now, Oracle, WorstCase, simulate

RULES: dict[str, Callable[[Lengths], Predictor] | None] = {
    "predicted peak": None,
    "oracle": Oracle,
    "worst case": WorstCase,
    "each that fits now": Now,
}
GOALS = {"of_the_oracle": 0.95, "preemptions": 25.0, "recomputed": 0.015}


def measure(seeds: int, steps: int) -> dict[str, list[Figures]]:
    return {
        rule: [simulate(seed, predictor, steps=steps) for seed in range(1, seeds + 1)]
        for rule, predictor in RULES.items()
    }


def report(figures: dict[str, list[Figures]], steps: int) -> dict[str, Any]:
    oracle = [figure.tokens_per_s for figure in figures["oracle"]]
    results = []
    for rule, runs in figures.items():
        shares = [run.tokens_per_s / best for run, best in zip(runs, oracle, strict=True)]
        results.append(
            {
                "rule": rule,
                "of_the_oracle": round(fmean(shares), 4),
                "of_the_oracle_worst": round(min(shares), 4),
                "preemptions_worst": round(max(run.preemptions for run in runs), 1),
                "recomputed_worst": round(max(run.recomputed for run in runs), 4),
                **{name: round(fmean(getattr(run, name) for run in runs), 4) for name in Figures._fields},
            }
        )
    ours: dict[str, Any] = results[0]
    reached = {
        "of_the_oracle": ours["of_the_oracle"] >= GOALS["of_the_oracle"],
        "preemptions": ours["preemptions"] <= GOALS["preemptions"],
        "recomputed": ours["recomputed"] <= GOALS["recomputed"],
    }
    return {
        "benchmark": "admission",
        "seeds": len(oracle),
        "steps": steps,
        "results": results,
        "goals": {name: {"goal": goal, "reached": reached[name]} for name, goal in GOALS.items()},
    }


def show(result: dict[str, Any]) -> None:
    print(
        f"{'':18}{'tokens/s':>10}{'of oracle':>11}{'worst':>8}"
        f"{'preempted':>11}{'recomputed':>12}{'running':>9}"
    )
    for row in result["results"]:
        print(
            f"{row['rule']:18}{row['tokens_per_s']:10.0f}{row['of_the_oracle']:11.1%}"
            f"{row['of_the_oracle_worst']:8.1%}{row['preemptions']:11.1f}{row['recomputed']:12.2%}"
            f"{row['mean_running']:9.1f}"
        )
    for name, goal in result["goals"].items():
        print(f"{name}: {goal['goal']} {'reached' if goal['reached'] else 'not reached'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=4, help="number of seeds")
    parser.add_argument("--steps", type=int, default=6000, help="steps for each seed and rule")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = parser.parse_args()
    result = report(measure(options.seeds, options.steps), options.steps)
    show(result)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
