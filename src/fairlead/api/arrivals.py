"""Connections and requests that have come but are not begun yet: those of different addresses take turns.

The kernel hands connections over in the order in which they came, and to begin one costs ten times as much as
to accept it. So a client that opens a thousand at once would keep whoever comes behind it waiting for all of
them. Here the newcomer's turn comes after one of the thousand. (Behind a proxy everybody has one address:
then the order of arrival holds.) Requests take turns likewise: of each address one begins per pass of the
event loop. Knows no sockets but as something to keep, and to close at the end.
"""

import socket
from collections import OrderedDict, deque
from typing import Any, NamedTuple

import trio


class Arrival(NamedTuple):
    """An accepted, non-blocking socket and its client's address as `accept` gives it."""

    sock: socket.socket
    client: tuple[Any, ...]


class Arrivals:
    """A line for each address, in the order in which their turns come."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[Arrival]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, arrival: Arrival) -> None:
        """Add a connection behind the others of its address."""
        self._lines.setdefault(arrival.client[0], deque()).append(arrival)
        self._count += 1

    def pop(self) -> Arrival:
        """Take the connection whose turn it is out; its address goes behind all others."""
        address = next(iter(self._lines))
        line = self._lines.pop(address)
        arrival = line.popleft()
        if line:
            self._lines[address] = line
        self._count -= 1
        return arrival

    def close(self) -> None:
        """Close on all who still wait."""
        while self._count:
            self.pop().sock.close()


class RequestTurns:
    """Begins the requests of each address one after another, one per pass of the event loop.

    In one pass, Trio runs every task that can run. If a client sends many requests at once, another client's
    request would be delayed by all of them at each of its steps.
    """

    def __init__(self) -> None:
        # An address is a key while one of its requests is beginning; the events are of those behind it.
        self._lines: dict[str, OrderedDict[trio.Event, None]] = {}

    @property
    def idle(self) -> bool:
        """Whether no request waits for its turn."""
        return not self._lines

    async def wait(self, address: str) -> None:
        """Wait for the turn of a request; for one pass of the loop if no other of its address is waiting."""
        line = self._lines.get(address)
        if line is None:
            line = self._lines[address] = OrderedDict()
            try:
                await trio.lowlevel.checkpoint()
            finally:
                self._begin_next(address, line)
            return
        turn = trio.Event()
        line[turn] = None
        try:
            await turn.wait()
        finally:
            if turn.is_set():
                self._begin_next(address, line)
            else:
                del line[turn]

    def _begin_next(self, address: str, line: OrderedDict[trio.Event, None]) -> None:
        if line:
            turn, _ = line.popitem(last=False)
            turn.set()
        else:
            del self._lines[address]
