"""The count of a response's bytes that wait for the client, as whoever holds such bytes sees it."""

from typing import Protocol


class UnreadBytes(Protocol):
    """Counts what waits for one client. All methods are synchronous, and `add` may end any response."""

    def add(self, size: int) -> None:
        """Count bytes that wait from now on."""

    def progress(self) -> None:
        """Record that the client has read some of them."""

    def remove(self, size: int) -> None:
        """Stop counting bytes, because the client has read them and their memory is free."""
