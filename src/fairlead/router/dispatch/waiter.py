"""A job in the dispatcher, from its arrival to its end: of a task in this process, or of another process."""

from collections.abc import Callable
from math import inf
from typing import Annotated, Literal, NamedTuple

import trio
from msgspec import Meta

from fairlead.base.errors import FairleadError
from fairlead.base.grant import Grant
from fairlead.router.dispatch.estimates import WaitEstimate
from fairlead.router.dispatch.ticket import Ticket
from fairlead.router.dispatch.timer import Alarm

# Bounds for messages of other processes; a number that is none is refused, too.
Seconds = Annotated[float, Meta(ge=0, le=1e9)]


class SeatLoss(NamedTuple):
    """Why a job gives its seat back and waits for another.

    - failed: the node or its connection has failed.
    - stale: the node refused the grant.
    - unsuited: the node refused the request because of its own key or set-up.
    - full: the node is full, for `full_for_s` if it names a time; `is_limit`: it answered 429.
    """

    cause: Literal["failed", "stale", "unsuited", "full"] = "failed"
    full_for_s: Seconds | None = None
    is_limit: bool = False


class HeldSeat(NamedTuple):
    """A seat that a job has from an earlier dispatcher.

    node_id: the seat's node.
    grant: that of the seat; None: the node needs none.
    waited_s: how long the job waited for its first seat.
    has_begun: whether the first delta of its answer has arrived.
    """

    node_id: str
    grant: Grant | None
    waited_s: Seconds
    has_begun: bool


class Waiter:
    """A job that was submitted. The dispatcher calls `granted`, `refused` and `stopped`, synchronously.

    `arrived_at` and `deadline` are by Trio's clock; the deadline is that of its wait, infinite once it has
    passed. `alarm`: the next event of its wait. `waited_s` is the wait for the first seat, None before it.
    `estimate` was made when the job was queued; None if it was not. `error` is the first one that it got.
    Only the dispatcher writes to these.
    """

    __slots__ = ("alarm", "arrived_at", "deadline", "error", "estimate", "grant", "ticket", "waited_s")

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.alarm: Alarm | None = None
        self.arrived_at = 0.0
        self.deadline = inf
        self.waited_s: float | None = None
        self.estimate: WaitEstimate | None = None
        self.grant: Grant | None = None
        self.error: FairleadError | None = None

    def generated(self) -> int:
        """Return the number of tokens so far."""
        raise NotImplementedError

    def granted(self) -> None:
        """Receive a seat, at `ticket.node`, with the number `grant`."""
        raise NotImplementedError

    def refused(self, error: FairleadError) -> None:
        """Receive the error because of which there will be no seat (again)."""
        raise NotImplementedError

    def stopped(self, error: FairleadError) -> None:
        """Receive the error that ends the job now, wherever it is."""
        raise NotImplementedError


class WaitingTask(Waiter):
    """A job of a task in this process: a grant or an error wakes it, and an error may stop it later.

    `count_generated` returns the number of tokens so far.
    """

    __slots__ = ("count_generated", "event", "scope")

    def __init__(self, ticket: Ticket) -> None:
        super().__init__(ticket)
        self.event = trio.Event()
        self.scope = trio.CancelScope()
        self.count_generated: Callable[[], int] = int  # none yet

    async def wait(self) -> str:
        """Wait for a seat; return the id of its node or raise the error. No checkpoint if it is there."""
        if not self.event.is_set():
            await self.event.wait()
        if self.error is not None:
            raise self.error
        assert self.ticket.node is not None
        return self.ticket.node.id

    def generated(self) -> int:
        """Return the number of tokens so far."""
        return self.count_generated()

    def granted(self) -> None:
        """Receive a seat, at `ticket.node`, with the number `grant`."""
        self.event.set()

    def refused(self, _error: FairleadError) -> None:
        """Receive the error because of which there will be no seat (again)."""
        self.event.set()

    def stopped(self, _error: FairleadError) -> None:
        """Receive the error that ends the job now, wherever it is."""
        self.event.set()
        self.scope.cancel()
