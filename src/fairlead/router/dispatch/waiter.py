"""A job in the dispatcher, from its arrival to its end: of a task in this process, or of another process."""

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Annotated, Literal, NamedTuple

import trio
from msgspec import Meta

from fairlead.base.errors import FairleadError
from fairlead.base.grant import Grant
from fairlead.base.sequence_seats import SequenceSeats
from fairlead.router.dispatch.estimates import WaitEstimate
from fairlead.router.dispatch.held_sequences import ALL_AT_ONCE, HeldSequences
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
    sequences: which of its sequences run there.
    """

    node_id: str
    grant: Grant | None
    waited_s: Seconds
    has_begun: bool
    sequences: HeldSequences = ALL_AT_ONCE


class Waiter:
    """A job that was submitted, to which the dispatcher reports what happens, synchronously.

    `arrived_at` and `deadline` are by Trio's clock; the deadline is that of its wait, infinite once it has
    passed. `alarm`: the next event of its wait. `waited_s` is the wait for the first seat, None before it.
    `begun_at` is when its first delta came, None before it.
    `estimate` was made when the job was queued; None if it was not. `error` is the first one that it got.
    Only the dispatcher writes to these.
    """

    __slots__ = (
        *("alarm", "arrived_at", "begun_at", "deadline", "error", "estimate", "grant"),
        *("ticket", "waited_s"),
    )

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.alarm: Alarm | None = None
        self.arrived_at = 0.0
        self.deadline = inf
        self.waited_s: float | None = None
        self.begun_at: float | None = None
        self.estimate: WaitEstimate | None = None
        self.grant: Grant | None = None
        self.error: FairleadError | None = None

    def generated(self) -> int:
        """Return the number of tokens so far, as it is known here."""
        raise NotImplementedError

    def update_generated(self) -> None:
        """Request the present number, if another process has it."""

    def granted(self) -> None:
        """Receive a seat, at `ticket.node`, with the number `grant`."""
        raise NotImplementedError

    def started(self, index: int, grant: Grant) -> None:
        """Receive a seat for another sequence, at the same node."""
        raise NotImplementedError

    def paused(self, index: int, *, is_paused: bool) -> None:
        """Suspend a sequence, or let it go on."""
        raise NotImplementedError

    def refused(self, error: FairleadError) -> None:
        """Receive the error because of which there will be no seat (again)."""
        raise NotImplementedError

    def stopped(self, error: FairleadError) -> None:
        """Receive the error that ends the job now, wherever it is."""
        raise NotImplementedError


class WaitingTask(Waiter):
    """A job of a task in this process: a grant or an error wakes it, and an error may stop it later.

    ticket: the job's.
    sequence_ended: called with the index of each sequence that ends before its job.

    `count_generated` returns the number of tokens so far. `seats` are those of its sequences at its present
    node.
    """

    __slots__ = ("_sequence_ended", "count_generated", "event", "scope", "seats")

    def __init__(
        self,
        ticket: Ticket,
        sequence_ended: Callable[["WaitingTask", int], None] = lambda _waiter, _index: None,
    ) -> None:
        super().__init__(ticket)
        self._sequence_ended = sequence_ended
        self.seats = SequenceSeats(partial(sequence_ended, self))
        self.event = trio.Event()
        self.scope = trio.CancelScope()
        self.count_generated: Callable[[], int] = int  # none yet

    def wait_again(self) -> None:
        """Prepare for the wait for other seats; the present ones are lost."""
        self.seats.close()
        self.seats = SequenceSeats(partial(self._sequence_ended, self))
        self.event = trio.Event()

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
        assert self.grant is not None
        self.seats.grant(0, self.grant)
        self.event.set()

    def started(self, index: int, grant: Grant) -> None:
        """Receive a seat for another sequence, at the same node."""
        self.seats.grant(index, grant)

    def paused(self, index: int, *, is_paused: bool) -> None:
        """Suspend a sequence, or let it go on."""
        self.seats.pause(index, is_paused=is_paused)

    def refused(self, _error: FairleadError) -> None:
        """Receive the error because of which there will be no seat (again)."""
        self.event.set()

    def stopped(self, _error: FairleadError) -> None:
        """Receive the error that ends the job now, wherever it is."""
        self.event.set()
        self.scope.cancel()
