"""A job's wait and its seat, as the task of the job sees them.

Knows Trio but decides nothing: the dispatcher makes these objects, and they call it.
"""

from collections.abc import Callable
from typing import Protocol

import trio

from fairlead.dispatch.forecast import Forecast
from fairlead.dispatch.ticket import Ticket
from fairlead.dispatch.timer import Alarm
from fairlead.errors import FairleadError
from fairlead.nodes.node import Node


class Waiter:
    """A task that waits for a seat: a grant or an error wakes it, and an error may stop it later."""

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
        """Wait for a seat; return its node or raise the error. No checkpoint if a seat is there at once."""
        if not self.event.is_set():
            await self.event.wait()
        if self.error is not None:
            raise self.error
        assert self.ticket.place is not None
        return self.ticket.place.node

    def end(self, error: FairleadError) -> None:
        """Set the error and wake the task; the first error counts."""
        self.error = self.error or error
        self.event.set()


class Seats(Protocol):
    """The part of the dispatcher that a `Seat` calls."""

    def begin(self, waiter: Waiter, generated: Callable[[], int]) -> None:
        """See `Seat.begin`."""

    async def another_seat(self, waiter: Waiter, *, is_full: bool, full_for_s: float | None = None) -> Node:
        """Return the node of the next seat; see `Seat.another`."""


class Seat:
    """The right to run one job on `node`, which another node replaces after a failure.

    `forecast` is what was forecast at the job's arrival; None if it did not wait.
    """

    __slots__ = ("_dispatcher", "_waiter", "forecast", "node", "waited_s")

    def __init__(self, dispatcher: Seats, waiter: Waiter, node: Node, waited_s: float) -> None:
        self.node = node
        self.waited_s = waited_s
        self.forecast = waiter.forecast
        self._dispatcher = dispatcher
        self._waiter = waiter

    def begin(self, generated: Callable[[], int]) -> None:
        """Report the first delta. `generated` returns the number of tokens so far, which are charged."""
        self._dispatcher.begin(self._waiter, generated)

    async def another(self, *, is_full: bool = False, full_for_s: float | None = None) -> None:
        """Give the seat back, because its node failed or is full after all, and wait for another.

        `full_for_s`: how long the node reports to be full; None: it does not say. The job goes before all
        others of its class, is charged for one attempt, and keeps its first deadline until it has begun.
        Raises what `Dispatcher.seat` raises while waiting; the block must end then.
        """
        seats = self._dispatcher
        self.node = await seats.another_seat(self._waiter, is_full=is_full, full_for_s=full_for_s)
