"""A task that waits for a seat."""

from collections.abc import Callable

import trio

from fairlead.dispatch.estimates import WaitEstimate
from fairlead.dispatch.ticket import Ticket
from fairlead.dispatch.timer import Alarm
from fairlead.errors import FairleadError


class Waiter:
    """A task that waits for a seat: a grant or an error wakes it, and an error may stop it later."""

    __slots__ = ("alarms", "error", "estimate", "event", "generated", "scope", "ticket")

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.alarms: list[Alarm] = []
        self.event = trio.Event()
        self.scope = trio.CancelScope()
        self.error: FairleadError | None = None
        self.estimate: WaitEstimate | None = None
        self.generated: Callable[[], int] = int  # none yet

    async def granted(self) -> str:
        """Wait for a seat; return the id of its node or raise the error. No checkpoint if it is there."""
        if not self.event.is_set():
            await self.event.wait()
        if self.error is not None:
            raise self.error
        assert self.ticket.node is not None
        return self.ticket.node.id

    def end(self, error: FairleadError) -> None:
        """Set the error and wake the task; the first error counts."""
        self.error = self.error or error
        self.event.set()
