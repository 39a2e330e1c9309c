"""A small world on a virtual clock: nodes, the real hand-off before them, and visitors with one job each.

`World` is the only place that puts the real parts together. A `Plan` is drawn from a seed and says all that
will happen, but for the order in which the scheduler lets it happen, and what strikes it. Times are small
whole seconds, so that arrivals, answers and deadlines often fall on the very same instant.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random

import trio

from fairlead.api.exchange import unwrap
from fairlead.config import QueueConfig
from fairlead.dispatch.dispatcher import Dispatcher
from fairlead.errors import Displaced, FairleadError, NodeFailed, QueueFull, QueueTimeout, RequestTimeout
from fairlead.gateway import Gateway
from fairlead.job import Delta, Job, Sampling
from fairlead.nodes.deltas import Deltas
from fairlead.nodes.node import NodeLimits

MODEL = "asked for"
OTHER_MODEL = "swapped in"
NEVER_S = 1e6


@dataclass(frozen=True)
class Visit:
    """One visitor's job, and how long a node takes for it."""

    name: str
    tenant: str
    stream: bool
    arrives_s: int
    first_s: int
    rest_s: int

    @property
    def job(self) -> Job:
        sampling = Sampling(max_tokens=10)
        prompt = ([1, 2, 3],)
        return Job(self.name, self.tenant, MODEL, prompt, sampling, stream=self.stream, request_id=self.name)


@dataclass(frozen=True)
class Plan:
    """What will happen. `seats` of each node; a node that is struck comes back after `away_s`."""

    seed: int
    visits: tuple[Visit, ...]
    seats: tuple[int, ...]
    away_s: int = 1
    capacity: int = 100
    queue_timeout_s: float = NEVER_S
    request_timeout_s: float = NEVER_S

    @property
    def refusals(self) -> set[type[FairleadError]]:
        """The errors that a visitor may get although nobody struck."""
        return {
            *([QueueFull, Displaced] if self.capacity < len(self.visits) else []),
            *([QueueTimeout] if self.queue_timeout_s < NEVER_S else []),
            *([RequestTimeout] if self.request_timeout_s < NEVER_S else []),
        }


def draw_plan(seed: int, *, tight: bool = False) -> Plan:
    """Return the seed's plan. Without `tight` there is room and time enough for everybody."""
    random = Random(seed)
    visits = tuple(
        Visit(
            name=f"{number}",
            tenant=random.choice("ABC"),
            stream=random.random() < 0.5,
            arrives_s=random.choice([0, 0, 0, 1, 2]),
            first_s=random.choice([0, 0, 1]),
            rest_s=random.choice([0, 1, 2]),
        )
        for number in range(random.randint(2, 6))
    )
    seats = random.choice([(1,), (1,), (2,), (1, 1), (1, 2)])
    if not tight:
        return Plan(seed, visits, seats)
    return Plan(
        seed,
        visits,
        seats,
        away_s=random.choice([1, 2]),  # not 0: who was granted a seat gets there before the node is back
        capacity=random.choice([0, 1, 2, 100]),
        queue_timeout_s=random.choice([0, 1, 2, 3, NEVER_S]),
        request_timeout_s=random.choice([0, 1, 2, 3, NEVER_S]),
    )


