"""A job in the dispatcher, from its arrival to its end: of a task in this process, or of another process."""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import trio
from msgspec import Meta

from fairlead.dispatch.estimates import WaitEstimate
from fairlead.dispatch.ticket import Ticket
from fairlead.dispatch.timer import Alarm
from fairlead.errors import FairleadError
from fairlead.grant import Grant

# Bounds for messages of other processes; a number that is none is refused, too.
Seconds = Annotated[float, Meta(ge=0, le=1e9)]


class HeldSeat(NamedTuple):
    """A seat that a job has from an earlier dispatcher, after it waited `waited_s` for its first seat.

    `has_begun`: the first delta of its answer has arrived.
    """

    node_id: str
    grant: Grant | None
    waited_s: Seconds
    has_begun: bool


class Waiter:
    """A job that was submitted. The dispatcher calls `granted`, `refused` and `stopped`, synchronously.

    `arrived_at` is by Trio's clock. `waited_s` is the wait for the first seat, None before it. `estimate` was
    made when the job was queued; None if it was not. `error` is the first one that it got. `generated`
    returns the number of tokens so far. Only the dispatcher writes to it, but for `generated`.
    """

    __slots__ = ("alarms", "arrived_at", "error", "estimate", "generated", "grant", "ticket", "waited_s")

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.alarms: list[Alarm] = []
        self.arrived_at = 0.0
        self.waited_s: float | None = None
        self.estimate: WaitEstimate | None = None
        self.grant: Grant | None = None
        self.error: FairleadError | None = None
        self.generated: Callable[[], int] = int  # none yet

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
    """A job of a task in this process: a grant or an error wakes it, and an error may stop it later."""

    __slots__ = ("event", "scope")

    def __init__(self, ticket: Ticket) -> None:
        super().__init__(ticket)
        self.event = trio.Event()
        self.scope = trio.CancelScope()

    async def wait(self) -> str:
        """Wait for a seat; return the id of its node or raise the error. No checkpoint if it is there."""
        if not self.event.is_set():
            await self.event.wait()
        if self.error is not None:
            raise self.error
        assert self.ticket.node is not None
        return self.ticket.node.id

    def granted(self) -> None:
        """See `Waiter`."""
        self.event.set()

    def refused(self, _error: FairleadError) -> None:
        """See `Waiter`."""
        self.event.set()

    def stopped(self, _error: FairleadError) -> None:
        """See `Waiter`."""
        self.event.set()
        self.scope.cancel()
