"""Which runs there are: a strike at each step, many strikes, and those which reveal a certain mistake."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from distributed.frontends.strikes import FAULTS, Run, Strike, draw_plan, run

ROUTINE = ("heartbeat", "progress")  # frames that are sent every second


def every_frame(seed: int, stride: int = 1) -> Iterator[Run]:
    """Return runs with one strike: at each step of each frame, with each fault, or each of `stride`."""
    plan = draw_plan(seed)
    plain = run(plan)
    yield plain
    routine = turn = 0
    for number, (kind, _) in enumerate(plain.frames, 1):
        routine += kind in ROUTINE
        if kind in ROUTINE and routine > 6:
            continue
        for index, fault in enumerate(FAULTS):
            turn += 1
            if turn % stride:
                continue
            # Targets and times take turns, so that each step is struck with all of them over the seeds.
            target, seconds = (number + index) % 3, (0.6, 2.5, 4.0, 7.0)[(number + seed + index) % 4]
            yield run(plan, (Strike("frame", number, fault, target, seconds),))


def every_task_step(seed: int, stride: int = 1) -> Iterator[Run]:
    """Return runs with one strike between two steps of tasks: each of them, or each of `stride`."""
    plan = draw_plan(seed)
    plain = run(plan)
    for number in range(1 + seed % stride, plain.tasks, stride):
        fault = FAULTS[(number + seed) % len(FAULTS)]
        seconds = (0.6, 2.5, 4.0, 7.0)[(number // len(FAULTS)) % 4]
        yield run(plan, (Strike("task", number, fault, number % 3, seconds),))


def storms(seed: int, runs: int = 4, strikes: int = 100) -> Iterator[Run]:
    """Return runs of a long plan with many strikes between two steps of tasks."""
    plan, random = draw_plan(seed, is_long=True), Random(f"storm {seed}")
    steps = run(plan).tasks
    for _ in range(runs):
        found = [
            Strike(
                "task",
                random.randint(1, steps),
                random.choice(FAULTS),
                random.randrange(3),
                random.choice([0.1, 0.6, 2.5, 4.0, 7.0, 12.0]),
            )
            for _ in range(strikes)
        ]
        yield run(plan, tuple(sorted(found, key=lambda strike: strike.number)))


def directed(*conditions: tuple[str, str, str], seeds: range = range(12), **changes) -> Iterator[Run]:
    """Return runs with one strike for each condition, one after the other; `changes` are those of the plans.

    A condition has the kinds of frames and the moments, both divided by "|", and the fault with its seconds.
    """
    for seed in seeds:
        plan = replace(draw_plan(seed, is_busy=True), **changes)
        yield from _directed(run(plan), conditions, random=Random(seed))


def _directed(before: Run, conditions: tuple[tuple[str, str, str], ...], random: Random) -> Iterator[Run]:
    kinds, moments, fault_and_seconds = conditions[0]
    fault, _, seconds = fault_and_seconds.rpartition(" ")
    first = before.strikes[-1].number if before.strikes else 0
    numbers = [
        number
        for number, (kind, moment) in enumerate(before.frames, 1)
        if number > first and kind in kinds.split("|") and moment in moments.split("|")
    ]
    # A few of them, because a run has many frames of each kind; the next ones after another strike.
    few = numbers[:3] if before.strikes else random.sample(numbers, min(3, len(numbers)))
    for number in sorted(few):
        target = random.randrange(before.plan.fronts)
        strike = Strike("frame", number, fault, target, float(seconds))
        struck = run(before.plan, (*before.strikes, strike))
        if len(conditions) > 1:
            yield from _directed(struck, conditions[1:], random)
        else:
            yield struck
