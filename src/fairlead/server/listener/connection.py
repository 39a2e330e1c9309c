"""One client's socket: reading ahead, writing with a deadline, and an orderly close.

One task reads for the whole life of the connection, also while a request is handled, so that a disconnect is
noticed at once. Everything the app does runs in the connection's nursery and is cancelled with it. An error
here ends this connection and no other. Independent of HTTP, which `protocol` implements.

A disconnect is the end of the client's stream (FIN) or a reset. A client that shuts down only its sending
side looks just like one that has closed. While a job is queued or runs there is no other sign, so it counts
as a disconnect. A FIN arrives after all that the client has sent, and not at all while the kernel's buffer
has no space for that. So we read on while a request is handled, also what is pipelined behind it (`protocol`
refuses too much of that). Reading stops only while the app does not read a body. The connection is then
checked for a FIN every `PROBE_INTERVAL_S`, and the body's time limit ends what that check misses.

A connection uses one descriptor.
"""

import select
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Any, NamedTuple

import structlog
import trio
from hypercorn.events import Closed, RawData

from fairlead.server.listener.asgi import ClientDisconnected
from fairlead.server.listener.protocol import Protocol, Shared

logger = structlog.get_logger("fairlead.server.listener")

RECEIVE_BYTES = 64 * 1024
READ_AHEAD_BYTES = 64 * 1024
LINGER_S = 2.0
PROBE_INTERVAL_S = 1.0


class _Unsent(NamedTuple):
    """Data that are partly unsent: `left` is a view of the rest."""

    data: bytes
    left: memoryview


