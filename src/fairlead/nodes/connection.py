"""One connection in use: the answer that comes through it, how long it may take, and why it broke."""

import errno
import os
import socket
import ssl
from collections.abc import Callable

import trio

from fairlead.nodes.answer_parser import AnswerParser, BadAnswer
from fairlead.nodes.links import Link

_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Connection:
    """A link and the answer that comes through it. `heard` is told of everything that comes."""

    __slots__ = ("_heard", "idle_since", "is_closed", "link", "parser")

    def __init__(self, link: Link, heard: Callable[[], None]) -> None:
        self.link = link
        self.parser = AnswerParser()
        self.idle_since = 0.0
        self.is_closed = False
        self._heard = heard

    async def receive(self) -> bytes:
        """Wait for bytes; return those of the body among them. Raises `OSError` at an early end."""
        data = await self.link.receive()
        if not data:
            self.is_closed = True
            if not self.parser.end():
                begun = self.parser.has_begun
                raise ConnectionResetError(
                    "broke off in the middle of an answer" if begun else "closed the connection unanswered"
                )
            return b""
        self._heard()
        return self.parser.feed(data)


class Clock:
    """One cancel scope, whose deadline moves from phase to phase: a scope for each would cost more."""

    __slots__ = ("_at_most", "_reason", "_seconds", "scope")

    def __init__(self, within_s: float | None) -> None:
        self.scope = trio.CancelScope()
        self._at_most = float("inf") if within_s is None else trio.current_time() + within_s
        self._reason = ""
        self._seconds = 0.0

    @property
    def reason(self) -> str:
        """What did not happen in time."""
        return f"{self._reason} in time"

    def begin(self, reason: str, seconds: float) -> None:
        """Begin a phase that may take that long; `reason` says what its end means."""
        self._reason = reason
        self._seconds = seconds
        self.restart()

    def hold(self) -> None:
        """We are the ones who let the other side wait: no phase ends before it is restarted."""
        self.scope.deadline = self._at_most

    def restart(self) -> None:
        """Something happened: the phase's time runs anew."""
        deadline = min(trio.current_time() + self._seconds, self._at_most)
        if deadline != self.scope.deadline:  # never is, where there is no limit; and to set it has its price
            self.scope.deadline = deadline


def told(error: Exception) -> str:
    """Return what went wrong in an exchange, after the server's name."""
    if isinstance(error, BadAnswer):
        return f"sent {error}"
    return reason_of(error)


def is_local_shortage(error: OSError) -> bool:
    """Whether no connection could be opened because this machine lacks something for it."""
    first = _first_try(error)
    return isinstance(first, OSError) and first.errno in _SHORTAGES


def reason_of(error: Exception) -> str:
    """Return the system's words. Of several tries, one an address, the first tells enough."""
    first = _first_try(error)
    of_libraries = isinstance(first, socket.gaierror | ssl.SSLError)
    if isinstance(first, OSError) and first.errno is not None and not of_libraries:
        return os.strerror(first.errno)  # its own text may name addresses, which are not for clients
    return str(getattr(first, "strerror", None) or first)


def _first_try(error: Exception) -> BaseException:
    cause = error.__cause__
    return cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else error
