"""One connection to a server, plain or with TLS: sends and receives bytes, and closes without waiting.

A plain connection bypasses Trio's streams: a send that would not block is not a checkpoint, which halves the
cost of a small request.
"""

import os
import socket
import ssl
from errno import EACCES
from typing import Protocol

import trio

from fairlead.nodes.http.restricted_addresses import is_restricted

# Small enough that parsing one read takes milliseconds at most, whatever it contains.
READ_BYTES = 16 * 1024


class Link(Protocol):
    """The common interface of both kinds. All errors are `OSError`."""

    async def send(self, data: bytes) -> None:
        """Send all of it. It is not always a checkpoint."""

    async def receive(self) -> bytes:
        """Wait for bytes and return them; empty if the other side has closed. Always a checkpoint."""

    def is_stale(self) -> bool:
        """Return whether an idle connection cannot be used: it is closed, or unexpected bytes arrived."""

    def close(self) -> None:
        """Close it at once. Safe to call again."""


class PlainLink:
    """A connection without TLS, over TCP or a Unix socket."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._socket = socket.socket(fileno=stream.socket.detach())
        self._socket.setblocking(False)

    async def send(self, data: bytes) -> None:
        """Send all of it."""
        rest = memoryview(data)
        while True:
            try:
                sent = self._socket.send(rest)
            except BlockingIOError:
                sent = 0
            rest = rest[sent:]
            if not rest:
                return
            await trio.lowlevel.wait_writable(self._socket)

    async def receive(self) -> bytes:
        """Wait for bytes and return them; empty if the other side has closed."""
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            try:
                return self._socket.recv(READ_BYTES)
            except BlockingIOError:
                continue

    def is_stale(self) -> bool:
        """Return whether an idle connection cannot be used: it is closed, or unexpected bytes arrived."""
        return _peeked(self._socket) is not None

    def close(self) -> None:
        """Close it at once."""
        self._socket.close()


class TlsLink:
    """A TLS connection over TCP."""

    def __init__(self, stream: trio.SocketStream, context: ssl.SSLContext, host: str) -> None:
        self._transport = stream
        self._below = _BelowTls(stream)
        self._stream = trio.SSLStream(self._below, context, server_hostname=host, https_compatible=True)

    async def handshake(self) -> None:
        """Agree on keys and verify the server's certificate. Raises `OSError`."""
        try:
            await self._stream.do_handshake()
        except trio.BrokenResourceError as error:
            raise _as_os_error(error, "the TLS handshake failed") from error

    async def send(self, data: bytes) -> None:
        """Send all of it."""
        try:
            await self._stream.send_all(data)
            self._below.check()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise _as_os_error(error, "the TLS connection broke") from error

    async def receive(self) -> bytes:
        """Wait for bytes and return them; empty if the other side has closed."""
        try:
            return bytes(await self._stream.receive_some())
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise _as_os_error(error, "the TLS connection broke") from error

    def is_stale(self) -> bool:
        """See `Link`. Only a close counts: TLS session tickets arrive unrequested on good connections."""
        with socket.socket(fileno=os.dup(self._transport.socket.fileno())) as peer:
            peer.setblocking(False)
            return _peeked(peer) == b""

    def close(self) -> None:
        """See `Link`. Sends no close_notify: HTTP's own framing shows whether a response is complete."""
        self._transport.socket.close()


class _BelowTls(trio.abc.Stream):
    """The stream below TLS. After a failure to send it can still be read.

    `SSLStream` refuses to read after such a failure, but the server's answer may have arrived before.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._failure: trio.BrokenResourceError | None = None

    def check(self) -> None:
        """Raise the failure of an earlier send, if there was one."""
        if self._failure is not None:
            raise self._failure

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send the bytes, or drop them after a failure."""
        try:
            await self._stream.send_all(data)
        except trio.BrokenResourceError as error:
            self._failure = error

    async def wait_send_all_might_not_block(self) -> None:
        """See `trio.abc.SendStream`."""
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """See `trio.abc.ReceiveStream`."""
        return await self._stream.receive_some(max_bytes)

    async def aclose(self) -> None:
        """See `trio.abc.AsyncResource`."""
        await self._stream.aclose()


async def connect_to_path(path: str) -> Link:
    """Connect to a Unix socket. Raises `OSError`."""
    return PlainLink(await trio.open_unix_socket(path))


async def connect(
    host: str, port: int, context: ssl.SSLContext | None, *, may_be_restricted: bool = True
) -> Link:
    """Connect, with TLS if a context is given. Raises `OSError`.

    host: a name or an address.
    port: the port.
    context: the context for TLS; None: plain.
    may_be_restricted: whether the address may be a link-local or metadata one. Otherwise a connection to such
        an address is closed before anything is sent. The address that was connected to counts, because
        another lookup of a name may have another result.
    """
    stream = await trio.open_tcp_stream(host, port)
    if not may_be_restricted and is_restricted(str(stream.socket.getpeername()[0])):
        stream.socket.close()
        raise PermissionError(EACCES, "only the configuration may name a link-local or metadata address")
    if context is None:
        return PlainLink(stream)
    link = TlsLink(stream, context, host)
    try:
        await link.handshake()
    except BaseException:
        link.close()
        raise
    return link


def _peeked(sock: socket.socket) -> bytes | None:
    """Return a part of the unread data: empty if the connection is closed, None if nothing has arrived."""
    try:
        return sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _as_os_error(error: Exception, message: str) -> OSError:
    """Return the cause if the system or the TLS library gave one, else an error with the message."""
    cause = error.__cause__
    return cause if isinstance(cause, OSError) else ConnectionResetError(message)
