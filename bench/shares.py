"""Measure what an event of the scheduler costs while many tenants wait, with shares and without.

    python bench/shares.py [--rounds 9] [--json bench/results/shares.json]

An engine has 64 seats, and each of 100, 1,000 or 10,000 tenants has a job that waits, alone or in teams of
ten. All running sequences have run for a quantum. In that state an event is measured: one more tenant sends a
job, and leaves. With `suspension`, each event compares what tenants hold with their shares, which are by
weight, of teams first. Without, it does not. The difference is the cost of shares.

"parts" is the part of that for the shares alone (`Queue.parts`), by the weights that `LineWeights` has summed
up. The figures are CPU time of the thread: the median of the rounds, each of which takes the median of
`EVENTS` events.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, cast

from fairlead.nodes.limits import NodeLimits
from fairlead.router.dispatch.effects import Effects
from fairlead.router.dispatch.job_spec import JobSpec
from fairlead.router.dispatch.scheduler import Scheduler
from fairlead.router.dispatch.ticket import Ticket
from machine import machine

WAITING = (100, 1_000, 10_000)
SEATS = 64
TEAM = 10
EVENTS = 200
GOAL_US = 1_000  # of an event with 10,000 tenants
FIGURES = ("event_us", "without_us", "parts_us")


def job(number: int, *, in_teams: bool) -> Ticket:
    spec = JobSpec(
        request_id="",
        tenant=f"tenant-{number}",
        model="m",
        prompt_tokens=100,
        max_tokens=100,
        team=f"team-{number // TEAM}" if in_teams else "",
        team_weight=1.0 + number // TEAM % 3 if in_teams else 1.0,
    )
    return Ticket(spec, cost=200.0)


class _NoEffects:
    """Does nothing, whatever is called."""

    def __getattr__(self, name: str) -> "_NoEffects":
        return self

    def __call__(self, *arguments: Any) -> None:
        pass


def waiting(tenants: int, *, in_teams: bool, suspends: bool) -> Scheduler:
    """Return a scheduler in which so many tenants wait; all seats are taken and their quantum is over."""
    effects = cast(Effects, _NoEffects())
    scheduler = Scheduler(
        effects, capacity=2 * tenants + SEATS, random=Random(0), fairness="tokens", suspends=suspends
    )
    scheduler.node_up(
        "engine", frozenset({"m"}), NodeLimits(seats=SEATS, max_model_len=1000, by_sequence=True)
    )
    for number in range(SEATS + tenants):
        scheduler.submit(job(number, in_teams=in_teams))
    for node in scheduler.nodes():
        for run in list(node.runs):
            scheduler.ripened(run.ticket, run.index)
    return scheduler


def event_us(scheduler: Scheduler, *, in_teams: bool) -> float:
    """Return the microseconds of a job that comes and goes, divided by the two events."""

    def come_and_go(number: int) -> None:
        ticket = job(10**6 + number, in_teams=in_teams)
        scheduler.submit(ticket)
        scheduler.leave(ticket)

    return median_us(come_and_go) / 2


def parts_us(scheduler: Scheduler) -> float:
    """Return the microseconds of the shares of the tenants that hold seats."""
    queue = scheduler._queue  # noqa: SLF001  the part that is measured
    (node,) = scheduler.nodes()
    lines = {run.ticket.job.line for run in node.runs}
    return median_us(lambda _: queue.parts("m", lines))


def median_us(call: Callable[[int], Any]) -> float:
    times = []
    for number in range(EVENTS):
        began_ns = time.thread_time_ns()
        call(number)
        times.append(time.thread_time_ns() - began_ns)
    return statistics.median(times) / 1000


def measure(rounds: int) -> list[dict[str, Any]]:
    rows = []
    gc.disable()
    for tenants in WAITING:
        for in_teams in (False, True):
            ours = waiting(tenants, in_teams=in_teams, suspends=True)
            without = waiting(tenants, in_teams=in_teams, suspends=False)
            samples = [
                (
                    event_us(ours, in_teams=in_teams),
                    event_us(without, in_teams=in_teams),
                    parts_us(ours),
                )
                for _ in range(rounds)
            ]
            figures = {
                name: round(statistics.median(column), 1)
                for name, column in zip(FIGURES, zip(*samples, strict=True), strict=True)
            }
            rows.append({"tenants": tenants, "teams": tenants // TEAM if in_teams else 0, **figures})
    gc.enable()
    return rows


def report(rows: list[dict[str, Any]], rounds: int) -> dict[str, Any]:
    most = max(row["event_us"] for row in rows)
    return {
        "benchmark": "shares",
        "machine": machine(),
        "rounds": rounds,
        "seats": SEATS,
        "results": rows,
        "goals": [
            {
                "claim": "an event with 10,000 waiting tenants takes at most 1 ms",
                "goal_us": GOAL_US,
                "measured_us": most,
                "held": most <= GOAL_US,
            }
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    options = parser.parse_args()
    result = report(measure(options.rounds), options.rounds)
    print(f"{'tenants':>9} {'teams':>7} {'event':>9} {'without':>9} {'parts':>9}   microseconds")
    for row in result["results"]:
        figures = "".join(f" {row[name]:9,.1f}" for name in FIGURES)
        print(f"{row['tenants']:9,} {row['teams']:7,}{figures}")
    for goal in result["goals"]:
        print("held  " if goal["held"] else "FAILED", goal["claim"])
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
