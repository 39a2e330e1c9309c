"""The interface of the object that a node puts an answer into."""

from typing import Protocol

from fairlead.base.errors import FairleadError
from fairlead.base.job import Delta


class Backpressure(Protocol):
    """Makes a writer wait while a sink is full."""

    async def wait(self) -> None:
        """Return when the sink takes more."""


class Sink(Protocol):
    """Where a node puts an answer, synchronously: no method waits, and none may raise."""

    def put(self, delta: Delta) -> None:
        """Add a piece of the answer. The last one of each choice has a `finish_reason`."""

    def backpressure(self) -> Backpressure | None:
        """Return what to wait for while the sink is full; None if it is not.

        A fast writer, such as a remote server's relay, waits for that before it puts more.
        """

    def fail(self, error: FairleadError) -> None:
        """End the answer with an error."""
