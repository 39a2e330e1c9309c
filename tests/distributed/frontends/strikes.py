"""One run of a simulated server: a plan of jobs, and faults at given steps. `left_over.py` checks the end.

A fault strikes at a step of a frame, or between two steps of Trio's tasks. Trio's scheduler is seeded and its
clock is virtual, so a run is repeated by its plan and its strikes.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from random import Random
from typing import Literal, NamedTuple

import trio
import trio._core._run as trio_run
import trio.testing
from structlog.testing import capture_logs

from distributed.frontends.left_over import check_end
from distributed.frontends.simulated_server import SimulatedServer
from fairlead.base.errors import FairleadError
from fairlead.base.requester import Requester

LONG_S = 25  # of a long plan, until the last jobs arrive
END_S = 150.0  # until which all jobs have ended
FAULTS = (
    "kill front",
    "kill front unreported",
    "stop front",
    "cut front",
    "deafen front",
    "block front",
    "delay front",
    "detach front",
    "kill dispatcher",
    "stop dispatcher",
    "cut dispatcher",
    "kill engine",
    "stop engine",
)
DELAYING = ("stop front", "deafen front", "block front", "delay front", "stop dispatcher")


class JobPlan(NamedTuple):
    """One job: when it arrives and where, how long it takes, and how often its node rejects it at first.

    `sequences`: how many seats it takes where there are as many.
    """

    name: str
    front: int
    tenant: str
    arrives_s: float
    first_s: float
    rest_s: float
    leaves_after_s: float
    stream: bool
    rejections: int
    priority: int
    tokens: int
    is_cancelled: bool
    sequences: int = 1


@dataclass(frozen=True)
class Plan:
    """Everything but the order in which Trio runs the tasks."""

    seed: int
    fronts: int
    seats: dict[str, int]
    has_lease: bool
    checks_term: bool  # else, a dispatcher sends although it does not lead
    notices_after_s: float
    jobs: tuple[JobPlan, ...]
    keeps_order: bool = True  # no strike delays messages


class Strike(NamedTuple):
    """A fault at a step: the number of a frame's step, or of a task's. `target`: which front or engine."""

    at: Literal["frame", "task"]
    number: int
    fault: str
    target: int = 0
    seconds: float = 1.0


@dataclass
class Run:
    """A run and what was found. `frames` has the kind and the moment of each step of a frame."""

    plan: Plan
    strikes: tuple[Strike, ...] = ()
    problems: list[str] = field(default_factory=list)
    outcomes: dict[str, str] = field(default_factory=dict)
    frames: list[tuple[str, str]] = field(default_factory=list)
    tasks: int = 0
    struck: int = 0


def draw_plan(seed: int, *, is_busy: bool = False, is_long: bool = False) -> Plan:
    """Return the seed's plan.

    A busy one has few seats, long jobs, and no client that leaves; a long one has many jobs.
    """
    random = Random(seed)
    fronts = random.choice([2, 3] if is_busy else [1, 2, 2, 3])
    jobs = tuple(
        JobPlan(
            name=f"{number}",
            front=random.randrange(fronts),
            tenant=random.choice("ABC"),
            arrives_s=random.choice([1.0, 1.0, 1.5, 2.0]) + (random.randrange(LONG_S) if is_long else 0),
            first_s=random.choice([0.0, 0.2]),
            rest_s=random.choice([0.3, 3.5, 3.5] if is_busy else [0.0, 0.3, 1.5]),
            leaves_after_s=inf if is_busy else random.choice([inf, inf, inf, 0.0, 0.4]),
            stream=random.random() < 0.5,
            rejections=random.choice([0, 0, 0, 1, 2]),
            priority=random.choice([0, 1, 1]),
            tokens=random.choice([1, 7]),
            is_cancelled=random.random() < 0.1,
        )
        for number in range(50 if is_long else random.randint(5, 8))
    )
    few, more = [{"x": 1}, {"x": 1, "y": 1}], [{"x": 2}, {"x": 1, "y": 2}]
    seats = random.choice(few if is_busy else few + more)
    if not is_busy:
        wide = Random(~seed)  # so that all else is as without jobs of several sequences
        jobs = tuple(job._replace(sequences=wide.choice([1, 1, 1, 2, 3])) for job in jobs)
    has_lease, checks_term = random.choice([(False, True), (True, True), (True, False)])
    return Plan(seed, fronts, seats, has_lease, checks_term, random.choice([0.0, 0.05, 1.0]), jobs)


class Striker(trio.abc.Instrument):
    """Counts the steps, and applies each strike at its step."""

    def __init__(self, done: Run) -> None:
        self.world: SimulatedServer | None = None
        self._done = done
        self._due: dict[tuple[str, int], list[Strike]] = {}
        for strike in done.strikes:
            self._due.setdefault((strike.at, strike.number), []).append(strike)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._done.tasks += 1
        self._strike("task", self._done.tasks)

    def on_step(self, kind: str, moment: str) -> None:
        self._done.frames.append((kind, moment))
        self._strike("frame", len(self._done.frames))

    def _strike(self, at: str, number: int) -> None:
        if self.world is not None:
            for strike in self._due.get((at, number), ()):
                self._done.struck += 1
                apply(self.world, strike)


def apply(world: SimulatedServer, strike: Strike) -> None:
    """Let a fault happen. One that does not apply now has no effect."""
    fronts, fault, seconds = list(world.fronts.values()), strike.fault, strike.seconds
    engine = world.engines[strike.target % len(world.engines)]
    if fault == "kill dispatcher":
        world.kill_dispatcher()
    elif fault == "stop dispatcher":
        world.stop_dispatcher(seconds)
    elif fault == "kill engine":
        world.kill_engine(engine, 0.0 if seconds < 2 else 0.1)
    elif fault == "stop engine" and engine.is_up and not engine.process.is_stopped:
        engine.process.stop()
        world.nursery.start_soon(_later, seconds, engine.process.resume)
    elif fault == "cut dispatcher":
        for front in fronts:
            _cut(front)
    elif fronts:
        _strike_front(world, fronts[strike.target % len(fronts)], fault, seconds)


def _strike_front(world: SimulatedServer, front, fault: str, seconds: float) -> None:
    if fault == "kill front":
        world.kill_front(front)
    elif fault == "kill front unreported":
        world.kill_front(front, is_reported=False)
    elif fault == "stop front" and not front.process.is_stopped:
        front.process.stop()
        world.nursery.start_soon(_later, seconds, front.process.resume)
    elif fault == "cut front":
        _cut(front)
    elif fault == "deafen front" and front.connection is not None:
        front.connection.is_deaf = True
    elif fault == "block front":
        front.is_blocked = True
        _cut(front)
        world.nursery.start_soon(_later, seconds, partial(setattr, front, "is_blocked", False))
    elif fault == "delay front" and front.connection is not None:
        front.connection.delay_s = min(seconds, 4.0) / 10
        world.nursery.start_soon(_later, seconds, partial(setattr, front.connection, "delay_s", 0.0))
    elif fault == "detach front":
        for connection in list(front.engines.values()):
            connection.end()


def _cut(front) -> None:
    if front.connection is not None:
        front.connection.cut()


async def _later(seconds: float, action) -> None:
    await trio.sleep(seconds)
    action()


def run(plan: Plan, strikes: tuple[Strike, ...] = ()) -> Run:
    """Run a plan once with these strikes, and check it."""
    if any(strike.fault in DELAYING for strike in strikes):
        plan = replace(plan, keeps_order=False)
    done = Run(plan, strikes)
    striker = Striker(done)
    before = trio_run._ALLOW_DETERMINISTIC_SCHEDULING
    trio_run._ALLOW_DETERMINISTIC_SCHEDULING = True
    trio_run._r.seed(plan.seed)
    try:
        with capture_logs() as logs:
            trio.run(
                partial(_play, done, striker),
                clock=trio.testing.MockClock(autojump_threshold=0),
                instruments=[striker],
                strict_exception_groups=True,
            )
        done.problems += [
            f"logged: {line}"
            for line in logs
            if line["event"] in ("task failed", "front sent an invalid message") or "exc_info" in line
        ]
    except Exception as error:  # noqa: BLE001  a bug or a mutant may raise anything
        done.problems.append(f"crash: {_described(error)}")
    finally:
        trio_run._ALLOW_DETERMINISTIC_SCHEDULING = before
    return done


def _described(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return repr(error)


async def _play(done: Run, striker: Striker) -> None:
    async with trio.open_nursery() as nursery:
        world = SimulatedServer(nursery, done.plan, done.problems, striker.on_step)
        world.start()
        striker.world = world
        clients: dict[str, str] = {}
        for job in done.plan.jobs:
            nursery.start_soon(_client, world, job, clients)
        with trio.move_on_after(END_S):
            while len(clients) < len(done.plan.jobs) or "waiting" in clients.values():  # noqa: ASYNC110
                await trio.sleep(0.5)
        striker.world = None
        done.outcomes = clients
        done.problems += [
            f"wrong end: job {name}: {outcome}"
            for name, outcome in clients.items()
            if outcome not in _permitted(next(job for job in done.plan.jobs if job.name == name))
        ]
        done.problems += await check_end(world)
        nursery.cancel_scope.cancel()


def _permitted(job: JobPlan) -> set[str]:
    permitted = {"served", "front died"}
    permitted |= {"left"} if job.leaves_after_s < inf else set()
    return permitted | ({"cancelled"} if job.is_cancelled else set())


async def _client(world: SimulatedServer, job: JobPlan, clients: dict[str, str]) -> None:
    await trio.sleep(job.arrives_s)
    fronts = list(world.fronts.values())
    while not fronts:
        await trio.sleep(0.1)
        fronts = list(world.fronts.values())
    front = fronts[job.front % len(fronts)]
    clients[job.name] = "waiting"
    with trio.CancelScope() as scope:
        front.on_death.append(scope.cancel)
        await front.process.running()
        if job.is_cancelled:
            world.nursery.start_soon(_cancel, world, job)
        clients[job.name] = await front.serve(job)
    if scope.cancelled_caught:
        clients[job.name] = "front died"


async def _cancel(world: SimulatedServer, job: JobPlan) -> None:
    """Cancel the job by its id, through any front."""
    await trio.sleep(0.3)
    for front in list(world.fronts.values())[-1:]:
        try:
            await front.client.cancel(job.name, Requester("A", owner="o"))
        except FairleadError:
            """No dispatcher answers."""
