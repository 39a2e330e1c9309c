"""Who waits for a seat, and who has one: what the task of a job holds in its hands.

Knows Trio, and no decision: the dispatcher makes these and is asked by them.
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


class Seats(Protocol):
    """Who gives seats."""

    def begin(self, waiter: Waiter, generated: Callable[[], int]) -> None:
        """See `Seat.begin`."""

    async def another_seat(self, waiter: Waiter, *, is_full: bool, full_for_s: float | None = None) -> Node:
        """See `Seat.another`: return the node of the next seat."""


class Seat:
    """The right to run one job on one node, and after a failure on another: `node` is the one in force.

    `forecast` is what the job was told on arrival, if it had to wait.
    """

    __slots__ = ("_dispatcher", "_waiter", "forecast", "node", "waited_s")

    def __init__(self, dispatcher: Seats, waiter: Waiter, node: Node, waited_s: float) -> None:
        self.node = node
        self.waited_s = waited_s
        self.forecast = waiter.forecast
        self._dispatcher = dispatcher
        self._waiter = waiter

    def begin(self, generated: Callable[[], int]) -> None:
        """The first delta is there. `generated` tells how many tokens there are by now: they are charged."""
        self._dispatcher.begin(self._waiter, generated)

    async def another(self, *, is_full: bool = False, full_for_s: float | None = None) -> None:
        """Give the seat back, because its node failed or is full after all, and wait for another.

        `full_for_s`: how long the node says that it will be full; None: it does not say.
        The job comes first of its tenant's, costs what one attempt does, and has its first deadline until it
        has begun. Raises what `Dispatcher.seat` raises while waiting, and `LoadFailed`; leave the block then.
        """
        seats = self._dispatcher
        self.node = await seats.another_seat(self._waiter, is_full=is_full, full_for_s=full_for_s)
