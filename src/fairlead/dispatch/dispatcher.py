"""The scheduler's effects on Trio: tasks that wait for a seat, and the clock that measures them.

A waiter stays registered until its own synchronous `leave` runs, so a grant is never lost on its way to a
task that was just cancelled: whatever the task had then, a place in the queue or a seat, `leave` gives back.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import msgspec
import trio

from fairlead.dispatch.estimate import MeanEstimate, retry_after_s
from fairlead.dispatch.scheduler import Scheduler, Ticket, TicketState
from fairlead.errors import FairleadError, QueueFull
from fairlead.job import Job
from fairlead.nodes.node import Node, NodeLimits


class Seat(msgspec.Struct, frozen=True):
    """The right to run one job on one node, and what it cost to get it.

    `estimated_wait_s` and `queue_position` (1 is next) are what was foretold on arrival; None for who did
    not wait.
    """

    node: Node
    waited_s: float
    estimated_wait_s: int | None
    queue_position: int | None


class DispatchStatistics(msgspec.Struct, frozen=True):
    """The body of `GET /queue`: totals only."""

    waiting: int
    running: int
    capacity: int
    seats: int
    mean_wait_s: float
    mean_service_s: float


class _Waiter:
    """A task at the counter: woken once, by a grant or a refusal."""

    __slots__ = ("error", "event", "ticket")

    def __init__(self, job: Job) -> None:
        self.ticket = Ticket(job)
        self.event = trio.Event()
        self.error: FairleadError | None = None


class Dispatcher:
    """Gives seats to jobs. Also the listener that nodes report to (`NodeListener`)."""

    def __init__(self, *, capacity: int, random: Random | None = None) -> None:
        self._random = random or Random()  # noqa: S311  # spreads load and retries, guards nothing
        self._scheduler = Scheduler(self, capacity=capacity, random=self._random)
        self._estimate = MeanEstimate()
        self._waiters: dict[Ticket, _Waiter] = {}
        self._granted_at: dict[Ticket, float] = {}

    @asynccontextmanager
    async def seat(self, job: Job) -> AsyncIterator[Seat]:
        """Wait for a seat, hold it for the length of the block, give it back however the block ends.

        Raises `QueueFull`, `InvalidRequest` (it can never fit), `Draining` or `LoadFailed` instead.
        The deadline is the caller's: cancel the wait, and the place in the queue is gone.
        """
        arrived = trio.current_time()
        waiter = _Waiter(job)
        ticket = waiter.ticket
        self._waiters[ticket] = waiter
        try:
            self._scheduler.submit(ticket)
            foretold = position = None
            if ticket.state is TicketState.QUEUED:
                ahead = self._scheduler.position(ticket)
                position = ahead + 1
                foretold = self._wait_s(ahead)
                await waiter.event.wait()
            if waiter.error is not None:
                raise waiter.error
            assert ticket.place is not None
            now = self._granted_at[ticket] = trio.current_time()
            self._estimate.granted(now - arrived)
            yield Seat(ticket.place.node, now - arrived, foretold, position)
        finally:
            del self._waiters[ticket]
            if (granted_at := self._granted_at.pop(ticket, None)) is not None:
                self._estimate.finished(trio.current_time() - granted_at)
            self._scheduler.leave(ticket)

    def estimated_wait_s(self) -> int:
        """Return what a job that arrived now, behind all others, would be told; 0 when a seat is free."""
        statistics = self._scheduler.statistics()
        if not statistics.waiting and statistics.running < statistics.seats:
            return 0
        return self._wait_s(statistics.waiting)

    def retry_after_s(self) -> int:
        """Return when a refused client should come back, in seconds, 1…60, jittered."""
        return retry_after_s(self.estimated_wait_s(), self._random)

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
            mean_wait_s=self._estimate.mean_wait_s,
            mean_service_s=self._estimate.mean_service_s,
        )

    # What nodes report (NodeListener) ----------------------------------------------------------------

    def node_up(self, node: Node, limits: NodeLimits) -> None:
        """A node has seats to give."""
        self._scheduler.node_up(node, limits)

    def node_down(self, node: Node) -> None:
        """A node is gone, and its seats with it."""
        self._scheduler.node_down(node)

    def load_failed(self, node: Node, error: FairleadError) -> None:
        """A node could not load its models."""
        self._scheduler.load_failed(node, error)

    # What the scheduler asks for (Effects) -----------------------------------------------------------

    def grant(self, ticket: Ticket) -> None:
        """Wake the task that waits with this ticket."""
        self._waiters[ticket].event.set()

    def refuse(self, ticket: Ticket, error: FairleadError) -> None:
        """Wake it with an error."""
        if isinstance(error, QueueFull):
            error.estimated_wait_s = self._wait_s(self._scheduler.statistics().waiting)
            error.retry_after_s = retry_after_s(error.estimated_wait_s, self._random)
        waiter = self._waiters[ticket]
        waiter.error = error
        waiter.event.set()

    def _wait_s(self, ahead: int) -> int:
        """Whoever has to wait is told one second at least."""
        now = trio.current_time()
        oldest = now - min(self._granted_at.values(), default=now)
        seats = self._scheduler.statistics().seats
        return max(1, self._estimate.wait_s(ahead=ahead, seats=seats, oldest_running_s=oldest))
