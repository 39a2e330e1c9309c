"""Connections that have come but are not begun yet: those of different addresses take turns.

The kernel hands connections over in the order in which they came, and to begin one costs ten times as much as
to accept it. So a client that opens a thousand at once would keep whoever comes behind it waiting for all of
them. Here the newcomer's turn comes after one of the thousand. (Behind a proxy everybody has one address:
then the order of arrival holds.) Knows no sockets but as something to keep, and to close at the end.
"""

import socket
from collections import deque
from typing import Any, NamedTuple


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