class MortalNode:
    """Answers from a task of its own, as the engine does, and can die or swap its model at any step.

    Checks what a node can see: no job twice, no more jobs at once than seats, none for another model.
    Work that was aborted ends at once; `working` counts what has not ended.
    """

    def __init__(self, name: str, plan: Plan, listener: Dispatcher, problems: list[str]) -> None:
        self.id = name
        self.models: frozenset[str] = frozenset()
        self.is_up = False
        self.working = 0
        self.deaths = 0
        self._plan = plan
        self._limits = NodeLimits(seats=plan.seats[int(name)], max_model_len=1000)
        self._times = {visit.name: visit for visit in plan.visits}
        self._listener = listener
        self._problems = problems
        self._served: set[str] = set()
        self._holders: dict[str, tuple[Deltas, trio.CancelScope]] = {}
        self._leaving = 0  # who held a seat of an earlier life, and does not know yet
        self._future: list[str] = [MODEL]
        self._struck = trio.Event()
        self._back = trio.Event()
        self._nursery: trio.Nursery

    @property
    def held(self) -> int:
        """Seats that somebody has not left, those of earlier lives included."""
        return len(self._holders) + self._leaving

    async def run(self) -> None:
        """Come up; after each strike go away and come back, in the end always with the model asked for."""
        async with trio.open_nursery() as self._nursery:
            while True:
                for model in self._future:
                    if self.deaths:
                        self._go_down()
                        await trio.sleep(self._plan.away_s)
                    self._come_up(model)
                    if model == OTHER_MODEL:
                        await trio.sleep(self._plan.away_s)
                self._back.set()
                await self._struck.wait()

    async def wait_back(self) -> None:
        """Wait until it holds the model asked for."""
        await self._back.wait()

    def die(self) -> None:
        """Lose all jobs now, and the seats with them; come back later."""
        self._strike([MODEL])

    def swap(self) -> None:
        """As `die`, but come back with another model first."""
        self._strike([OTHER_MODEL, MODEL])

    @asynccontextmanager
    async def generate(self, job: Job) -> AsyncIterator[Deltas]:
        if not self.is_up:
            raise NodeFailed("the node is away")
        deltas, work, holders = Deltas(job.sequences), trio.CancelScope(), self._holders
        self._check(job)
        holders[job.id] = deltas, work
        self._nursery.start_soon(self._answer, self._times[job.id], deltas, work)
        try:
            yield deltas
        finally:
            if holders is self._holders:
                del holders[job.id]
            else:
                self._leaving -= 1
            self.abort(work)

    def abort(self, work: trio.CancelScope) -> None:
        """End work whose job is over. Synchronous, as the engine's."""
        work.cancel()

    def _check(self, job: Job) -> None:
        if job.id in self._served:
            self._problems.append(f"double grant: job {job.id}")
        self._served.add(job.id)
        if len(self._holders) >= self._limits.seats:
            self._problems.append(f"overbooked: more jobs than seats on node {self.id}")
        if job.model not in self.models:
            self._problems.append(f"misplaced: node {self.id} holds {self.models}")

    async def _answer(self, visit: Visit, deltas: Deltas, work: trio.CancelScope) -> None:
        self.working += 1
        with work:
            await trio.sleep(visit.first_s)
            deltas.put(Delta(0, f"{visit.name} first, ", [1]))
            await trio.sleep(visit.rest_s)
            deltas.put(Delta(0, f"{visit.name} last", [2], finish_reason="stop"))
        self.working -= 1

    def _strike(self, future: list[str]) -> None:
        if self._back.is_set():
            self.deaths += 1
            self._future = future
            self._struck.set()
            self._struck, self._back = trio.Event(), trio.Event()
            self._go_down()

    def _go_down(self) -> None:
        if self.is_up:
            self.is_up = False
            self._listener.node_down(self)
            lost, self._holders = self._holders, {}
            self._leaving += len(lost)
            for deltas, work in lost.values():
                work.cancel()
                deltas.fail(NodeFailed("the node died"))

    def _come_up(self, model: str) -> None:
        self.is_up = True
        self.models = frozenset({model})
        self._listener.node_up(self, self._limits)


class World:
    """The hand-off between visitors and nodes. What nodes notice going wrong is added to `problems`.

    `outcomes` by visitor: the text of the answer or the type of the error; none for who was made to leave.
    `doors` are the scopes of those who are here.
    """

    def __init__(
        self,
        plan: Plan,
        problems: list[str],
        dispatcher_type: type[Dispatcher] = Dispatcher,
        node_type: type[MortalNode] = MortalNode,
    ) -> None:
        self.plan = plan
        self.outcomes: dict[str, str | type[FairleadError]] = {}
        self.doors: dict[str, trio.CancelScope] = {}
        queue = QueueConfig(capacity=plan.capacity, timeout_s=plan.queue_timeout_s)
        self.dispatcher = dispatcher_type(queue, random=Random(plan.seed))
        self.gateway = Gateway(self.dispatcher, request_timeout_s=plan.request_timeout_s)
        self.nodes = [
            node_type(f"{number}", plan, self.dispatcher, problems) for number in range(len(plan.seats))
        ]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Run the nodes."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.dispatcher.run)
            for node in self.nodes:
                nursery.start_soon(node.run)
            yield
            nursery.cancel_scope.cancel()

    async def receive(self, visit: Visit) -> None:
        """Let a visitor come, ask and leave, as an exchange does: one nursery for the job and its reader."""
        with trio.CancelScope() as self.doors[visit.name]:
            await trio.sleep(visit.arrives_s)
            try:
                async with trio.open_nursery() as exchange:
                    answer = await exchange.start(self.gateway.serve, visit.job)
                    text = ""
                    while taken := await answer.deltas.take():
                        text += "".join(delta.text for delta in taken)
                    self.outcomes[visit.name] = text
            except* FairleadError as group:
                self.outcomes[visit.name] = type(unwrap(group))
        del self.doors[visit.name]
