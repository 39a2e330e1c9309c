"""Python's sockets and epoll over the machine's connections.

`FakeSocket` is a subclass of the real class, so that Trio's own wrappers accept it, but opens no real socket.
It implements what the server uses; anything else raises.
"""

import errno
import select
import socket
import struct
from contextvars import ContextVar
from pathlib import PurePath
from typing import Any, Self

import trio

from simulation.machine import Machine, Pollable, os_error
from simulation.network import SERVER_HOST, Bound, Listening, Network
from simulation.streams import Address, End, connected

REAL_SOCKET = socket.socket
# The sockets that the current process listens on, for its end.
LISTENING: ContextVar[list["FakeSocket"] | None] = ContextVar("LISTENING", default=None)
CONNECT_TIMEOUT_S = 127.0  # Linux: six retries of a SYN


class Epoll(Pollable):
    """An epoll set. Only EPOLLRDHUP is simulated."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine
        self._watched: list[End] = []
        self._number = machine.open(self, "epoll")

    def is_ready(self, what: str) -> bool:
        """Return whether the peer of a watched socket has closed or reset it."""
        return what == "read" and any(end.has_ended or end.is_reset for end in self._watched)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Return its descriptor."""
        return self._number

    def register(self, sock: Any, events: int) -> None:
        """Watch a socket."""
        assert events == select.EPOLLRDHUP, "nothing else is simulated"
        end = self._machine.opened(sock.fileno())
        assert isinstance(end, End)
        self._watched.append(end)
        end.on_hangup = lambda: self.wake("read")

    def close(self) -> None:
        """Close it."""
        if self._number >= 0:
            self._machine.close(self._number)
            self._number = -1


