"""Measure the operations of the fair queue, compared with implementations in Python.

    python bench/fair_queue.py [--rounds 9] [--json bench/results/fair_queue.json] [--against OLD.so]

100, 10,000, 100,000 and 1,000,000 entries of 100 tenants wait, with turns by request and by token, also
with the tenants in ten teams. It reports the nanoseconds for a push and a pop together, and for cancelling an
entry in the middle. The medians of the rounds and their ratios are reported.

Cancelling is measured in four ways:

- "cancel": half of the queue, at most 5,000 entries, at random. If the queue is larger than the processor's
  cache, each entry, the entries next to it and its handle (an integer object) are cache misses.
- "at hand": half of the queue in random order. The handles are read just before, a thousand at a time. This
  is the case in service, where the cancelling task has just read its handle. Each size runs in a new process,
  because a server has one queue, without the heap fragments of many earlier ones.
- "cold": the first thousand entries of "at hand". The pushes were the last accesses to their memory.
- "empty": the handles of "cancel", discarded from an empty queue. This is the cost of the calls and handles.

`GOALS` say how much longer an operation may take in a longer queue.

With `--against`, it only compares a push with a pop, and a cancel, with those of another build of the kernel,
and with teams with those without: all in one process, in turn, so that what else the machine does concerns
all.
"""

import argparse
import gc
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fairlead._cext.fairqueue import FairQueue
from machine import machine

TENANTS = [f"tenant-{number}" for number in range(100)]
IN_TEAMS = [(f"team-{number % 10}", tenant) for number, tenant in enumerate(TENANTS)]
WAITING = (100, 10_000, 100_000, 1_000_000)
PAIRS = 10_000
AT_HAND = 1_000
AT_HAND_QUEUES = 5  # the minimum over all rounds


FIGURES = {
    "pair_ns": "push+pop",
    "cancel_ns": "cancel",
    "at_hand_ns": "at hand",
    "cold_ns": "cold",
    "empty_ns": "empty",
}


class Kernel:
    """A queue with this number of entries."""

    label = "round robin"  # a key of the result
    fairness: Literal["roundRobin", "tokens"] = "roundRobin"
    tenants: Sequence[Any] = TENANTS
    new_queue = FairQueue

    def __init__(self, waiting: int) -> None:
        self.queue = self.new_queue(capacity=waiting + 1, fairness=self.fairness)
        self.entries = [self.queue.push(self.tenants[number % 100]) for number in range(waiting)]

    def push_and_pop(self, tenants: Sequence[Any]) -> None:
        push, pop = self.queue.push, self.queue.pop
        for tenant in tenants:
            push(tenant)
            pop()

    def cancel(self, entries: Sequence[int]) -> None:
        discard = self.queue.discard
        for entry in entries:
            discard(entry)

    def empty(self) -> None:
        self.queue.clear()


class KernelByTokens(Kernel):
    """A queue with token fairness."""

    label = "tokens"
    fairness = "tokens"


class KernelWithTeams(Kernel):
    """A queue whose tenants are in ten teams."""

    label = "round robin, ten teams"
    tenants = IN_TEAMS


class KernelWithTeamsByTokens(KernelByTokens):
    """A queue with token fairness whose tenants are in ten teams."""

    label = "tokens, ten teams"
    tenants = IN_TEAMS


KERNELS = (Kernel, KernelByTokens)
ALL_KERNELS = (*KERNELS, KernelWithTeams, KernelWithTeamsByTokens)


class Goal(NamedTuple):
    """The figure of the kernel takes at most twice as long with `long` entries as with `short`."""

    claim: str
    figure: str
    short: int
    long: int


GOALS = (
    Goal("push and pop: 1000 times the entries take at most twice the time", "pair_ns", 100, 100_000),
    Goal(
        "push and pop: a million entries take at most twice the time of 10,000", "pair_ns", 10_000, 1_000_000
    ),
    Goal(
        "cancel, handles at hand: 10 times the entries take at most twice the time",
        "at_hand_ns",
        10_000,
        100_000,
    ),
)

