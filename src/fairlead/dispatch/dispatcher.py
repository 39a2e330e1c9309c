"""The scheduler's effects on Trio: tasks that wait for a seat, and the clock that measures them.

A waiter stays registered until its own synchronous `finally` runs, so a grant is never lost on its way to a
task that was just cancelled: whatever the task had then, a place in the queue or a seat, is given back.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from random import Random

import msgspec
import trio

from fairlead.config import QueueConfig
from fairlead.dispatch.estimate import retry_after_s
from fairlead.dispatch.forecast import Forecast, Forecaster, Running
from fairlead.dispatch.placement import Place
from fairlead.dispatch.scheduler import Scheduler
from fairlead.dispatch.ticket import Ticket, TicketState
from fairlead.dispatch.timer import Alarm, Timer
from fairlead.errors import FairleadError, QueueTimeout
from fairlead.job import Job
from fairlead.nodes.node import Node, NodeLimits

METER_INTERVAL_S = 1.0
# How long a node that turned a job away is taken to be full, if none of its jobs is finished before.
FULL_FOR_S = 1.0


class DispatchStatistics(msgspec.Struct, frozen=True):
    """The body of `GET /queue`: totals only."""

    waiting: int
    running: int
    capacity: int
    seats: int
    mean_wait_s: float
    mean_service_s: float


class _Waiter:
    """A task at the counter: woken once, by a grant or a refusal; stopped, perhaps, when it has its seat."""

    __slots__ = ("alarms", "error", "event", "forecast", "generated", "scope", "ticket")

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.alarms: list[Alarm] = []
        self.event = trio.Event()
        self.scope = trio.CancelScope()
        self.error: FairleadError | None = None
        self.forecast: Forecast | None = None
        self.generated: Callable[[], int] = int  # none yet

    async def granted(self) -> Node:
        """Wait for a seat; return its node, or raise why there is none. Who has it at once waits no turn."""
        if not self.event.is_set():
            await self.event.wait()
        if self.error is not None:
            raise self.error
        assert self.ticket.place is not None
        return self.ticket.place.node

    def end(self, error: FairleadError) -> None:
        """Wake or stop the task with this error; the first one counts."""
        self.error = self.error or error
        self.event.set()


class Seat:
    """The right to run one job on one node, and after a failure on another: `node` is the one in force.

    `forecast` is what the job was told on arrival, if it had to wait.
    """

    __slots__ = ("_dispatcher", "_waiter", "forecast", "node", "waited_s")

    def __init__(self, dispatcher: "Dispatcher", waiter: _Waiter, node: Node, waited_s: float) -> None:
        self.node = node
        self.waited_s = waited_s
        self.forecast = waiter.forecast
        self._dispatcher = dispatcher
        self._waiter = waiter

    def begin(self, generated: Callable[[], int]) -> None:
        """The first delta is there. `generated` tells how many tokens there are by now: they are charged."""
        self._dispatcher.begin(self._waiter, generated)

    async def another(self, *, is_full: bool = False) -> None:
        """Give the seat back, because its node failed or is full after all, and wait for another.

        The job comes first of its tenant's, costs what one attempt does, and has its first deadline until it
        has begun. Raises what `Dispatcher.seat` raises while waiting, and `LoadFailed`; leave the block then.
        """
        self.node = await self._dispatcher.another_seat(self._waiter, is_full=is_full)


class Dispatcher:
    """Gives seats to jobs. Also the listener that nodes report to (`NodeListener`). `run` is its timer."""

    def __init__(self, queue: QueueConfig, *, random: Random | None = None) -> None:
        self._queue = queue
        self._random = random or Random()  # noqa: S311  # spreads load and retries, guards nothing
        self._scheduler = Scheduler(
            self,
            capacity=queue.capacity,
            random=self._random,
            fairness=queue.fairness,
            min_share=queue.min_share,
            tenant_weights=queue.tenant_weights,
        )
        self._timer = Timer()
        self._forecaster = Forecaster(queue)
        self._waiters: dict[Ticket, _Waiter] = {}
        self._by_id: dict[str, _Waiter] = {}
        self._granted_at: dict[Ticket, float] = {}  # since when; the oldest first
        self._full: dict[Place, Alarm] = {}  # who turned a job away, and when to look again

    async def run(self) -> None:
        """Keep the deadlines and charge for what flows, until cancelled."""
        self._timer.at(trio.current_time() + METER_INTERVAL_S, self._read_meters)
        await self._timer.run()

    @asynccontextmanager
    async def seat(self, job: Job) -> AsyncIterator[Seat]:
        """Wait for a seat, hold it for the length of the block, give it back however the block ends.

        Raises instead of waiting: `QueueFull`, `NoQueue`, `InvalidRequest` (it can never fit), `Draining`,
        `LoadFailed`. Raises while waiting, and for a stream until `Seat.begin`: `QueueTimeout`, `Displaced`.
        Raises what `cancel` was called with, at any time.
        """
        arrived = trio.current_time()
        waiter = _Waiter(self._forecaster.ticket(job))
        ticket = waiter.ticket
        self._waiters[ticket] = self._by_id[job.request_id] = waiter
        with waiter.scope:
            try:
                self._scheduler.submit(ticket)
                if ticket.state is TicketState.QUEUED:
                    waiter.forecast = self._forecast(ticket, first=True)
                self._set_alarms(waiter, arrived)
                node = await waiter.granted()
                waited_s = trio.current_time() - arrived
                self._forecaster.granted(ticket, waited_s)
                yield Seat(self, waiter, node, waited_s)
            finally:
                for alarm in waiter.alarms:
                    alarm.drop()
                self._over(waiter)
        if waiter.error is not None:
            raise waiter.error

    def begin(self, waiter: _Waiter, generated: Callable[[], int]) -> None:
        """See `Seat.begin`."""
        waiter.generated = generated
        self._scheduler.first_delta(waiter.ticket)

    async def another_seat(self, waiter: _Waiter, *, is_full: bool) -> Node:
        """See `Seat.another`: return the node of the next seat."""
        ticket, place = waiter.ticket, waiter.ticket.place
        assert place is not None
        del self._granted_at[ticket]
        waiter.event = trio.Event()
        if is_full:
            self._look_again(place)
            self._scheduler.turned_away(ticket)
        else:
            self._scheduler.returned(ticket)
        if ticket.state is TicketState.QUEUED:
            self._set_starving(waiter, trio.current_time())
        return await waiter.granted()

    def waiting(self, request_id: str) -> Forecast | None:
        """Return what a job that waits now would be told; None if it does not wait (any more)."""
        waiter = self._by_id.get(request_id)
        if waiter is None or waiter.ticket.state is not TicketState.QUEUED:
            return None
        return self._forecast(waiter.ticket)

    def cancel(self, request_id: str, owner: str, error: FairleadError) -> bool:
        """End the waiting or running job of that id with `error`. False if the owner has no such job."""
        waiter = self._by_id.get(request_id)
        if waiter is None or waiter.ticket.job.owner != owner:
            return False
        self.stop(waiter.ticket, error)
        return True

    def forecast(self, model: str, tenant: str, priority: int) -> Forecast:
        """Return what a job of this tenant and class would be told if it arrived now."""
        ahead = self._scheduler.foretell(model, tenant, priority)
        if ahead is None:
            return Forecast(0, 0, 0 if self._forecaster.wants_jobs_ahead else None)
        return self._foretell(len(ahead), lambda: ahead)

    def drain(self) -> None:
        """Take no more jobs; who waits is told so, who runs goes on."""
        self._scheduler.drain()

    def statistics(self) -> DispatchStatistics:
        """Return the totals now."""
        counts = self._scheduler.statistics()
        return DispatchStatistics(
            waiting=counts.waiting,
            running=counts.running,
            capacity=counts.capacity,
            seats=counts.seats,
            mean_wait_s=self._forecaster.mean_wait_s,
            mean_service_s=self._forecaster.mean_service_s,
        )

    # What nodes report (NodeListener) ----------------------------------------------------------------

    def node_up(self, node: Node, limits: NodeLimits) -> None:
        """A node has seats to give."""
        self._scheduler.node_up(node, limits)

    def seats_changed(self, node: Node, limits: NodeLimits) -> None:
        """A node has other limits now, or other models."""
        self._scheduler.seats_changed(node, limits)

    def node_down(self, node: Node) -> None:
        """A node is gone, and its seats with it."""
        self._scheduler.node_down(node)

    def load_failed(self, node: Node, error: FairleadError) -> None:
        """A node could not load its models."""
        self._scheduler.load_failed(node, error)

    # What the scheduler asks for (Effects) -----------------------------------------------------------

    def grant(self, ticket: Ticket) -> None:
        """Wake the task that waits with this ticket."""
        self._granted_at[ticket] = trio.current_time()
        self._waiters[ticket].event.set()

    def refuse(self, ticket: Ticket, error: FairleadError) -> None:
        """Wake it with an error; one that another try may avoid says when to try."""
        self._waiters[ticket].end(self._with_estimate(error))

    def stop(self, ticket: Ticket, error: FairleadError) -> None:
        """Cancel the task, wherever it is, and have `seat` raise the error."""
        waiter = self._waiters[ticket]
        waiter.end(self._with_estimate(error))
        waiter.scope.cancel()

    def start_swap(self, model: str, evict: frozenset[str]) -> None:
        """Nothing is loadable by a swap as long as every model has a node of its own."""
        raise AssertionError(f"no swap can load {model} in place of {sorted(evict)}")

    # Clocks and costs --------------------------------------------------------------------------------

    def _set_alarms(self, waiter: _Waiter, arrived: float) -> None:
        ticket = waiter.ticket
        if ticket.state is TicketState.DONE:
            return
        timeout_s = self._queue.timeout_s
        late = QueueTimeout(f"the request waited longer than {timeout_s:g} s for its turn")
        waiter.alarms.append(
            self._timer.at(arrived + timeout_s, partial(self._scheduler.deadline, ticket, late))
        )
        if ticket.state is TicketState.QUEUED:
            self._set_starving(waiter, arrived)

    def _set_starving(self, waiter: _Waiter, since: float) -> None:
        starved = partial(self._scheduler.starved, waiter.ticket)
        waiter.alarms.append(self._timer.at(since + self._queue.starvation_bound_s, starved))

    def _look_again(self, place: Place) -> None:
        """Have a place that is full looked at again after a while, counted from the last time that it was."""
        if (earlier := self._full.pop(place, None)) is not None:
            earlier.drop()

        def is_over() -> None:
            del self._full[place]
            self._scheduler.has_room(place)

        self._full[place] = self._timer.at(trio.current_time() + FULL_FOR_S, is_over)

    def _read_meters(self) -> None:
        for waiter in self._waiters.values():
            self._scheduler.charge(waiter.ticket, self._spent(waiter))
        self._timer.at(trio.current_time() + METER_INTERVAL_S, self._read_meters)

    def _spent(self, waiter: _Waiter) -> float:
        if not waiter.ticket.has_begun:
            return 0.0
        return self._forecaster.weights.cost(waiter.ticket.job.prompt_tokens, waiter.generated())

    def _over(self, waiter: _Waiter) -> None:
        """A job is over, or has left: give back what it has. Synchronous, so nothing comes in between."""
        ticket, job = waiter.ticket, waiter.ticket.job
        del self._waiters[ticket]
        if self._by_id.get(job.request_id) is waiter:
            del self._by_id[job.request_id]
        self._forecaster.forget(ticket)
        if (granted_at := self._granted_at.pop(ticket, None)) is not None:
            self._forecaster.finished(job, trio.current_time() - granted_at, waiter.generated())
        self._scheduler.finished(ticket, cost=self._spent(waiter))

    def _with_estimate(self, error: FairleadError) -> FairleadError:
        if error.status == HTTPStatus.TOO_MANY_REQUESTS or isinstance(error, QueueTimeout):
            waiting = self._scheduler.statistics().waiting
            told = self._foretell(waiting, self._scheduler.waiting_jobs)
            error.estimated_wait_s = told.estimated_wait_s
            error.retry_after_s = retry_after_s(error.estimated_wait_s, self._random)
        return error

    def _forecast(self, ticket: Ticket, *, first: bool = False) -> Forecast:
        ahead = self._scheduler.position(ticket)
        jobs = partial(self._scheduler.jobs_ahead, ticket)
        return self._foretell(ahead, jobs, ticket=ticket if first else None)

    def _foretell(
        self, ahead: int, jobs_ahead: Callable[[], list[Job]], *, ticket: Ticket | None = None
    ) -> Forecast:
        now = trio.current_time()
        return self._forecaster.foretell(
            ahead=ahead,
            jobs_ahead=jobs_ahead,
            running=self._running,
            oldest_s=now - next(iter(self._granted_at.values()), now),
            seats=self._scheduler.statistics().seats,
            now=now,
            ticket=ticket,
        )

    def _running(self) -> list[Running]:
        return [
            Running(ticket.job, granted_at, self._waiters[ticket].generated())
            for ticket, granted_at in self._granted_at.items()
        ]