class Poll:
    """A poll object, which never blocks; `wait` does. POLLIN, POLLOUT and POLLRDHUP are simulated."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._watched: dict[int, int] = {}

    def register(self, sock: Any, events: int) -> None:
        """Watch a socket for these events."""
        self._watched[number_of(sock)] = events

    modify = register

    def unregister(self, sock: Any) -> None:
        """Stop to watch a socket."""
        del self._watched[number_of(sock)]

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        """Return the sockets that have one of their events, with these."""
        assert timeout_ms == 0, "nothing else is simulated"
        found = ((number, self._found(number, events)) for number, events in self._watched.items())
        return [(number, events) for number, events in found if events]

    async def wait(self) -> None:
        """Wait until a socket has one of its events. Closing a watched socket meanwhile is an error."""
        async with trio.open_nursery() as nursery:
            for number, events in self._watched.items():
                for event, what in ((select.POLLIN, "read"), (select.POLLOUT, "write")):
                    if events & event:
                        nursery.start_soon(self._wait_for, number, what, nursery.cancel_scope)

    async def _wait_for(self, number: int, what: str, scope: trio.CancelScope) -> None:
        await self._machine.opened(number).wait(what)
        scope.cancel()

    def _found(self, number: int, events: int) -> int:
        opened = self._machine.opened(number)
        found = 0
        if events & select.POLLIN and opened.is_ready("read"):
            found |= select.POLLIN
        if events & select.POLLOUT and opened.is_ready("write"):
            found |= select.POLLOUT
        if events & select.POLLRDHUP and isinstance(opened, End) and (opened.has_ended or opened.is_reset):
            found |= select.POLLRDHUP
        return found


class FakeSocket(REAL_SOCKET):
    """A TCP or Unix socket of the simulated server. It never blocks."""

    network: Network  # of the current simulation

    def __new__(cls, *_: Any, **__: Any) -> Self:
        return super().__new__(cls)

    def __init__(self, family: int = -1, type: int = -1, proto: int = -1, fileno: int | None = None) -> None:  # noqa: A002
        self._machine = self.network.machine
        self._io_refs, self._closed = 0, False
        self._family = socket.AF_UNIX if family == socket.AF_UNIX else socket.AF_INET
        self._options: dict[tuple[int, int], Any] = {}
        self._error = 0
        self._number = self._machine.open(_Unconnected()) if fileno is None else fileno
        self._machine.opened(self._number)

    family = property(lambda self: self._family)
    type = property(lambda _self: socket.SOCK_STREAM)
    proto = property(lambda _self: 0)

    def __repr__(self) -> str:
        return f"<FakeSocket {self._number}>"

    # Its descriptor ----------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._number

    def detach(self) -> int:
        number, self._number, self._closed = self._number, -1, True
        return number

    def close(self) -> None:
        if self._number >= 0:
            number = self.detach()
            opened = self._machine.opened(number)
            if isinstance(opened, End) and opened.refs == 1 and self._resets_on_close():
                opened.reset()
            self._machine.close(number)

    def __del__(self) -> None:
        if getattr(self, "_number", -1) >= 0:
            if not self._machine.has_failed_call:
                self._machine.misuses.append(f"{self!r} was closed by the garbage collector")
            self.close()

    def _resets_on_close(self) -> bool:
        linger = self._options.get((socket.SOL_SOCKET, socket.SO_LINGER))
        return isinstance(linger, bytes) and struct.unpack("ii", linger) == (1, 0)

    # Options -----------------------------------------------------------------------------------------

    def setblocking(self, flag: bool) -> None:
        pass

    def set_inheritable(self, inheritable: bool) -> None:
        pass

    def settimeout(self, value: float | None) -> None:
        pass

    def gettimeout(self) -> float | None:
        return 0.0

    def setsockopt(self, level: int, option: int, value: Any, length: int = 0) -> None:
        self._machine.call("setsockopt")
        self._options[level, option] = value

    def getsockopt(self, level: int, option: int, length: int = 0) -> Any:
        if (level, option) == (socket.SOL_SOCKET, socket.SO_ERROR):
            error, self._error = self._error, 0
            return error
        if (level, option) == (socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            opened = self._machine.opened(self._number)
            return isinstance(opened, Listening) and opened.bound.is_listening
        return self._options.get((level, option), 0)

    def getsockname(self) -> Address:
        opened = self._machine.opened(self._number)
        if isinstance(opened, Listening):
            return opened.bound.address
        return opened.local if isinstance(opened, End) else (SERVER_HOST, 0)

    def getpeername(self) -> Address:
        return self._end().remote

    # Listening ---------------------------------------------------------------------------------------

    def bind(self, address: Any) -> None:
        self._machine.call("bind")
        host, port = self._address(address)
        address = (host, port or (0 if self._family == socket.AF_UNIX else 8000))
        self._machine.replace(self._number, Listening(Bound(self.network, address)))

    def listen(self, backlog: int = 128) -> None:
        listening = self._machine.opened(self._number)
        assert isinstance(listening, Listening)
        listening.bound.listen(backlog)
        if (all_listening := LISTENING.get()) is not None:
            all_listening.append(self)

    def accept(self) -> tuple["FakeSocket", Address]:
        listening = self._machine.opened(self._number)
        assert isinstance(listening, Listening)
        arrived = listening.bound.arrived
        if not arrived:
            raise os_error(errno.EAGAIN)
        number = self._machine.open(arrived[0], "accept")
        end = arrived.popleft()
        self._machine.note("accept", number, *end.remote)
        return FakeSocket(self._family, fileno=number), end.remote

    # Connecting --------------------------------------------------------------------------------------

    def connect(self, address: Any) -> None:
        self._machine.call("connect")
        near = self.network.free_address(SERVER_HOST)
        far = self._address(address)
        end = self.network.dial(near, far)
        host, port = far
        self._machine.note("connect", self._number, host if port else PurePath(host).name, port)
        if end is not None:
            self._machine.replace(self._number, end)
            return
        waiting = self._machine.opened(self._number)
        assert isinstance(waiting, _Unconnected)

        def give_up() -> None:
            self._error, waiting.is_over = errno.ETIMEDOUT, True
            waiting.wake("write")

        self._machine.after(CONNECT_TIMEOUT_S, give_up)
        raise os_error(errno.EINPROGRESS)

    # Bytes -------------------------------------------------------------------------------------------

    def send(self, data: Any, flags: int = 0) -> int:
        end = self._end()
        self._machine.call("send")
        sent = end.send_now(bytes(data))
        self._machine.note("send", self._number, sent)
        return sent

    def recv(self, size: int, flags: int = 0) -> bytes:
        end = self._end()
        self._machine.call("recv")
        data = end.receive_now(size, peek=bool(flags & socket.MSG_PEEK))
        self._machine.note("recv", self._number, len(data))
        return data

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        data = self.recv(nbytes or len(buffer), flags)
        buffer[: len(data)] = data
        return len(data)

    def shutdown(self, how: int) -> None:
        end = self._end()
        if end.is_reset:
            raise os_error(errno.ENOTCONN)
        if how in (socket.SHUT_WR, socket.SHUT_RDWR):
            end.shut()
        if how in (socket.SHUT_RD, socket.SHUT_RDWR):
            end.has_ended = True
            end.wake("read")

    def _address(self, address: Any) -> Address:
        return (address, 0) if self._family == socket.AF_UNIX else (address[0], address[1])

    def _end(self) -> End:
        opened = self._machine.opened(self._number)
        if not isinstance(opened, End):
            raise os_error(errno.ENOTCONN)
        return opened


class _Unconnected(Pollable):
    """A socket without a connection."""

    is_over = False

    def is_ready(self, what: str) -> bool:
        return what == "write" and self.is_over


def socketpair(*_: Any) -> tuple[FakeSocket, FakeSocket]:
    """Replace `socket.socketpair`."""
    machine = FakeSocket.network.machine
    one, other = connected(machine, ("pair", 0), ("pair", 1))
    first = FakeSocket(fileno=machine.open(one, "socketpair"))
    try:
        return first, FakeSocket(fileno=machine.open(other, "socketpair"))
    except BaseException:
        first.close()
        raise


def number_of(fd: Any) -> int:
    """Return the descriptor of an argument of Trio's functions: a number, or an object with `fileno`."""
    number: int = fd if isinstance(fd, int) else fd.fileno()
    return number
