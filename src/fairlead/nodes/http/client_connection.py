"""One connection in use: the response that it receives, its time limits, and why it failed."""

import errno
import os
import socket
import ssl
from collections.abc import Callable

import trio

from fairlead.nodes.http.links import Link
from fairlead.nodes.http.response_parser import InvalidResponse, ResponseParser

_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class ClientConnection:
    """A link and the response received through it. `on_data` is called whenever bytes arrive.

    `is_sent`: the whole request has been sent. `is_closed`: the server has closed the connection.
    """

    __slots__ = ("_on_data", "idle_since", "is_closed", "is_sent", "link", "parser")

    def __init__(self, link: Link, on_data: Callable[[], None]) -> None:
        self.link = link
        self.parser = ResponseParser()
        self.idle_since = 0.0
        self.is_sent = False
        self.is_closed = False
        self._on_data = on_data

    async def send(self, data: bytes) -> bool:
        """Send all of it; return False if the server takes no more. Raises `OSError` for other failures.

        A server that resets the connection may have answered before. Only `receive` shows that.
        """
        try:
            await self.link.send(data)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    async def receive(self) -> bytes:
        """Wait for bytes; return those of the body. Raises `OSError` if the connection ends too early."""
        data = await self.link.receive()
        if not data:
            self.is_closed = True
            if not self.parser.end():
                begun = self.parser.has_begun
                raise ConnectionResetError(
                    "closed the connection in the middle of a response"
                    if begun
                    else "closed the connection without a response"
                )
            return b""
        self._on_data()
        return self.parser.feed(data)


class Clock:
    """One cancel scope with the deadline of the current phase: a scope for each phase would cost more."""

    __slots__ = ("_at_most", "_reason", "_seconds", "scope")

    def __init__(self, within_s: float | None) -> None:
        self.scope = trio.CancelScope()
        self._at_most = float("inf") if within_s is None else trio.current_time() + within_s
        self._reason = ""
        self._seconds = 0.0

    @property
    def reason(self) -> str:
        """The message for a phase that took too long."""
        return f"{self._reason} in time"

    def begin(self, reason: str, seconds: float) -> None:
        """Begin a phase that may take `seconds`; `reason` is the message if it takes longer."""
        self._reason = reason
        self._seconds = seconds
        self.restart()

    def suspend(self) -> None:
        """Suspend the phase's time limit until `restart`, because the other side waits for us."""
        self.scope.deadline = self._at_most

    def restart(self) -> None:
        """Start the phase's time limit anew, because there was progress."""
        deadline = min(trio.current_time() + self._seconds, self._at_most)
        if deadline != self.scope.deadline:  # equal where there is no limit; setting it is costly
            self.scope.deadline = deadline


def describe(error: Exception) -> str:
    """Return what went wrong in an exchange, in words that follow the server's name."""
    if isinstance(error, InvalidResponse):
        return f"sent {error}"
    return reason_of(error)


def is_local_shortage(error: OSError) -> bool:
    """Return whether a connection could not be opened because this machine lacks descriptors or memory."""
    first = _first_try(error)
    return isinstance(first, OSError) and first.errno in _SHORTAGES


def reason_of(error: Exception) -> str:
    """Return the system's message. Of several attempts, one per address, the first one's is enough."""
    first = _first_try(error)
    of_libraries = isinstance(first, socket.gaierror | ssl.SSLError)
    if isinstance(first, OSError) and first.errno is not None and not of_libraries:
        return os.strerror(first.errno)  # its own text may have addresses, which clients must not see
    return str(getattr(first, "strerror", None) or first)


def _first_try(error: Exception) -> BaseException:
    cause = error.__cause__
    return cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else error
