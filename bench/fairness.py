"""Measure fairness, waits and the accuracy of wait estimates, in virtual time.

    python bench/fairness.py [--json bench/results/fairness.json] [--plot service.png]

The real scheduler and queue run with simulated seats, so the figures are the same on every machine. The
workloads are in `simulation/`. Each row shows the figure of the usual method, our figure on the same
requests, and the goal.
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

from simulation.backlog import LARGE, LIGHT, SMALL, Backlog, backlog
from simulation.contention import flood, overload, share_after_idling
from simulation.forecasts import forecasts
from simulation.placing import by_old_reports, by_own_counts
from simulation.swapping import BOUND_S, LOAD_S, LONGEST_S, swapping


class Row(NamedTuple):
    """One row of the table. All values have the same unit; `least` and `most` are the goal."""

    what: str
    usual: float
    measured: float
    least: float | None
    most: float | None

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal."""
        if self.least is None and self.most is None:
            return None
        above = self.least is None or self.measured >= self.least
        return above and (self.most is None or self.measured <= self.most)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the table to this file")
    parser.add_argument("--plot", type=Path, help="plot the service of each tenant over time to this file")
    options = parser.parse_args()

    by_turns, by_tokens = backlog("roundRobin"), backlog("tokens")
    rows = [*backlog_rows(by_turns, by_tokens), *contention_rows(), *forecast_rows()]
    rows += [*placing_rows(), *swapping_rows()]
    print(f"{'what':72} {'usual':>10} {'measured':>10}  goal")
    for row in rows:
        verdict = {True: "met", False: "MISSED", None: ""}[row.met]
        print(f"{row.what:72} {row.usual:10.4g} {row.measured:10.4g}  {goal(row):12} {verdict}")
    if options.json:
        table = [row._asdict() | {"met": row.met} for row in rows]
        options.json.write_text(json.dumps({"rows": table}, indent=1) + "\n")
    if options.plot:
        draw({"roundRobin": by_turns, "tokens": by_tokens}, options.plot)


def backlog_rows(by_turns: Backlog, by_tokens: Backlog) -> list[Row]:
    """Return the rows for two tenants with a constant backlog and eight with few requests."""
    by_arrival = backlog("arrival")
    ratio = by_tokens.throughput / by_turns.throughput
    return [
        Row(
            "gap in weighted service over 540 s, round robin | tokens",
            by_turns.gap,
            by_tokens.gap,
            None,
            10_000,
        ),
        Row(
            "that gap over the bound of the theory, round robin | tokens",
            by_turns.gap / by_turns.bound,
            by_tokens.gap / by_tokens.bound,
            None,
            1.0,
        ),
        Row(
            "light p99 wait, s, arrival | round robin",
            by_arrival.light_p99_s,
            by_turns.light_p99_s,
            None,
            None,
        ),
        Row("light p99 wait, s, arrival | tokens", by_arrival.light_p99_s, by_tokens.light_p99_s, None, 2.5),
        Row("weighted throughput over round robin's, | tokens", 1.0, ratio, 0.97, None),
    ]


