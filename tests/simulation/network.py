"""The network around the simulated server: listening sockets, other servers, new connections.

The path of a Unix socket is the host of an address with port 0.
"""

import errno
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

from simulation.machine import Machine, Pollable, os_error
from simulation.streams import DEFAULT_BUFFER_BYTES, Address, End, connected

SERVER_HOST = "10.0.0.1"

Handler = Callable[[End], Awaitable[None]]


class Bound:
    """A socket of the server that is bound to an address, and the connections that it has not accepted.

    Several processes may have it. Each has descriptors of its own, which are in `users`.
    """

    def __init__(self, network: "Network", address: Address) -> None:
        self.network = network
        self.address = address
        self.backlog = 0
        self.is_listening = False
        self.arrived: deque[End] = deque()
        self.users: list[Listening] = []

    def listen(self, backlog: int) -> None:
        """Accept connections from now on."""
        self.backlog = backlog
        if not self.is_listening:
            self.is_listening = True
            self.network.listen(self)

    def deliver(self, end: End) -> None:
        """Add a connection. Raises `ConnectionRefusedError`."""
        if len(self.arrived) >= self.backlog:
            raise os_error(errno.ECONNREFUSED)
        self.arrived.append(end)
        for user in list(self.users):
            user.wake("read")


class Listening(Pollable):
    """What a process's descriptor of a bound socket refers to."""

    def __init__(self, bound: Bound) -> None:
        super().__init__()
        self.bound = bound
        bound.users.append(self)

    def inherited(self) -> "Listening":
        """Return what the descriptor of a new process refers to."""
        return Listening(self.bound)

    def is_ready(self, what: str) -> bool:
        """Return whether a connection can be accepted."""
        return what == "read" and bool(self.bound.arrived)

    def release(self) -> None:
        """End it with its last descriptor in any process."""
        self.bound.users.remove(self)
        if self.bound.is_listening and not self.bound.users:
            self.bound.network.unlisten(self.bound)


class Network:
    """The listeners, by address. Other servers are handlers: each connection to one runs it as a task.

    Connections to `unreachable` hosts get no answer. `names` resolve to addresses. `shape` is called with
    the server's end of each connection that it opens.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.unreachable: set[str] = set()
        self.names: dict[str, str] = {}
        self.shape: Callable[[End], None] = lambda _end: None
        self._servers: dict[Address, Handler] = {}
        self._listening: dict[Address, list[Bound]] = {}
        self._paths: dict[str, Bound] = {}
        self._turns = count()
        self._ports = 30_000

    @property
    def is_listening(self) -> bool:
        """Whether the simulated server listens."""
        return bool(self._listening)

    @property
    def listeners(self) -> list[Address]:
        """The addresses on which the simulated server listens, without paths."""
        return list(self._listening)

    def serve(self, address: Address, handler: Handler) -> None:
        """Make another server listen on this address."""
        self._servers[address] = handler

    def stop_serving(self, address: Address) -> None:
        """Stop the other server on this address."""
        self._servers.pop(address, None)

    def listen(self, listening: Bound) -> None:
        """Make the simulated server listen. Several of its processes may listen on one port."""
        host, port = listening.address
        if port:
            self._listening.setdefault(listening.address, []).append(listening)
        else:
            self._paths[host] = listening

    def unlisten(self, listening: Bound) -> None:
        """Stop listening; connections that were not accepted are reset."""
        host, port = listening.address
        if port:
            self._listening[listening.address].remove(listening)
            if not self._listening[listening.address]:
                del self._listening[listening.address]
        elif self._paths.get(host) is listening:
            del self._paths[host]
        while listening.arrived:
            listening.arrived.popleft().reset()

    def open_connection(
        self, host: str, *, latency_s: float = 0.0, buffer_bytes: int = DEFAULT_BUFFER_BYTES
    ) -> End:
        """Connect from `host` to the server; return the client's end. Raises `ConnectionRefusedError`.

        Processes that listen on the same port are connected to in turn.
        """
        if not self._listening:
            raise os_error(errno.ECONNREFUSED)
        sharing = next(iter(self._listening.values()))
        listening = sharing[next(self._turns) % len(sharing)]
        theirs, ours = connected(
            self.machine,
            self.free_address(host),
            listening.address,
            latency_s=latency_s,
            buffer_bytes=buffer_bytes,
        )
        listening.deliver(ours)
        return theirs

    def dial(self, near: Address, far: Address) -> End | None:
        """Return the end of a connection that the server opens: to another server, or to a Unix socket.

        Returns None if there is no answer. Raises `ConnectionRefusedError`.
        """
        if far[0] in self.unreachable:
            return None
        if (listening := self._paths.get(far[0])) is not None:
            ours, theirs = connected(self.machine, near, far)
            listening.deliver(theirs)
            return ours
        handler = self._servers.get(far)
        if handler is None:
            raise os_error(errno.ECONNREFUSED)
        ours, theirs = connected(self.machine, near, far)
        if far[1]:  # on a Unix socket nothing is lost or late
            self.shape(ours)
        self.machine.nursery.start_soon(handler, theirs)
        return ours

    def free_address(self, host: str) -> Address:
        """Return an unused address of a host."""
        self._ports += 1
        return host, self._ports

    def look_up(self, host: str | None, port: Any, family: int, flags: int) -> list[tuple[Any, ...]]:
        """Replace `socket.getaddrinfo`, for IPv4 only."""
        number = int(port or 0)
        name = host or "127.0.0.1"
        is_numeric = name.replace(".", "").isdigit()
        if not is_numeric and flags & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        if not is_numeric and name not in self.names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        address = (name if is_numeric else self.names[name], number)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address)]
