"""The listening sockets of one server's fronts, as one front uses them.

Each front has sockets of its own on the common port, so that the system divides connections among them at
random. Another process keeps all of them open. While a front is away, connections to its sockets wait in the
system's backlog, and the other fronts accept them.
"""

import socket
from collections.abc import Collection, Sequence

import trio

from fairlead.server.listener.listener import BACKLOG


class SharedSockets:
    """The sockets of all fronts, by their numbers. `own` is the number of this front."""

    def __init__(self, sockets: Sequence[Sequence[socket.socket]], own: int) -> None:
        self.all = [sock for some in sockets for sock in some]
        self._number_of = {sock: number for number, some in enumerate(sockets) for sock in some}
        self._own = own
        self._absent: Collection[int] = ()
        self._changed = trio.Event()
        self._scopes: dict[socket.socket, trio.CancelScope] = {}

    def listen(self) -> None:
        """Listen on all sockets. It has no effect on those on which a front listens already."""
        for sock in self.all:
            sock.listen(BACKLOG)

    def stand_in(self, absent: Collection[int]) -> None:
        """Accept the connections of these fronts from now on, besides those of this one."""
        self._absent = absent
        self._changed.set()
        self._changed = trio.Event()
        for sock, scope in self._scopes.items():
            if not self._accepts(sock):
                scope.cancel()

    async def wait_for_connection(self, sock: socket.socket) -> None:
        """Wait until there may be a connection that this front is to accept."""
        while True:
            while not self._accepts(sock):
                await self._changed.wait()
            with trio.CancelScope() as scope:
                self._scopes[sock] = scope
                try:
                    await trio.lowlevel.wait_readable(sock)
                finally:
                    del self._scopes[sock]
                return

    def _accepts(self, sock: socket.socket) -> bool:
        number = self._number_of[sock]
        return number == self._own or number in self._absent
