"""One run of the cancellation fuzz: a plan, struck between two steps of Trio's scheduler, and what it left.

Trio's scheduler is seeded and its clock is virtual, so a plan without strikes always takes the same steps,
and one with strikes takes the same steps up to the first of them: a failure is reproduced by its `Run`.
A strike falls between two steps of tasks, where any other task might have done the same.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf, isclose
from typing import Literal, NamedTuple
from unittest.mock import patch

import trio
import trio._core._run as trio_run
import trio.testing
from structlog.testing import capture_logs

from fairlead.dispatch.dispatcher import FULL_FOR_S, Dispatcher
from fairlead.dispatch.scheduler import Ticket
from fairlead.errors import Cancelled, FairleadError, LoadFailed, NodeFailed
from fairlead.gateway import ATTEMPTS
from fairlead.nodes.attempt import again
from fairlead.nodes.deltas import Deltas
from fairlead.nodes.sink import Sink
from fuzz.mortal_node import History, MortalNode
from fuzz.plan import Plan, Visit
from fuzz.world import World

Kind = Literal["leave", "cancel", "die", "swap", "spoil", "drop", "full", "pause"]

# Virtual; far longer than all jobs of a plan one after the other, with every node away in between.
PATIENCE_S = 1000.0


class Strike(NamedTuple):
    """Before this step a visitor has to leave, or somebody cancels its job by the request id; a node dies,
    swaps its model, will fail to load the next, drops its jobs or turns away; or seconds go by.

    Seconds that go by between two steps are what a busy or a suspended machine looks like from inside.
    `target` is the visitor's or the node's name, or how many seconds.
    """

    step: int
    kind: Kind
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
    again: Callable[[Deltas], Sink | None] = again


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
            world.send_away(strike.target)
        elif strike.kind == "cancel":
            world.cancel(strike.target)
        elif strike.kind == "die":
            world.nodes[int(strike.target)].die()
        elif strike.kind == "swap":
            world.nodes[int(strike.target)].swap()
        elif strike.kind == "spoil":
            world.nodes[int(strike.target)].spoil()
        elif strike.kind == "drop":
            world.nodes[int(strike.target)].drop()
        elif strike.kind == "full":
            world.nodes[int(strike.target)].turn_away()
        else:
            self.clock.jump(float(strike.target))


def run(plan: Plan, strikes: tuple[Strike, ...] = (), parts: Parts = REAL, *, traced: bool = False) -> Run:
    """Run a plan once, struck, and judge what it leaves behind."""
    done = Run(plan, strikes)
    striker = Striker(strikes, traced=traced)
    scenario = partial(_scenario, done, striker, parts)
    with _deterministic(plan.seed), patch("fairlead.gateway.again", parts.again), capture_logs():
        try:
            trio.run(scenario, clock=striker.clock, instruments=[striker], strict_exception_groups=True)
        except Exception as error:  # noqa: BLE001  # whatever a mutant, or a bug, may raise
            done.problems.append(f"crash: {error!r}")
    done.steps, done.trace = striker.steps, striker.trace
    return done


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
        done.problems += _wrong_outcomes(done, world) + _late(done, world) + _left_behind(world)
        done.problems += _wrongly_charged(world)
        if not done.problems and not await _every_seat_is_free(world):
            done.problems.append("leak: a seat cannot be had")


def _wrong_outcomes(done: Run, world: World) -> list[str]:
    """Say who did not get exactly its answer, or an error that it may get."""
    may_leave = {strike.target for strike in done.strikes if strike.kind == "leave"}
    refusals: set[type[FairleadError]] = done.plan.refusals
    if any(node.failures for node in world.nodes):
        refusals |= {LoadFailed}
    problems = []
    for visit in done.plan.visits:
        outcome = world.outcomes.get(visit.name)
        answered = outcome == f"{visit.name} first, {visit.name} last"
        left = outcome is None and visit.name in may_leave
        cancelled = outcome is Cancelled and visit.name in world.cancelled_at
        failed = outcome is NodeFailed and _may_fail(visit, world.histories[visit.name])
        if not answered and not left and not cancelled and not failed and outcome not in refusals:
            problems.append(f"wrong answer: visitor {visit.name} got {outcome}")
    return problems


def _may_fail(visit: Visit, history: History) -> bool:
    """Whether no other attempt would have helped."""
    return history.failures >= ATTEMPTS or (history.lost and visit.stream and not visit.repeatable)


def _wrongly_charged(world: World) -> list[str]:
    """Say whose fairness was charged other than for what its jobs have cost."""
    if any(node.failures for node in world.nodes):
        return []  # a job that had begun and cannot be loaded again costs what was expected of it
    tenants = world.ledger.charged.keys() | world.costs.keys()
    return [
        f"charged: tenant {tenant} {world.ledger.charged[tenant]} instead of {world.costs[tenant]}"
        for tenant in sorted(tenants)
        if not isclose(world.ledger.charged[tenant], world.costs[tenant], abs_tol=1e-6)
    ]


def _late(done: Run, world: World) -> list[str]:
    """Say who stayed after having to leave, or after the job had been cancelled."""
    if any(strike.kind == "pause" for strike in done.strikes):
        return []  # time goes by before anybody could leave
    return [
        f"late: visitor {name} had to leave at {told_at}"
        for name, told_at in (*world.cancelled_at.items(), *world.sent_away_at.items())
        if not world.left_at.get(name, inf) <= told_at
    ]


def _left_behind(world: World) -> list[str]:
    """Say what is not zero, now that everybody has left and before any time has passed."""
    dispatcher = world.dispatcher
    statistics = dispatcher.statistics()
    alarms = sum(not alarm.dropped for _, _, alarm in dispatcher._timer._alarms)
    # The meter's, those of full nodes, and those of wishes, which go on when who made them has left.
    wishes = [granting.alarm for granting in dispatcher._upkeep._wishes.values()]
    alarms -= 1 + len(dispatcher._full) + sum(alarm is not None and not alarm.dropped for alarm in wishes)
    left = {
        "waiting": statistics.waiting,
        "running": statistics.running,
        "held": sum(node.held for node in world.nodes),
        "working": sum(node.working for node in world.nodes),
        "alarms": alarms,
        "tickets": _tickets(dispatcher, set()),
    }
    return [f"leak: {name} {count}" for name, count in left.items() if count]


def _tickets(owner: object, counted: set[int]) -> int:
    """Count the tickets in the containers of the owner and of its parts, whatever these are called."""
    counted.add(id(owner))
    values = vars(owner).values()
    containers = [value for value in values if isinstance(value, dict | set | list | deque)]
    items = [item for container in containers for item in container]
    items += [item for container in containers if isinstance(container, dict) for item in container.values()]
    ours = [value for value in values if type(value).__module__.startswith("fairlead.dispatch.")]
    parts = [value for value in ours if hasattr(value, "__dict__")]
    found = sum(isinstance(item, Ticket) for item in items)
    return found + sum(_tickets(part, counted) for part in parts if id(part) not in counted)


async def _every_seat_is_free(world: World) -> bool:
    """Take all seats of all nodes at once, and not one more, then give them back."""
    with trio.move_on_after(PATIENCE_S):
        while world.dispatcher._upkeep._wishes:  # noqa: ASYNC110  # nothing tells that there are none left
            await trio.sleep(1)
    for node in world.nodes:
        await node.wait_back()
    await trio.sleep(2 * FULL_FOR_S)  # or those that turned somebody away just now have no seats
    job = Visit("canary", "canary", stream=False, arrives_s=0, first_s=0, rest_s=0, model=world.model).job
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
