"""Where a node puts an answer, as far as the node knows."""

from typing import Protocol

from fairlead.errors import FairleadError
from fairlead.job import Delta


class Room(Protocol):
    """What a sink has too little of."""

    async def wait(self) -> None:
        """Return when there is some."""


class Sink(Protocol):
    """Written synchronously: nothing here waits, and nothing may raise."""

    def put(self, delta: Delta) -> None:
        """Add a piece of the answer. The last one of each choice has a `finish_reason`."""

    def room(self) -> Room | None:
        """Return what to wait for until there is room for more; None if there is now.

        Who has much in little time, as a server elsewhere may, waits for that before it brings more.
        """

    def fail(self, error: FairleadError) -> None:
        """End the answer with an error."""
