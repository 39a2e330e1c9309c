"""One client's socket: reading ahead, writing with a deadline, and leaving in good order.

One task reads for as long as the connection lives, also while a request is answered, so that a client that
leaves is seen at once. Everything the app does runs in the connection's nursery and is cancelled with it.
An error here ends this connection and no other. Knows no HTTP: that is `protocol`'s.

What counts as leaving: the end of the client's stream (FIN) or a reset. A client that shuts down only its
sending side looks just like one that has closed, and while a job waits or runs that is the only sign there
is, so it counts too. A FIN comes after all that the client has sent, and not at all while the kernel has no
room for that. So we read on while a request is answered, also what is pipelined behind it (`protocol` refuses
too much of that). Reading stops only while the app does not read a body; the connection is then checked for
a FIN every `LOOK_EVERY_S`, and the time limit of the body ends what that does not find.

A connection costs one descriptor.
"""

import select
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Any

import structlog
import trio
from hypercorn.events import Closed, RawData

from fairlead.api.asgi import Disconnected
from fairlead.api.protocol import Protocol, Shared

logger = structlog.get_logger("fairlead.http")

RECEIVE_BYTES = 64 * 1024
READ_AHEAD_BYTES = 64 * 1024
LINGER_S = 2.0
LOOK_EVERY_S = 1.0


class Connection:
    """Serves one accepted, non-blocking TCP socket, and closes it."""

    def __init__(self, shared: Shared, sock: socket.socket, client: tuple[Any, ...]) -> None:
        self._socket = sock
        self._stall_s = shared.limits.stall_s
        self._writing = trio.Lock()
        self._unsent = b""  # what `_write_now` began and somebody else is to finish
        self._ahead = 0
        self._new = True  # usually its first request has come with it: reading need not wait for news of it
        self._ended = False
        self._lingers = True
        self._pause = trio.CancelScope()  # what the reader waits in, when it waits
        self._shared = shared
        self._client = (str(client[0]), int(client[1]))
        self._protocol: Protocol | None = None
        self._start_soon: Callable[..., None]

    async def run(self) -> None:
        """Serve until the client leaves, we are asked to end, or something breaks. Raises nothing of that."""
        try:
            async with trio.open_nursery() as nursery:
                self._protocol = Protocol(
                    self._shared,
                    client=self._client,
                    server=self._socket.getsockname()[:2],
                    start_soon=nursery.start_soon,
                    wake=self._wake,
                    send=self._on_event,
                    writable=self._writable,
                    write_now=self._write_now,
                )
                self._start_soon = nursery.start_soon
                if not self._ended:
                    await self._read(self._protocol)
                await self._protocol.leave()
                if self._lingers:
                    self._socket.shutdown(socket.SHUT_WR)
                nursery.cancel_scope.cancel()
            if self._lingers:
                await linger(self._socket)
        except* OSError:
            pass  # the client has gone
        except* Exception as group:
            logger.exception("connection dropped", client=self._client, exc_info=group)
        finally:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()

    def drain(self) -> None:
        """End the connection if no request is being answered; else its answer will be its last."""
        if self._protocol is None or self._protocol.idle:
            self._lingers = False
            self._end()

    def abort(self) -> None:
        """End the connection now, without regard for what has not been sent. Wakes whoever waits for it."""
        self._lingers = False
        with suppress(OSError):
            # A reset, or the kernel would go on trying to deliver.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._socket.shutdown(socket.SHUT_RDWR)
        self._end()

    # Reading ---------------------------------------------------------------------------------------

    async def _read(self, protocol: Protocol) -> None:
        """Read and parse until the connection is to end."""
        while True:
            await protocol.advance()
            if self._ended:
                return
            blocked = protocol.blocked
            if not blocked:
                self._ahead = 0
            data = None
            # No checkpoint since `advance`: whatever happens from here on can wake us.
            with trio.CancelScope(deadline=inf if blocked else protocol.deadline) as self._pause:
                data = await self._receive(holds=blocked and not protocol.reads_ahead)
            if data:
                self._ahead += len(data)
                protocol.receive(data)
            elif data is not None:
                self._lingers = False
                return
            elif trio.current_time() >= self._pause.deadline:
                await protocol.expire()

    async def _receive(self, *, holds: bool) -> bytes | None:
        """Wait for the client. Return what it has sent, nothing if it has left, None if there was no news.

        `holds`: nobody can take more than `READ_AHEAD_BYTES` now.
        """
        if holds and self._ahead >= READ_AHEAD_BYTES:
            await _hung_up(self._socket)
            return b""
        if not self._new:
            await trio.lowlevel.wait_readable(self._socket)
        self._new = False
        try:
            return self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _wake(self) -> None:
        self._pause.cancel()

    def _end(self) -> None:
        self._ended = True
        self._pause.cancel()

    # Writing ---------------------------------------------------------------------------------------

    async def _on_event(self, event: Any) -> None:
        """Do what the protocol asks for: Hypercorn's `RawData`, `Closed` and `Updated`."""
        if type(event) is RawData:
            await self._write(event.data)
        elif type(event) is Closed:
            self._end()
        elif event.idle and self._protocol is not None:
            self._pause.deadline = self._protocol.deadline
        else:
            self._wake()

    async def _write(self, data: bytes) -> None:
        """Write all of it. Usually the kernel takes it at once, and this does not wait."""
        sent = 0
        if self._caught_up():
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                pass
            except OSError:
                self._end()
                raise Disconnected from None
            if sent == len(data):
                return
        await self._write_slowly(data[sent:])

    def _caught_up(self) -> bool:
        """Whether the kernel has taken all that came before, and nobody else is writing."""
        return not (self._unsent or self._writing.locked())

    def _writable(self) -> bool:
        return self._caught_up() and not self._ended

    def _write_now(self, data: bytes) -> None:
        """Write what the kernel takes at once; the rest follows as the client reads. Only if `_writable`."""
        sent = 0
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            pass
        except OSError:
            self._end()
            return
        if sent < len(data):
            self._unsent = data[sent:]
            self._start_soon(self._write_slowly, b"")

    async def _write_slowly(self, data: bytes) -> None:
        """Write as the client reads. Each time the kernel takes more, it has `stall_s` again."""
        try:
            async with self._writing:
                left, self._unsent = memoryview(self._unsent + data), b""
                while left:
                    with trio.fail_after(self._stall_s):
                        await trio.lowlevel.wait_writable(self._socket)
                    left = left[self._socket.send(left) :]
        except trio.TooSlowError:
            logger.warning("connection dropped", client=self._client, reason="the client does not read")
            self.abort()
            raise Disconnected from None
        except OSError:
            self._end()
            raise Disconnected from None
        except trio.Cancelled:
            self.abort()  # the other half of what we began can never follow
            raise


async def linger(sock: socket.socket) -> None:
    """Read what still comes, or closing would reset the connection before our last words are read."""
    with trio.move_on_after(LINGER_S):
        await trio.lowlevel.wait_readable(sock)
        while sock.recv(RECEIVE_BYTES):
            await trio.lowlevel.wait_readable(sock)


async def _hung_up(sock: socket.socket) -> None:
    """Wait for a reset or the end of the client's stream, leaving what it has sent unread.

    Trio could only wait for bytes, of which there are plenty, and an epoll set would cost a descriptor.
    Systems without POLLRDHUP, which is Linux's, report a reset only.
    """
    news = select.poll()
    news.register(sock, getattr(select, "POLLRDHUP", 0))
    while not news.poll(0):  # noqa: ASYNC110  # there is no event
        await trio.sleep(LOOK_EVERY_S)