class ServerConnection:
    """The server side of one accepted, non-blocking socket, of TCP or Unix, which it closes at its end."""

    def __init__(self, shared: Shared, sock: socket.socket, client: tuple[Any, ...]) -> None:
        self._socket = sock
        self._stall_s = shared.limits.stall_s
        self._writing = trio.Lock()
        self._unsent: _Unsent | None = None  # the rest of a `_write_now`, for `_write_slowly` to send
        self._ahead = 0
        self._new = True  # the first request has usually arrived already: read without waiting
        self._ended = False
        self._lingers = True
        self._pause = trio.CancelScope()  # the scope that the reader waits in
        self._shared = shared
        self._client = (str(client[0]), int(client[1]))
        self._protocol: Protocol | None = None
        self._start_soon: Callable[..., None]

    async def run(self) -> None:
        """Serve until the client disconnects, we close, or an error occurs. Raises none of these."""
        try:
            async with trio.open_nursery() as nursery:
                self._protocol = Protocol(
                    self._shared,
                    client=self._client,
                    server=_server_of(self._socket),
                    start_soon=nursery.start_soon,
                    wake=self._wake,
                    send=self._on_event,
                    writable=self._writable,
                    write_now=self._write_now,
                    abort=self.abort,
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
            pass  # the client has disconnected
        except* Exception as group:
            logger.exception("connection dropped", client=self._client, exc_info=group)
        finally:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()
            protocol, self._protocol = self._protocol, None
            if protocol is not None:
                protocol.dispose()

    def drain(self) -> None:
        """End the connection if it is idle; else the current response is its last."""
        if self._protocol is None or self._protocol.idle:
            self._lingers = False
            farewell = b"" if self._protocol is None else self._protocol.farewell()
            if farewell and self._writable():
                self._write_now(farewell)
            self._end()

    def abort(self) -> None:
        """End the connection now and drop unsent data. Wakes all tasks that wait for the socket."""
        self._lingers = False
        with suppress(OSError):
            # Send a reset: otherwise the kernel would go on trying to deliver.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._socket.shutdown(socket.SHUT_RDWR)
        self._end()

    # Reading ---------------------------------------------------------------------------------------

    async def _read(self, protocol: Protocol) -> None:
        """Read and parse until the connection ends."""
        while True:
            await protocol.advance()
            if self._ended:
                return
            blocked = protocol.blocked
            if not blocked:
                self._ahead = 0
            data = None
            # No checkpoint since `advance`: no wake-up has been missed.
            with trio.CancelScope(deadline=inf if blocked else protocol.deadline) as self._pause:
                data = await self._receive(protocol, is_full=blocked and not protocol.reads_ahead)
            if data:
                self._ahead += len(data)
                protocol.receive(data)
            elif data is not None:
                self._lingers = False
                return
            elif trio.current_time() >= self._pause.deadline:
                await protocol.expire()

    async def _receive(self, protocol: Protocol, *, is_full: bool) -> bytes | None:
        """Wait for data and return it; empty after a disconnect, None if there is none after all.

        `is_full`: no more than `READ_AHEAD_BYTES` can be taken now.
        """
        if is_full and self._ahead >= READ_AHEAD_BYTES:
            await _wait_for_disconnect(self._socket)
            return b""
        if not self._new:
            await trio.lowlevel.wait_readable(self._socket)
            if protocol.reads_body:
                await protocol.turn_to_read()
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
        """Handle an event of the protocol: Hypercorn's `RawData`, `Closed` or `Updated`."""
        if type(event) is RawData:
            await self._write(event.data)
        elif type(event) is Closed:
            self._end()
        elif event.idle and self._protocol is not None:
            self._pause.deadline = self._protocol.deadline
        else:
            self._wake()

    async def _write(self, data: bytes) -> None:
        """Write all data. Usually the kernel takes it at once, and this does not wait."""
        sent = 0
        if self._all_sent():
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                pass
            except OSError:
                self._end()
                raise ClientDisconnected from None
            if sent == len(data):
                return
        self._count(len(data))
        await self._write_slowly(_Unsent(data, memoryview(data)[sent:]))

    def _count(self, size: int) -> None:
        """Count bytes that wait for the client, which have their memory until all are sent.

        This may abort any connection.
        """
        if self._protocol is not None and (unread := self._protocol.unread) is not None:
            unread.add(size)

    def _all_sent(self) -> bool:
        """Return whether the kernel has taken all earlier data, and no other task is writing."""
        return not (self._unsent or self._writing.locked())

    def _writable(self) -> bool:
        return self._all_sent() and not self._ended

    def _write_now(self, data: bytes) -> None:
        """Write what the kernel takes at once; a task sends the rest. Only if `_writable`."""
        sent = 0
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            pass
        except OSError:
            self._end()
            return
        if sent < len(data):
            self._unsent = _Unsent(data, memoryview(data)[sent:])
            self._count(len(data))
            self._start_soon(self._write_slowly)

    async def _write_slowly(self, unsent: _Unsent | None = None) -> None:
        """Write as the client reads. Each time the kernel takes more, the limit `stall_s` begins anew.

        What waits was counted by `_count`.
        """
        unread = None if self._protocol is None else self._protocol.unread
        try:
            async with self._writing:
                earlier, self._unsent = self._unsent, None
                for part in (earlier, unsent):
                    if part is None:
                        continue
                    left = part.left
                    while left:
                        with trio.fail_after(self._stall_s):
                            await trio.lowlevel.wait_writable(self._socket)
                        left = left[self._socket.send(left) :]
                        if unread is not None:
                            unread.progress()
                    if unread is not None:
                        unread.remove(len(part.data))
        except trio.TooSlowError:
            logger.warning("connection dropped", client=self._client, reason="the client does not read")
            self.abort()
            raise ClientDisconnected from None
        except OSError:
            self._end()
            raise ClientDisconnected from None
        except trio.Cancelled:
            self.abort()  # the rest of a partial write cannot be sent any more
            raise


def _server_of(sock: socket.socket) -> tuple[str, int | None]:
    """Return the server's address as ASGI wants it: the path alone for a Unix socket."""
    name = sock.getsockname()
    return (name, None) if sock.family == socket.AF_UNIX else name[:2]


async def linger(sock: socket.socket) -> None:
    """Read until the client closes: closing first could reset the connection before it has read all."""
    with trio.move_on_after(LINGER_S):
        await trio.lowlevel.wait_readable(sock)
        while sock.recv(RECEIVE_BYTES):
            await trio.lowlevel.wait_readable(sock)


async def _wait_for_disconnect(sock: socket.socket) -> None:
    """Wait for a reset or the end of the client's stream, without reading what it has sent.

    Trio can only wait for readable data, which there is already, and an epoll set would use a descriptor.
    Systems without POLLRDHUP, which is Linux's, report only a reset.
    """
    poll = select.poll()
    poll.register(sock, getattr(select, "POLLRDHUP", 0))
    while not poll.poll(0):  # noqa: ASYNC110  # there is no event
        await trio.sleep(PROBE_INTERVAL_S)
