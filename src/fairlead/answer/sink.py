"""The interface of what a node puts an answer into."""

from typing import Protocol

from fairlead.errors import FairleadError
from fairlead.job import Delta


class Backpressure(Protocol):
    """Waits for room in a full sink, on behalf of a writer."""

    async def wait(self) -> None:
        """Return when there is room."""


class Sink(Protocol):
    """Where a node puts an answer, synchronously: no method waits, and none may raise."""

    def put(self, delta: Delta) -> None:
        """Add a piece of the answer. The last one of each choice has a `finish_reason`."""

    def room(self) -> Backpressure | None:
        """Return what to wait for until there is room for more; None if there is now.

        A fast writer, such as a remote server's relay, waits for that before it puts more.
        """

    def fail(self, error: FairleadError) -> None:
        """End the answer with an error."""
