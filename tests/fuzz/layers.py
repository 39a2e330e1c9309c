"""The runs of the cancellation fuzz: each plan is repeated with a strike at every step in turn."""

import sys
import warnings
from collections.abc import Iterator
from random import Random
from typing import Literal, NamedTuple

from fuzz.cancellation import REAL, Kind, Parts, Run, Strike, run
from fuzz.plan import draw_plan

End = Literal["leave", "cancel"]
ENDS: tuple[End, ...] = ("leave", "cancel")
RETURNS: tuple[Kind, ...] = ("drop", "full")


def every_cut(seed: int, parts: Parts = REAL, ends: tuple[End, ...] = ENDS) -> Iterator[Run]:
    """Layer one: each client in turn disconnects, or is cancelled, at each step of its visit."""
    plan = draw_plan(seed)
    unstruck = run(plan, (), parts)
    yield unstruck
    for name, (first, last) in unstruck.client_steps.items():
        for step in range(first, last + 1):
            for end in ends:
                yield run(plan, (Strike(step, end, name),), parts)


def every_fault(seed: int, parts: Parts = REAL) -> Iterator[Run]:
    """Layer two, with deadlines: at each step each node dies or swaps, or time passes; and random pairs."""
    plan = draw_plan(seed, tight=True)
    unstruck = run(plan, (), parts)
    yield unstruck
    random = Random(seed)
    for step in range(1, unstruck.steps + 1):
        for number in range(len(plan.seats)):
            yield run(plan, (Strike(step, "die", f"{number}"),), parts)
            yield run(plan, (Strike(step, "swap", f"{number}"),), parts)
        yield run(plan, (Strike(step, "pause", "1"),), parts)
        yield from _pairs(random, unstruck, parts)


def every_swap(seed: int, parts: Parts = REAL) -> Iterator[Run]:
    """Layer three: the scheduler swaps two models, because jobs request both; deadlines as in layer two.

    At each step a node dies or fails its next load, or a client leaves or is cancelled; and random pairs.
    """
    plan = draw_plan(seed, tight=True, swapping=True)
    unstruck = run(plan, (), parts)
    yield unstruck
    random = Random(seed)
    for step in range(1, unstruck.steps + 1):
        for number in range(len(plan.seats)):
            yield run(plan, (Strike(step, "die", f"{number}"),), parts)
            yield run(plan, (Strike(step, "spoil", f"{number}"),), parts)
        here = [name for name, (first, last) in unstruck.client_steps.items() if first <= step <= last]
        for end in ENDS if here else ():
            yield run(plan, (Strike(step, end, random.choice(here)),), parts)
        yield from _pairs(random, unstruck, parts)


def every_return(seed: int, parts: Parts = REAL) -> Iterator[Run]:
    """Layer four: at each step a node drops its jobs or turns them away, alone and with a second strike.

    The second strike comes while the jobs move to another node: a client disconnects or is cancelled, or a
    node dies, drops its jobs or turns them away.
    """
    plan = draw_plan(seed, tight=bool(seed % 2))
    unstruck = run(plan, (), parts)
    yield unstruck
    random = Random(seed)
    for step in range(1, unstruck.steps + 1):
        for kind in RETURNS:
            first = Strike(step, kind, f"{random.randrange(len(plan.seats))}")
            yield run(plan, (first,), parts)
            yield run(plan, (first, _draw_leave(random, unstruck, near=step)), parts)
            again: Kind = random.choice([*RETURNS, "die"])
            second = Strike(step + random.randint(0, 9), again, f"{random.randrange(len(plan.seats))}")
            yield run(plan, (first, second), parts)


LAYERS = (every_cut, every_fault, every_swap, every_return)


class Strikes(NamedTuple):
    """The number of runs with strikes, of all runs and of their steps; and the first with a problem."""

    struck: int
    runs: int
    steps: int
    failure: Run | None


def count_strikes(task: tuple[int, int]) -> Strikes:
    """Make all runs of a layer (its number) and a seed, until one has a problem.

    Runs in a separate process, where pytest does not see errors in destructors, so it collects them.
    """
    layer, seed = task
    unheard: list[str] = []
    hook, sys.unraisablehook = sys.unraisablehook, lambda event: unheard.append(repr(event.exc_value))
    struck = runs = steps = 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for done in LAYERS[layer](seed):
                struck, runs, steps = struck + bool(done.strikes), runs + 1, steps + done.steps
                done.problems += unheard
                if done.problems:
                    return Strikes(struck, runs, steps, done)
    finally:
        sys.unraisablehook = hook
    return Strikes(struck, runs, steps, None)


def _pairs(random: Random, unstruck: Run, parts: Parts) -> Iterator[Run]:
    """Make runs with two strikes: a second one near the first, and a second one anywhere."""
    first = _draw_strike(random, unstruck)
    for second in (_draw_leave(random, unstruck, near=first.step), _draw_strike(random, unstruck)):
        yield run(unstruck.plan, (first, second), parts)


def _draw_strike(random: Random, unstruck: Run) -> Strike:
    plan = unstruck.plan
    kind = random.choice(["leave", "leave", "die", "spoil" if plan.swapping else "swap", "pause"])
    if kind == "leave":
        return _draw_leave(random, unstruck)
    target = random.randint(1, 3) if kind == "pause" else random.randrange(len(plan.seats))
    return Strike(random.randint(1, unstruck.steps), kind, f"{target}")


def _draw_leave(random: Random, unstruck: Run, near: int | None = None) -> Strike:
    """Draw a client that disconnects or is cancelled, and a step; with `near`, at most 5 steps later."""
    name = random.choice(list(unstruck.client_steps))
    first, last = unstruck.client_steps[name]
    step = random.randint(first, last) if near is None else near + random.randint(0, 5)
    return Strike(step, random.choice(ENDS), name)