Times = dict[tuple[type[Kernel], str, int], list[float]]


def measure(rounds: int) -> Times:
    """Return nanoseconds per operation, one figure a round, by (kernel, figure, entries waiting)."""
    times: Times = defaultdict(list)
    gc.disable()  # collecting the garbage of earlier queues must not count
    for round_number in range(rounds):
        for waiting in WAITING:
            for new_kernel in ALL_KERNELS:
                pair_ns, cancel_ns = measure_once(new_kernel, waiting, seed=round_number)
                times[new_kernel, "pair_ns", waiting].append(pair_ns)
                times[new_kernel, "cancel_ns", waiting].append(cancel_ns)
            for new_kernel in KERNELS if waiting > AT_HAND else ():
                queues = -(-AT_HAND_QUEUES // rounds)
                seeds = range(round_number * queues, (round_number + 1) * queues)
                with get_context("spawn").Pool(1) as of_its_own:
                    at_hand_ns, cold_ns = of_its_own.apply(cancelled_at_hand_ns, (new_kernel, waiting, seeds))
                times[new_kernel, "at_hand_ns", waiting].append(at_hand_ns)
                times[new_kernel, "cold_ns", waiting].append(cold_ns)
                empty_ns = discarded_from_empty_ns(new_kernel, waiting, seed=round_number)
                times[new_kernel, "empty_ns", waiting].append(empty_ns)
    gc.enable()
    return times


def measure_once(new_kernel: type[Kernel], waiting: int, *, seed: int) -> tuple[float, float]:
    """Return the nanoseconds of a push with a pop, and of a cancel."""
    rng = random.Random(seed)
    tenants = rng.choices(new_kernel.tenants, k=PAIRS)
    pair_ns = elapsed_ns(new_kernel(waiting).push_and_pop, tenants) / PAIRS
    cancelled = min(waiting // 2, 5_000)
    kernels = [new_kernel(waiting) for _ in range(max(500 // cancelled, 1) if waiting < 100_000 else 1)]
    cancel_ns = sum(elapsed_ns(kernel.cancel, rng.sample(kernel.entries, cancelled)) for kernel in kernels)
    return pair_ns, cancel_ns / (cancelled * len(kernels))


def cancelled_at_hand_ns(new_kernel: type[Kernel], waiting: int, seeds: Sequence[int]) -> tuple[float, float]:
    """Return nanoseconds per entry of half of a queue, and of its first thousand; one queue per seed."""
    elapsed = cold = cancelled = 0
    for seed in seeds:
        kernel = new_kernel(waiting)
        chosen = random.Random(seed).sample(kernel.entries, waiting // 2)
        for first in range(0, len(chosen), AT_HAND):
            some = chosen[first : first + AT_HAND]
            assert sum(some) > 0  # reads each handle
            took = elapsed_ns(kernel.cancel, some)
            elapsed += took
            cold += 0 if first else took
        cancelled += len(chosen)
    return elapsed / cancelled, cold / (AT_HAND * len(seeds))


def discarded_from_empty_ns(new_kernel: type[Kernel], waiting: int, *, seed: int) -> float:
    kernel = new_kernel(waiting)
    chosen = random.Random(seed).sample(kernel.entries, min(waiting // 2, 5_000))
    kernel.empty()
    return elapsed_ns(kernel.cancel, chosen) / len(chosen)


def elapsed_ns(work: Callable[[Sequence[Any]], None], items: Sequence[Any]) -> int:
    # The thread's CPU time excludes other processes on the core.
    begin_ns = time.thread_time_ns()
    work(items)
    return time.thread_time_ns() - begin_ns


def compare(other_build: Path, rounds: int) -> dict[str, Any]:
    """Print and return the times of the other build, of this one, and of this one with ten teams.

    The ratios are medians over the rounds: of this build to the other without teams, and of teams to none.
    """
    loader = ExtensionFileLoader("fairlead._cext.fairqueue", str(other_build))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    other = module_from_spec(spec)
    loader.exec_module(other)
    headings = ("waiting", "before", "now", "now/before", "teams", "teams/none")
    print(f"{'nanoseconds':32}" + "".join(f" {heading:>11}" for heading in headings))
    gc.disable()
    rows: list[dict[str, Any]] = []
    for kernel, with_teams in zip(KERNELS, ALL_KERNELS[len(KERNELS) :], strict=True):
        before = type(kernel.__name__, (kernel,), {"new_queue": other.FairQueue})
        for waiting in WAITING[:-1]:
            # The fastest of many rounds is what the code takes; the others are what the machine did besides.
            measured = [
                [measure_once(each, waiting, seed=i) for each in (before, kernel, with_teams)]
                for i in range(rounds)
            ]
            for index, what in enumerate(("push+pop", "cancel")):
                old, new, teams = (min(one[which][index] for one in measured) for which in range(3))
                ratio, of_teams = (
                    statistics.median(one[over][index] / one[under][index] for one in measured)
                    for over, under in ((1, 0), (2, 1))
                )
                row = {
                    "before_ns": old,
                    "now_ns": new,
                    "ratio": ratio,
                    "teams_ns": teams,
                    "teams_ratio": of_teams,
                }
                print(
                    f"{kernel.label + ', ' + what:32} {waiting:11,} {old:11,.1f} {new:11,.1f} {ratio:11.3f}"
                    f" {teams:11,.1f} {of_teams:11.3f}"
                )
                rows.append(
                    {"fairness": kernel.label, "what": what, "waiting": waiting}
                    | {name: round(value, 3) for name, value in row.items()}
                )
    return {
        "benchmark": "fair_queue, against another build",
        "machine": machine(),
        "rounds": rounds,
        "results": rows,
    }


# The report ----------------------------------------------------------------------------------------


def report(times: Times, rounds: int) -> dict[str, Any]:
    medians = {key: statistics.median(samples) for key, samples in times.items() if samples}
    return {
        "benchmark": "fair_queue",
        "machine": machine(),
        "rounds": rounds,
        "tenants": len(TENANTS),
        "results": [
            {
                "fairness": new_kernel.label,
                "waiting": waiting,
                **{
                    what: {"median": round(medians[key], 1), "worst": round(max(times[key]), 1)}
                    for what in FIGURES
                    for key in [(new_kernel, what, waiting)]
                    if times.get(key)
                },
            }
            for waiting in WAITING
            for new_kernel in ALL_KERNELS
        ],
        "goals": [
            {"claim": goal.claim, "goal_ratio": 2, "measured_ratio": round(ratio, 2), "held": ratio <= 2}
            for goal in GOALS
            for ratio in [medians[Kernel, goal.figure, goal.long] / medians[Kernel, goal.figure, goal.short]]
        ],
    }


def print_tables(result: dict[str, Any]) -> None:
    headings = "".join(f" {heading:>12}" for heading in FIGURES.values())
    print(f"{'nanoseconds':32} {'waiting':>9}{headings}")
    for row in result["results"]:
        figures = [f"{row[what]['median']:,.0f}" if what in row else "" for what in FIGURES]
        print(f"{row['fairness']:32} {row['waiting']:9,}" + "".join(f" {figure:>12}" for figure in figures))
    print()
    for row in result["goals"]:
        verdict = "held" if row["held"] else "FAILED"
        print(f"{verdict:7} {row['measured_ratio']:9,.2f} (at most {row['goal_ratio']}) {row['claim']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with this build of the kernel")
    options = parser.parse_args()
    if options.against:
        result = compare(options.against, options.rounds)
    else:
        result = report(measure(options.rounds), options.rounds)
        print_tables(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
