"""Where a node puts an answer, as far as the node knows."""

from typing import Protocol

from fairlead.errors import FairleadError
from fairlead.job import Delta


class Sink(Protocol):
    """Written synchronously: nothing here waits, and nothing may raise."""

    def put(self, delta: Delta) -> None:
        """Add a piece of the answer. The last one of each choice has a `finish_reason`."""

    def fail(self, error: FairleadError) -> None:
        """End the answer with an error."""
