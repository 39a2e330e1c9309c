"""Accepted connections and requests that are not yet started: a round robin of addresses, and of their lines.

The kernel returns connections in the order of their arrival, and starting one costs ten times as much as
accepting it. So a client that opens a thousand at once would delay every later client until all of them are
started. Here a connection of a new address starts after at most one of each other address. Those of one
address are in lines, by their keys (see `callers`), which take turns in the same way: behind a proxy all
clients may have one address. Within a line the order of arrival holds. Sockets are only stored, and closed
at the end. Of the requests of each address, one is started per pass of the event loop. Of bodies that come in
several pieces, a few pieces are read per pass, by the same turns.

Example: A1 A2 A3 of one address and key, B1 of the same address and another key, C1 of another address
arrive in this order, and start as A1 C1 B1 A2 A3.
"""

import socket
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import trio

from fairlead.server.listener.callers import Sender

PIECES_PER_PASS = 4
"""A piece is at most 64 KiB and takes some 50 µs, so others wait for 0.2 ms."""


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


class ReadingTurns:
    """Lets a few pieces of bodies be read per pass of the event loop, whoever sends how many.

    Otherwise each pass would read one of every connection: a hundred large bodies of one client would delay
    all tokens by a hundred pieces, and another's body as much.
    """

    def __init__(self, pieces: int = PIECES_PER_PASS) -> None:
        self._free = pieces
        # By address and line, in the order of turns. If a piece waits here, none is free.
        self._addresses: dict[str, dict[str, OrderedDict[trio.Event, None]]] = {}

    @property
    def idle(self) -> bool:
        """Whether no piece waits for its turn."""
        return not self._addresses

    async def wait(self, address: str, line_of: Callable[[], str] = str) -> None:
        """Wait for the turn of a piece; for one pass of the loop if there are few.

        `line_of` returns the line at the address, and is only called if the piece must wait.
        """
        if self._free:
            self._free -= 1
            try:
                await trio.lowlevel.checkpoint()
            finally:
                self._pass_on()
            return
        line, turn = line_of(), trio.Event()
        self._addresses.setdefault(address, {}).setdefault(line, OrderedDict())[turn] = None
        try:
            await turn.wait()
        finally:
            if turn.is_set():
                self._pass_on()
            else:
                self._remove(address, line, turn)

    def _pass_on(self) -> None:
        """Let the next piece be read in the next pass."""
        if not self._addresses:
            self._free += 1
            return
        address = next(iter(self._addresses))
        lines = self._addresses[address]
        line = next(iter(lines))
        turn = next(iter(lines[line]))
        self._remove(address, line, turn)
        if line in lines:
            lines[line] = lines.pop(line)  # behind the others
        if lines:
            self._addresses[address] = self._addresses.pop(address)
        turn.set()

    def _remove(self, address: str, line: str, turn: trio.Event) -> None:
        lines = self._addresses[address]
        del lines[line][turn]
        if not lines[line]:
            del lines[line]
        if not lines:
            del self._addresses[address]
