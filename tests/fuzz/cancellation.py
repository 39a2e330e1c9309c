"""The cancellation fuzz: run a plan again and again, and strike it at every step of Trio's scheduler in turn.

Trio's scheduler is seeded and its clock is virtual, so a plan without strikes always takes the same steps,
and one with strikes takes the same steps up to the first of them: a failure is reproduced by its `Run`.
A strike falls between two steps of tasks, where any other task might have done the same.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Literal, NamedTuple

import trio
import trio._core._run as trio_run
import trio.testing

from fairlead.dispatch.dispatcher import Dispatcher
from fairlead.dispatch.scheduler import Ticket
from fairlead.errors import FairleadError, NodeFailed
from fuzz.world import MortalNode, Plan, Visit, World, draw_plan

# Virtual; far longer than all jobs of a plan one after the other, with every node away in between.
PATIENCE_S = 1000.0


class Strike(NamedTuple):
    """Before this step a visitor has to leave, a node dies or swaps its model, or seconds go by.

    Seconds that go by between two steps are what a busy or a suspended machine looks like from inside.
    `target` is the visitor's or the node's name, or how many seconds.
    """

    step: int
    kind: Literal["leave", "die", "swap", "pause"]
    target: str


@dataclass
class Run:
    """One run of a plan. `stays` says between which steps each visitor was there."""

    plan: Plan
    strikes: tuple[Strike, ...] = ()
    steps: int = 0
    stays: dict[str, tuple[int, int]] = field(default_factory=dict)
    trace: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Parts(NamedTuple):
    """What is under test: the real thing, or a mutant."""

    dispatcher_type: type[Dispatcher] = Dispatcher
    node_type: type[MortalNode] = MortalNode


REAL = Parts()


class Striker(trio.abc.Instrument):
    """Counts the steps and strikes when it is time."""

    def __init__(self, strikes: tuple[Strike, ...], *, traced: bool = False) -> None:
        self.clock = trio.testing.MockClock(autojump_threshold=0)
        self.steps = 0
        self.trace: list[str] = []
        self.world: World | None = None
        self._strikes = strikes
        self._due = {strike.step for strike in strikes}
        self._traced = traced

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.steps += 1
        if self._traced:
            self.trace.append(task.name)
        if self.steps in self._due and self.world is not None:
            for strike in self._strikes:
                if strike.step == self.steps:
                    self._strike(self.world, strike)

    def _strike(self, world: World, strike: Strike) -> None:
        if strike.kind == "leave":
            if strike.target in world.doors:
                world.doors[strike.target].cancel()
        elif strike.kind == "die":
            world.nodes[int(strike.target)].die()
        elif strike.kind == "swap":
            world.nodes[int(strike.target)].swap()
        else:
            self.clock.jump(float(strike.target))


def run(plan: Plan, strikes: tuple[Strike, ...] = (), parts: Parts = REAL, *, traced: bool = False) -> Run:
    """Run a plan once, struck, and judge what it leaves behind."""
    done = Run(plan, strikes)
    striker = Striker(strikes, traced=traced)
    scenario = partial(_scenario, done, striker, parts)
    with _deterministic(plan.seed):
        try:
            trio.run(scenario, clock=striker.clock, instruments=[striker], strict_exception_groups=True)
        except Exception as error:  # noqa: BLE001  # whatever a mutant, or a bug, may raise
            done.problems.append(f"crash: {error!r}")
    done.steps, done.trace = striker.steps, striker.trace
    return done


def every_cut(seed: int, parts: Parts = REAL) -> Iterator[Run]:
    """Layer one: each visitor in turn has to leave at each step at which it is there."""
    plan = draw_plan(seed)
    unstruck = run(plan, (), parts)
    yield unstruck
    for name, (first, last) in unstruck.stays.items():
        for step in range(first, last + 1):
            yield run(plan, (Strike(step, "leave", name),), parts)


def every_fault(seed: int, parts: Parts = REAL) -> Iterator[Run]:
    """Layer two, with deadlines: at each step each node dies or swaps, or time goes by; and random pairs."""
    plan = draw_plan(seed, tight=True)
    unstruck = run(plan, (), parts)
    yield unstruck
    random = Random(seed)
    for step in range(1, unstruck.steps + 1):
        for number in range(len(plan.seats)):
            yield run(plan, (Strike(step, "die", f"{number}"),), parts)
            yield run(plan, (Strike(step, "swap", f"{number}"),), parts)
        yield run(plan, (Strike(step, "pause", "1"),), parts)
        first = _draw_strike(random, plan, unstruck)
        for second in (_draw_leave(random, unstruck, near=first.step), _draw_strike(random, plan, unstruck)):
            yield run(plan, (first, second), parts)


def _draw_strike(random: Random, plan: Plan, unstruck: Run) -> Strike:
    kind = random.choice(["leave", "leave", "die", "swap", "pause"])
    if kind == "leave":
        return _draw_leave(random, unstruck)
    target = random.randint(1, 3) if kind == "pause" else random.randrange(len(plan.seats))
    return Strike(random.randint(1, unstruck.steps), kind, f"{target}")


def _draw_leave(random: Random, unstruck: Run, near: int | None = None) -> Strike:
    """Draw who leaves, and when; with `near`, within a few steps of that one."""
    name = random.choice(list(unstruck.stays))
    first, last = unstruck.stays[name]
    step = random.randint(first, last) if near is None else near + random.randint(0, 5)
    return Strike(step, "leave", name)


async def _scenario(done: Run, striker: Striker, parts: Parts) -> None:
    world = World(done.plan, done.problems, parts.dispatcher_type, parts.node_type)

    async def stay(visit: Visit) -> None:
        first = striker.steps + 1
        await world.receive(visit)
        done.stays[visit.name] = first, striker.steps

    async with world.open():
        striker.world = world
        with trio.move_on_after(PATIENCE_S) as patience:
            async with trio.open_nursery() as visitors:
                for visit in done.plan.visits:
                    visitors.start_soon(stay, visit)
        if patience.cancelled_caught:
            done.problems.append("hang: a visitor never left")
        striker.world = None
        await trio.testing.wait_all_tasks_blocked()
        done.problems += _wrong_outcomes(done, world) + _left_behind(world)
        if not done.problems and not await _every_seat_is_free(world):
            done.problems.append("leak: a seat cannot be had")


def _wrong_outcomes(done: Run, world: World) -> list[str]:
    """Say who did not get exactly its answer, or an error that it may get."""
    may_leave = {strike.target for strike in done.strikes if strike.kind == "leave"}
    refusals: set[type[FairleadError]] = done.plan.refusals
    if any(node.deaths for node in world.nodes):
        refusals |= {NodeFailed}
    problems = []
    for visit in done.plan.visits:
        outcome = world.outcomes.get(visit.name)
        answered = outcome == f"{visit.name} first, {visit.name} last"
        left = outcome is None and visit.name in may_leave
        if not answered and not left and outcome not in refusals:
            problems.append(f"wrong answer: visitor {visit.name} got {outcome}")
    return problems


def _left_behind(world: World) -> list[str]:
    """Say what is not zero, now that everybody has left and before any time has passed."""
    statistics = world.dispatcher.statistics()
    left = {
        "waiting": statistics.waiting,
        "running": statistics.running,
        "held": sum(node.held for node in world.nodes),
        "working": sum(node.working for node in world.nodes),
        "tickets": sum(map(_tickets, (world.dispatcher, world.dispatcher._scheduler))),
    }
    return [f"leak: {name} {count}" for name, count in left.items() if count]


def _tickets(owner: object) -> int:
    """Count the tickets in the owner's own containers, whatever these are called."""
    containers = [value for value in vars(owner).values() if isinstance(value, dict | set | list | deque)]
    items = [item for container in containers for item in container]
    items += [item for container in containers if isinstance(container, dict) for item in container.values()]
    return sum(isinstance(item, Ticket) for item in items)


async def _every_seat_is_free(world: World) -> bool:
    """Take all seats of all nodes at once, and not one more, then give them back."""
    for node in world.nodes:
        await node.wait_back()
    job = Visit("canary", "canary", stream=False, arrives_s=0, first_s=0, rest_s=0).job
    with trio.move_on_after(PATIENCE_S) as patience:
        async with AsyncExitStack() as stack:
            for _ in range(sum(world.plan.seats)):
                await stack.enter_async_context(world.dispatcher.seat(job))
            full = world.dispatcher.statistics()
            if full.running != full.seats:
                return False
    await trio.testing.wait_all_tasks_blocked()
    return not patience.cancelled_caught and not _left_behind(world)


@contextmanager
def _deterministic(seed: int) -> Iterator[None]:
    """Make Trio take its steps in an order that depends on the seed alone."""
    before = trio_run._ALLOW_DETERMINISTIC_SCHEDULING
    trio_run._ALLOW_DETERMINISTIC_SCHEDULING = True
    trio_run._r.seed(seed)
    try:
        yield
    finally:
        trio_run._ALLOW_DETERMINISTIC_SCHEDULING = before
