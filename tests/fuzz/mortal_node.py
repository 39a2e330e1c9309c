"""A node that can be struck at any step, and notices what the hand-off before it does wrong."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from fairlead.dispatch.dispatcher import Dispatcher
from fairlead.errors import LoadFailed, NodeFailed
from fairlead.job import Delta, Job
from fairlead.nodes.deltas import Deltas
from fairlead.nodes.node import NodeLimits
from fuzz.plan import OTHER_MODEL, Plan, Visit


class MortalNode:
    """Answers from a task of its own, as the engine does, and can die or swap its model at any step.

    Checks what a node can see: no job twice, no more jobs at once than seats, none for another model, no
    eviction while it works. Work that was aborted ends at once; `working` counts what has not ended.
    `asked_for` says which model it is to hold.
    """

    def __init__(
        self, name: str, plan: Plan, listener: Dispatcher, problems: list[str], asked_for: Callable[[], str]
    ) -> None:
        self.id = name
        self.models: frozenset[str] = frozenset()
        self.is_up = False
        self.working = 0
        self.deaths = 0
        self.failures = 0  # to load
        self._plan = plan
        self._asked_for = asked_for
        self._spoilt = False
        self._limits = NodeLimits(seats=plan.seats[int(name)], max_model_len=1000)
        self._times = {visit.name: visit for visit in plan.visits}
        self._listener = listener
        self._problems = problems
        self._served: set[str] = set()
        self._holders: dict[str, tuple[Deltas, trio.CancelScope]] = {}
        self._leaving = 0  # who held a seat of an earlier life, and does not know yet
        self._future: list[str | None] = []  # what it will come back with, one after the other
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
            self._come_up(None)
            while True:
                if not self._future:
                    self._back.set()
                    await self._struck.wait()
                model = self._future.pop(0)
                self._go_down()
                await trio.sleep(self._plan.away_s)
                if self._spoilt:
                    self._fail_to_load()
                    await trio.sleep(self._plan.away_s)
                self._come_up(model)  # and perhaps away again at once: the scheduler may want another model
                if model is not None:
                    await trio.sleep(self._plan.away_s)

    async def wait_back(self) -> None:
        """Wait until it holds the model asked for."""
        await self._back.wait()

    def die(self) -> None:
        """Lose all jobs now, and the seats with them; come back later."""
        self._strike([None])

    def swap(self) -> None:
        """As `die`, but come back with another model first."""
        self._strike([OTHER_MODEL, None])

    def spoil(self) -> None:
        """Fail the next time that a model has to be loaded, and then try once more."""
        self._spoilt = True

    def make_room(self) -> None:
        """Unload, because the scheduler asks for another model. It knows already that there are no seats."""
        if self.is_up:
            if self._holders:
                self._problems.append(f"evicted: node {self.id} works")
            self.is_up = False
            self._go_away([None])

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

    def _strike(self, future: list[str | None]) -> None:
        if self._back.is_set():
            self.deaths += 1
            self._go_away(future)
            self._go_down()

    def _go_away(self, future: list[str | None]) -> None:
        self._future = future
        self._struck.set()  # nobody waits for it if it is on its way up
        self._struck, self._back = trio.Event(), trio.Event()

    def _go_down(self) -> None:
        if self.is_up:
            self.is_up = False
            self._listener.node_down(self)
            lost, self._holders = self._holders, {}
            self._leaving += len(lost)
            for deltas, work in lost.values():
                work.cancel()
                deltas.fail(NodeFailed("the node died"))

    def _come_up(self, model: str | None) -> None:
        self.is_up = True
        self.models = frozenset({model or self._asked_for()})
        self._listener.node_up(self, self._limits)

    def _fail_to_load(self) -> None:
        self._spoilt = False
        self.failures += 1
        self.models = frozenset({self._asked_for()})
        self._listener.load_failed(self, LoadFailed("spoilt"))
