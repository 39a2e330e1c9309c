"""A node that can fail at any step, and records what the dispatcher does wrong."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from fairlead.base.errors import LoadFailed, NodeFailed, NodeFull
from fairlead.base.grant import Grant
from fairlead.base.job import Delta, Job
from fairlead.generation.gateway import ATTEMPTS
from fairlead.nodes.limits import NodeLimits
from fairlead.nodes.streams.sink import Sink
from fairlead.router.dispatch.scheduling import JobScheduler
from fairlead.router.fleet.node_registry import NodeRegistry
from fuzz.plan import OTHER_MODEL, ClientPlan, Plan


class History:
    """The state of one job across all nodes, and how often it failed.

    `is_running`: a node runs it now. `has_begun`: its answer has begun. `lost`: it has failed after that.
    """

    def __init__(self) -> None:
        self.is_running = False
        self.failures = 0
        self.has_begun = False
        self.lost = False

    def fail(self) -> None:
        """Record a failure; a full node is not one."""
        self.failures += 1
        self.lost = self.lost or self.has_begun


class CrashingNode:
    """Answers from its own task, like the engine. Can die, swap its model, reject or drop jobs at any step.

    Checks what a node can see: no job in two places or attempted too often, no more jobs at once than seats,
    no job for another model, no eviction while it works. Aborted work ends at once; `working` counts work
    that has not ended. `requested_model` returns the model to hold; `histories` has the jobs of all nodes.
    """

    def __init__(
        self,
        name: str,
        plan: Plan,
        registry: NodeRegistry,
        scheduler: JobScheduler,
        problems: list[str],
        requested_model: Callable[[], str],
        histories: dict[str, History],
    ) -> None:
        self.id = name
        self.models: frozenset[str] = frozenset()
        self.is_up = False
        self.working = 0
        self.deaths = 0
        self.failures = 0  # of loads
        self._plan = plan
        self._requested_model = requested_model
        self._spoilt = False
        self._limits = NodeLimits(seats=plan.seats[int(name)], max_model_len=1000)
        self._times = {client_plan.name: client_plan for client_plan in plan.client_plans}
        self._registry = registry
        self._scheduler = scheduler
        self._problems = problems
        self._histories = histories
        self._holders: dict[str, tuple[Sink, trio.CancelScope]] = {}
        self._is_full = False
        self._leaving = 0  # jobs that hold a seat from before a death
        self._future: list[str | None] = []  # models of the next starts; None: the requested model
        self._struck = trio.Event()
        self._back = trio.Event()
        self._nursery: trio.Nursery

    @property
    def held(self) -> int:
        """Seats that jobs still hold, including those from before a death."""
        return len(self._holders) + self._leaving

    async def run(self) -> None:
        """Come up. After each strike go down and come up again, finally with the requested model."""
        async with trio.open_nursery() as self._nursery:
            self._come_up(None)
            while True:
                if not self._future:
                    self._back.set()
                    await self._struck.wait()
                model = self._future.pop(0)
                self._go_down()
                await trio.sleep(self._plan.downtime_s)
                if self._spoilt:
                    self._fail_to_load()
                    await trio.sleep(self._plan.downtime_s)
                self._come_up(model)  # may go down at once: the scheduler may request another model
                if model is not None:
                    await trio.sleep(self._plan.downtime_s)

    async def wait_back(self) -> None:
        """Wait until it has the requested model, even if it goes down again meanwhile."""
        while not (back := self._back).is_set():
            await back.wait()

    def die(self) -> None:
        """Lose all jobs and their seats now; come back later."""
        self._strike([None])

    def swap(self) -> None:
        """Like `die`, but come back with another model first."""
        self._strike([OTHER_MODEL, None])

    def spoil(self) -> None:
        """Fail the next load of a model; the load after that succeeds."""
        self._spoilt = True

    def make_room(self) -> None:
        """Unload, because the scheduler requests another model. It already counts no seats here."""
        if self.is_up:
            if self._holders:
                self._problems.append(f"evicted: node {self.id} works")
            self.is_up = False
            self._start_over([None])

    def drop(self) -> None:
        """Fail all jobs, as a broken network does, without going down."""
        for name, (into, work) in self._working():
            work.cancel()
            self._histories[name].fail()
            into.fail(NodeFailed("the connection broke"))

    def refuse_jobs(self) -> None:
        """Refuse as full all jobs without a first delta, and the next job that arrives."""
        self._is_full = True
        for name, (into, work) in self._working():
            if not self._histories[name].has_begun:
                work.cancel()
                into.fail(NodeFull("no room"))

    @asynccontextmanager
    async def generate(
        self, job: Job, into: Sink, *, grant: Grant | None = None, seats: object = None
    ) -> AsyncIterator[None]:
        history = self._histories[job.id]
        if not self.is_up:
            history.fail()
            raise NodeFailed("the node is down")
        if self._is_full:
            self._is_full = False
            raise NodeFull("the node is full")
        work, holders = trio.CancelScope(), self._holders
        self._check(job, history)
        holders[job.id] = into, work
        history.is_running, history.has_begun = True, False
        self._nursery.start_soon(self._answer, self._times[job.id], history, into, work)
        try:
            yield
        finally:
            history.is_running = False
            if holders is self._holders:
                del holders[job.id]
            else:
                self._leaving -= 1
            self.abort(work)

    def abort(self, work: trio.CancelScope) -> None:
        """End the work of a job that is over. Synchronous, as in the engine."""
        work.cancel()

    def _working(self) -> list[tuple[str, tuple[Sink, trio.CancelScope]]]:
        """Return the jobs that have neither failed nor been aborted."""
        return [(name, holder) for name, holder in self._holders.items() if not holder[1].cancel_called]

    def _check(self, job: Job, history: History) -> None:
        if history.is_running:
            self._problems.append(f"double grant: job {job.id}")
        if history.failures >= ATTEMPTS:
            self._problems.append(f"too many attempts: job {job.id}")
        if len(self._holders) >= self._limits.seats:
            self._problems.append(f"overbooked: more jobs than seats on node {self.id}")
        if job.model not in self.models:
            self._problems.append(f"misplaced: node {self.id} holds {self.models}")

    async def _answer(
        self, client_plan: ClientPlan, history: History, into: Sink, work: trio.CancelScope
    ) -> None:
        self.working += 1
        with work:
            await trio.sleep(client_plan.first_s)
            history.has_begun = True
            into.put(Delta(0, f"{client_plan.name} first, ", [1]))
            await trio.sleep(client_plan.rest_s)
            into.put(Delta(0, f"{client_plan.name} last", [2], finish_reason="stop"))
        self.working -= 1

    def _strike(self, future: list[str | None]) -> None:
        if self._back.is_set():
            self.deaths += 1
            self._start_over(future)
            self._go_down()

    def _start_over(self, future: list[str | None]) -> None:
        self._future = future
        self._struck.set()  # no task waits for it while the node comes up
        back = self._back
        self._struck, self._back = trio.Event(), trio.Event()
        back.set()  # its waiters wait for the new event now

    def _go_down(self) -> None:
        if self.is_up:
            self.is_up = self._is_full = False
            self._registry.report(self, None)
            lost = self._working()
            self._leaving += len(self._holders)
            self._holders = {}
            for name, (into, work) in lost:
                work.cancel()
                self._histories[name].fail()
                into.fail(NodeFailed("the node died"))

    def _come_up(self, model: str | None) -> None:
        self.is_up = True
        self.models = frozenset({model or self._requested_model()})
        self._registry.report(self, self._limits)

    def _fail_to_load(self) -> None:
        self._spoilt = False
        self.failures += 1
        self.models = frozenset({self._requested_model()})
        self._scheduler.load_failed(self.models, LoadFailed("spoilt"))
