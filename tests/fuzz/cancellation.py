"""One run of the cancellation fuzz: execute a plan with strikes, then check what it leaves behind.

A strike is an event that is injected between two task steps, where any other task could have caused it.
Trio's scheduler is seeded and its clock is virtual, so a plan always takes the same steps until its first
strike. A failure is therefore reproduced by its `Run`.
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

from fairlead.base.errors import Cancelled, FairleadError, LoadFailed, NodeFailed
from fairlead.generation.gateway import ATTEMPTS, spec_of
from fairlead.nodes.streams.attempt import retry_sink
from fairlead.nodes.streams.sink import Sink
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.dispatch.fullness import LONGEST_PAUSE_S
from fairlead.router.dispatch.ticket import Ticket
from fuzz.crashing_node import CrashingNode, History
from fuzz.plan import ClientPlan, Plan
from fuzz.simulated_system import SimulatedSystem

Kind = Literal["leave", "cancel", "die", "swap", "spoil", "drop", "full", "pause"]

# Virtual time. Longer than all jobs of a plan in sequence, with every node away in between.
TIMEOUT_S = 1000.0


class Strike(NamedTuple):
    """An event that is injected before this step.

    A client disconnects, or its job is cancelled by request id. A node dies, swaps its model, fails its next
    load, drops its jobs or rejects jobs. Or the clock jumps, as on a busy or a suspended machine.
    `target` is the name of the client or the node, or the number of seconds.
    """

    step: int
    kind: Kind
    target: str


@dataclass
class Run:
    """One run of a plan. `client_steps` has the first and the last step of each client."""

    plan: Plan
    strikes: tuple[Strike, ...] = ()
    steps: int = 0
    client_steps: dict[str, tuple[int, int]] = field(default_factory=dict)
    trace: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Parts(NamedTuple):
    """The parts under test: the real ones, or mutants."""

    dispatcher_type: type[Dispatcher] = Dispatcher
    node_type: type[CrashingNode] = CrashingNode
    retry_sink: Callable[..., Sink | None] = retry_sink


REAL = Parts()


class Striker(trio.abc.Instrument):
    """Counts the steps, and applies each strike before its step."""

    def __init__(self, strikes: tuple[Strike, ...], *, traced: bool = False) -> None:
        self.clock = trio.testing.MockClock(autojump_threshold=0)
        self.steps = 0
        self.trace: list[str] = []
        self.system: SimulatedSystem | None = None
        self._strikes = strikes
        self._due = {strike.step for strike in strikes}
        self._traced = traced

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.steps += 1
        if self._traced:
            self.trace.append(task.name)
        if self.steps in self._due and self.system is not None:
            for strike in self._strikes:
                if strike.step == self.steps:
                    self._strike(self.system, strike)

    def _strike(self, system: SimulatedSystem, strike: Strike) -> None:
        if strike.kind == "leave":
            system.disconnect_client(strike.target)
        elif strike.kind == "cancel":
            system.cancel(strike.target)
        elif strike.kind == "die":
            system.nodes[int(strike.target)].die()
        elif strike.kind == "swap":
            system.nodes[int(strike.target)].swap()
        elif strike.kind == "spoil":
            system.nodes[int(strike.target)].spoil()
        elif strike.kind == "drop":
            system.nodes[int(strike.target)].drop()
        elif strike.kind == "full":
            system.nodes[int(strike.target)].refuse_jobs()
        else:
            self.clock.jump(float(strike.target))


def run(plan: Plan, strikes: tuple[Strike, ...] = (), parts: Parts = REAL, *, traced: bool = False) -> Run:
    """Run a plan once with these strikes, and check what it leaves behind."""
    done = Run(plan, strikes)
    striker = Striker(strikes, traced=traced)
    scenario = partial(_scenario, done, striker, parts)
    with (
        _deterministic(plan.seed),
        patch("fairlead.generation.gateway.retry_sink", parts.retry_sink),
        capture_logs(),
    ):
        try:
            trio.run(scenario, clock=striker.clock, instruments=[striker], strict_exception_groups=True)
        except Exception as error:  # noqa: BLE001  # a mutant or a bug may raise anything
            done.problems.append(f"crash: {error!r}")
    done.steps, done.trace = striker.steps, striker.trace
    return done


async def _scenario(done: Run, striker: Striker, parts: Parts) -> None:
    system = SimulatedSystem(done.plan, done.problems, parts.dispatcher_type, parts.node_type)

    async def run_client(client_plan: ClientPlan) -> None:
        first = striker.steps + 1
        await system.receive(client_plan)
        done.client_steps[client_plan.name] = first, striker.steps

    async with system.open():
        striker.system = system
        with trio.move_on_after(TIMEOUT_S) as scope:
            async with trio.open_nursery() as clients:
                for client_plan in done.plan.client_plans:
                    clients.start_soon(run_client, client_plan)
        if scope.cancelled_caught:
            done.problems.append("hang: a client never ended")
        striker.system = None
        await trio.testing.wait_all_tasks_blocked()
        done.problems += _wrong_outcomes(done, system) + _late(done, system) + _left_behind(system)
        done.problems += _wrongly_charged(system)
        if not done.problems and not await _every_seat_is_free(system):
            done.problems.append("leak: a seat cannot be acquired")


def _wrong_outcomes(done: Run, system: SimulatedSystem) -> list[str]:
    """Return a problem for each client that got neither its exact answer nor a permitted error."""
    may_leave = {strike.target for strike in done.strikes if strike.kind == "leave"}
    refusals: set[type[FairleadError]] = done.plan.refusals
    if any(node.failures for node in system.nodes):
        refusals |= {LoadFailed}
    problems = []
    for client_plan in done.plan.client_plans:
        outcome = system.outcomes.get(client_plan.name)
        answered = outcome == f"{client_plan.name} first, {client_plan.name} last"
        left = outcome is None and client_plan.name in may_leave
        cancelled = outcome is Cancelled and client_plan.name in system.cancelled_at
        failed = outcome is NodeFailed and _may_fail(client_plan, system.histories[client_plan.name])
        if not answered and not left and not cancelled and not failed and outcome not in refusals:
            problems.append(f"wrong answer: client {client_plan.name} got {outcome}")
    return problems


def _may_fail(client_plan: ClientPlan, history: History) -> bool:
    """Return whether no attempt was left, or an unrepeatable stream had begun."""
    return history.failures >= ATTEMPTS or (
        history.lost and client_plan.stream and not client_plan.repeatable
    )


def _wrongly_charged(system: SimulatedSystem) -> list[str]:
    """Return a problem for each tenant that was not charged exactly the cost of its jobs."""
    if any(node.failures for node in system.nodes):
        return []  # a job that had begun is charged its estimate if the model cannot be loaded again
    tenants = system.ledger.charged.keys() | system.costs.keys()
    return [
        f"charged: tenant {tenant} {system.ledger.charged[tenant]} instead of {system.costs[tenant]}"
        for tenant in sorted(tenants)
        if not isclose(system.ledger.charged[tenant], system.costs[tenant], abs_tol=1e-6)
    ]


def _late(done: Run, system: SimulatedSystem) -> list[str]:
    """Return a problem for each client that stayed after it had to disconnect, or was cancelled."""
    if any(strike.kind == "pause" for strike in done.strikes):
        return []  # time passes before any client can leave
    return [
        f"late: client {name} had to disconnect at {cancelled_at_s}"
        for name, cancelled_at_s in (*system.cancelled_at.items(), *system.disconnected_at.items())
        if not system.left_at.get(name, inf) <= cancelled_at_s
    ]


def _left_behind(system: SimulatedSystem) -> list[str]:
    """Return each count that is not zero after all clients have left, before any time has passed."""
    dispatcher = system.dispatcher
    statistics = dispatcher.statistics()
    alarms = sum(not alarm.dropped for _, _, alarm in dispatcher._timer._alarms)
    # The regular charge, full nodes, load requests and seats that were left keep their alarms. A load request
    # outlives its callers.
    loads = [load.alarm for load in dispatcher.models._loads.values()] + [dispatcher._resting.alarm]
    kept = len(dispatcher._pauses) + len(dispatcher._failed)
    alarms -= 1 + kept + sum(alarm is not None and not alarm.dropped for alarm in loads)
    left = {
        "waiting": statistics.waiting,
        "running": statistics.running,
        "held": sum(node.held for node in system.nodes),
        "working": sum(node.working for node in system.nodes),
        "alarms": alarms,
        "tickets": _tickets(dispatcher, set()),
    }
    return [f"leak: {name} {count}" for name, count in left.items() if count]


def _tickets(owner: object, counted: set[int]) -> int:
    """Count the tickets in all containers of the owner and of its parts, under any attribute name."""
    counted.add(id(owner))
    values = vars(owner).values()
    containers = [value for value in values if isinstance(value, dict | set | list | deque)]
    items = [item for container in containers for item in container]
    items += [item for container in containers if isinstance(container, dict) for item in container.values()]
    ours = [value for value in values if type(value).__module__.startswith("fairlead.router.dispatch.")]
    parts = [value for value in ours if hasattr(value, "__dict__")]
    found = sum(isinstance(item, Ticket) for item in items)
    return found + sum(_tickets(part, counted) for part in parts if id(part) not in counted)


async def _every_seat_is_free(system: SimulatedSystem) -> bool:
    """Take all seats at once, then release them. Return whether that succeeded and left nothing behind."""
    with trio.move_on_after(TIMEOUT_S):
        while system.dispatcher.models._loads:  # noqa: ASYNC110  # no event reports that none are left
            await trio.sleep(1)
    for node in system.nodes:
        await node.wait_back()
    await trio.sleep(LONGEST_PAUSE_S + 1)  # until then a node that rejected a job has no seats
    job = ClientPlan(
        "canary", "canary", stream=False, arrives_s=0, first_s=0, rest_s=0, model=system.model
    ).job
    with trio.move_on_after(TIMEOUT_S) as scope:
        async with AsyncExitStack() as stack:
            for _ in range(sum(system.plan.seats)):
                await stack.enter_async_context(system.dispatcher.seat(spec_of(job)))
            full = system.dispatcher.statistics()
            if full.running != full.seats:
                return False
    await trio.testing.wait_all_tasks_blocked()
    return not scope.cancelled_caught and not _left_behind(system)


@contextmanager
def _deterministic(seed: int) -> Iterator[None]:
    """Make the order of Trio's steps depend on the seed alone."""
    before = trio_run._ALLOW_DETERMINISTIC_SCHEDULING
    trio_run._ALLOW_DETERMINISTIC_SCHEDULING = True
    trio_run._r.seed(seed)
    try:
        yield
    finally:
        trio_run._ALLOW_DETERMINISTIC_SCHEDULING = before
