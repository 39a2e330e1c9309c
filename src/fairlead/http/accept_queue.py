"""Accepted connections and requests that are not yet started: a round robin of the clients' addresses.

The kernel returns connections in the order of their arrival, and starting one costs ten times as much as
accepting it. So a client that opens a thousand at once would delay every later client until all of them are
started. Here a connection of a new address starts after at most one of each other address. Behind a proxy all
clients have one address, so the order of arrival holds. Sockets are only stored, and closed at the end. Of
the requests of each address, one is started per pass of the event loop.
"""

import socket
from collections import OrderedDict, deque
from typing import Any, NamedTuple

import trio


class AcceptedConnection(NamedTuple):
    """An accepted, non-blocking socket and its client's address as `accept` returns it."""

    sock: socket.socket
    client: tuple[Any, ...]


class AcceptQueue:
    """One queue per address, in round-robin order."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[AcceptedConnection]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, arrival: AcceptedConnection) -> None:
        """Append a connection to the queue of its address."""
        self._queues.setdefault(arrival.client[0], deque()).append(arrival)
        self._count += 1

    def pop(self) -> AcceptedConnection:
        """Remove and return the next connection; its address moves behind all others."""
        address = next(iter(self._queues))
        queue = self._queues.pop(address)
        arrival = queue.popleft()
        if queue:
            self._queues[address] = queue
        self._count -= 1
        return arrival

    def close(self) -> None:
        """Close all queued connections."""
        while self._count:
            self.pop().sock.close()


class RequestTurns:
    """Starts the requests of each address in their order, one per pass of the event loop.

    In one pass, Trio runs every runnable task. Many requests of one client would delay another client's
    request at each of its steps.
    """

    def __init__(self) -> None:
        # An address is a key while one of its requests is starting; the events are of the requests behind it.
        self._queues: dict[str, OrderedDict[trio.Event, None]] = {}

    @property
    def idle(self) -> bool:
        """Whether no request waits for its turn."""
        return not self._queues

    async def wait(self, address: str) -> None:
        """Wait for the turn of a request; for one pass of the loop if no other of its address is waiting."""
        queue = self._queues.get(address)
        if queue is None:
            queue = self._queues[address] = OrderedDict()
            try:
                await trio.lowlevel.checkpoint()
            finally:
                self._begin_next(address, queue)
            return
        turn = trio.Event()
        queue[turn] = None
        try:
            await turn.wait()
        finally:
            if turn.is_set():
                self._begin_next(address, queue)
            else:
                del queue[turn]

    def _begin_next(self, address: str, queue: OrderedDict[trio.Event, None]) -> None:
        if queue:
            turn, _ = queue.popitem(last=False)
            turn.set()
        else:
            del self._queues[address]
