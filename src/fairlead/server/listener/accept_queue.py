"""Accepted connections and requests that are not yet started: a round robin of addresses, and of their lines.

The kernel returns connections in the order of their arrival, and starting one costs ten times as much as
accepting it. So a client that opens a thousand at once would delay every later client until all of them are
started. Here a connection of a new address starts after at most one of each other address. Those of one
address are in lines, by their keys (see `callers`), which take turns in the same way: behind a proxy all
clients may have one address. Within a line the order of arrival holds. Sockets are only stored, and closed
at the end. Of the requests of each address, one is started per pass of the event loop.

Example: A1 A2 A3 of one address and key, B1 of the same address and another key, C1 of another address
arrive in this order, and start as A1 C1 B1 A2 A3.
"""

import socket
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import trio

from fairlead.server.listener.callers import Sender


class AcceptedConnection(NamedTuple):
    """An accepted, non-blocking socket and its client's address as `accept` returns it."""

    sock: socket.socket
    client: tuple[Any, ...]


class AcceptQueue:
    """One queue per line of each address, in round-robin order."""

    def __init__(self) -> None:
        self._addresses: dict[str, dict[str, deque[AcceptedConnection]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, arrival: AcceptedConnection, caller: Sender) -> None:
        """Append a connection to its caller's line."""
        lines = self._addresses.setdefault(caller.address, {})
        lines.setdefault(caller.line, deque()).append(arrival)
        self._count += 1

    def pop(self) -> AcceptedConnection:
        """Remove and return the next connection; its address and its line move behind all others."""
        address = next(iter(self._addresses))
        lines = self._addresses.pop(address)
        line = next(iter(lines))
        queue = lines.pop(line)
        arrival = queue.popleft()
        if queue:
            lines[line] = queue
        if lines:
            self._addresses[address] = lines
        self._count -= 1
        return arrival

    def close(self) -> None:
        """Close all queued connections."""
        while self._count:
            self.pop().sock.close()


class RequestTurns:
    """Starts the requests of each address in the turns of its lines, one per pass of the event loop.

    In one pass, Trio runs every runnable task. Many requests of one client would delay another client's
    request at each of its steps.
    """

    def __init__(self) -> None:
        # An address is a key while one of its requests is starting. The events are of the requests behind
        # it, by their lines, of which the first is next.
        self._addresses: dict[str, dict[str, OrderedDict[trio.Event, None]]] = {}

    @property
    def idle(self) -> bool:
        """Whether no request waits for its turn."""
        return not self._addresses

    async def wait(self, address: str, line_of: Callable[[], str] = str) -> None:
        """Wait for the turn of a request; for one pass of the loop if no other of its address is waiting.

        `line_of` returns the request's line, and is only called if it must wait.
        """
        lines = self._addresses.get(address)
        if lines is None:
            lines = self._addresses[address] = {}
            try:
                await trio.lowlevel.checkpoint()
            finally:
                self._begin_next(address, lines)
            return
        line, turn = line_of(), trio.Event()
        lines.setdefault(line, OrderedDict())[turn] = None
        try:
            await turn.wait()
        finally:
            if turn.is_set():
                self._begin_next(address, lines)
            else:
                del lines[line][turn]
                if not lines[line]:
                    del lines[line]

    def _begin_next(self, address: str, lines: dict[str, OrderedDict[trio.Event, None]]) -> None:
        if not lines:
            del self._addresses[address]
            return
        line = next(iter(lines))
        queue = lines.pop(line)
        turn, _ = queue.popitem(last=False)
        if queue:
            lines[line] = queue
        turn.set()