def contention_rows() -> list[Row]:
    """Return the rows for a flood, a burst after an idle time, and overload."""
    no_flood, greedy, stubborn = flood("nothing"), flood("greedy"), flood("stubborn")
    long_no_flood, long_flood = (
        flood(tenth, length_s=600.0, seeds=range(6)) for tenth in ("nothing", "flood")
    )
    flood_once, without_displacement = flood("flood"), flood("stubborn", displacing=False)
    return [
        Row(
            "refused of the others in a flood, no displacement | ours",
            without_displacement.refused,
            stubborn.refused,
            None,
            0.001,
        ),
        Row(
            "p99 wait over that beside a merely greedy tenant, no flood | flood",
            no_flood.p99_s / greedy.p99_s,
            stubborn.p99_s / greedy.p99_s,
            None,
            1.2,
        ),
        Row(
            "p99 wait over that beside nobody, two minutes | ten, with a flood of 1,000 at once",
            flood_once.p99_s / no_flood.p99_s,
            long_flood.p99_s / long_no_flood.p99_s,
            None,
            1.2,
        ),
        Row(
            "share taken after an idle burst, no lift | lift",
            share_after_idling(lifting=False),
            share_after_idling(lifting=True),
            0.45,
            0.55,
        ),
        Row(
            "504s a request at 2.25 x overload, retried | not retried",
            overload(retrying_timeouts=True).timeouts,
            overload(retrying_timeouts=False).timeouts,
            None,
            0.05,
        ),
        Row(
            "504s a request at 2.25 x overload, all admitted | queue.maxEstimatedWait 30 s",
            overload(retrying_timeouts=False).timeouts,
            overload(retrying_timeouts=False, refused_above_s=30.0).timeouts,
            None,
            0.05,
        ),
    ]


def forecast_rows() -> list[Row]:
    """Return the rows for the accuracy of wait estimates, with both kinds of fairness."""
    rows = []
    for order in ("roundRobin", "tokens"):
        result = forecasts(order)
        rows += [
            Row(f"{order}: wait, median error, mean by arrival | by fair position", *result[:2], None, None),
            Row(
                f"{order}: wait, median error, mean by arrival | quantile",
                result[0],
                result.quantile,
                None,
                0.35,
            ),
            Row(f"{order}: coverage of P90", 0.9, result.p90_coverage, 0.87, 0.93),
        ]
    return rows


def placing_rows() -> list[Row]:
    """Return the rows for placement on sixteen nodes at 80 % load."""
    usual, ours = by_old_reports(), by_own_counts()
    return [
        Row("idle node hit, 1 s old reports | own counts", usual.idle_hit, ours.idle_hit, 0.999, None),
        Row(
            "p99 wait, s, 16 nodes at 80 %, 1 s old reports | own counts", usual.p99_s, ours.p99_s, None, 6.0
        ),
    ]


def swapping_rows() -> list[Row]:
    """Return the rows for three requested models of which one fits in memory: the worst of five seeds."""
    pairs = [(swapping(strict=True, seed=seed), swapping(strict=False, seed=seed)) for seed in range(1, 6)]
    ratio = max(ours.swaps_an_hour / strict.swaps_an_hour for strict, ours in pairs)
    longest_s = [max(max(run.rare_waits_s) for run in runs) for runs in zip(*pairs, strict=True)]
    return [
        Row("swaps an hour over strict first come, first served", 1.0, ratio, None, 0.65),
        Row(
            "longest wait for a rare model, s, strict | ours",
            longest_s[0],
            longest_s[1],
            None,
            BOUND_S + LONGEST_S + LOAD_S,
        ),
    ]


def goal(row: Row) -> str:
    """Return the goal as text."""
    if row.least is not None and row.most is not None:
        return f"{row.least:g} to {row.most:g}"
    if row.least is not None:
        return f">= {row.least:g}"
    return f"<= {row.most:g}" if row.most is not None else ""


def draw(runs: dict[str, Backlog], path: Path) -> None:
    """Plot the service over time of the two backlogged tenants and of all light tenants together."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(runs), figsize=(9, 3.2), sharey=True, layout="constrained")
    for panel, (order, run) in zip(panels, runs.items(), strict=True):
        light = [sum(at_once) for at_once in zip(*(run.served[tenant] for tenant in LIGHT), strict=True)]
        for label, service in (
            (LARGE, run.served[LARGE]),
            (SMALL, run.served[SMALL]),
            ("eight light", light),
        ):
            panel.plot(range(1, len(service) + 1), service, label=label)
        panel.set_title(f"queue.fairness: {order}")
        panel.set_xlabel("seconds")
    panels[0].set_ylabel("weighted tokens served")
    panels[0].legend()
    figure.savefig(path, dpi=70)


if __name__ == "__main__":
    main()
