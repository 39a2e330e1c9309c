"""An HTTP client: requests to one server over a bounded pool of connections, responses as they arrive.

An exchange that is cancelled, fails or is left early closes its connection, at once and without waiting. One
that was read to its end keeps it for reuse. No redirect is followed, nothing is decoded unless asked for.
Independent of jobs and API formats.

A response may come before its request has been sent. A success is read while the rest is sent. After any
other response nothing more is sent, as the server does not want it, and the connection is closed.
"""

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from urllib.parse import urlsplit

import msgspec
import trio

from fairlead.base.config.urls import is_http_url, secrets_in, shown_url
from fairlead.base.errors import NodeFailed, NodeFull
from fairlead.base.formats.content_coding import ContentDecoder, InvalidContent, decoder_of
from fairlead.nodes.http.client_connection import (
    ClientConnection,
    Clock,
    describe,
    is_local_shortage,
    reason_of,
)
from fairlead.nodes.http.idle_connections import IdleConnections
from fairlead.nodes.http.links import connect, connect_to_path
from fairlead.nodes.http.request_head import RequestHeads, StreamedBody
from fairlead.nodes.http.response_parser import InvalidResponse, ResponseHead, ResponseParser
from fairlead.nodes.http.sending import Sending

# How much of a body is read and dropped to reuse its connection; beyond that a new one is cheaper.
DRAIN_BYTES = 64 * 1024
# A request of this size fits every system's send buffer, so sending it does not wait for the server.
SENT_AT_ONCE_BYTES = 16 * 1024


class UpstreamFailed(NodeFailed):
    """No connection could be made, or the server did not respond in full. Counts against its health."""


class LocalShortage(UpstreamFailed, NodeFull):
    """This machine has no descriptor or memory left for a connection, which is not the server's fault."""


class ContentFailed(NodeFailed):
    """The server's response is not encoded as its head says. The server lives: only this exchange fails."""


class ResponseTooLarge(UpstreamFailed):
    """The server's response is larger than the caller accepts."""


class UpstreamTimeouts(msgspec.Struct, frozen=True):
    """How long a server may take.

    connect_s: to accept a connection.
    first_byte_s: to begin a response.
    between_bytes_s: between two pieces of it.
    idle_s: how long an unused connection is kept.
    """

    connect_s: float = 30.0
    first_byte_s: float = float("inf")
    between_bytes_s: float = 300.0
    idle_s: float = 90.0


class UpstreamStatistics(msgspec.Struct, frozen=True):
    """Counts of connections.

    busy: those with an exchange now.
    idle: those that are kept for the next one.
    waiting: exchanges that wait for a connection.
    opened: all that were opened.
    reused: exchanges on a connection that had one before.
    """

    busy: int
    idle: int
    waiting: int
    opened: int
    reused: int


class UpstreamResponse:
    """A response after its head has been received.

    name: that of the server, for messages.
    connection: where it comes from.
    clock: bounds the time between two pieces.
    first: the beginning of the body, if it came with the head.
    secrets: what is masked in it: a server may repeat a request that it refuses or redirects.
    """

    def __init__(
        self, name: str, connection: ClientConnection, clock: Clock, first: bytes, secrets: Sequence[str] = ()
    ) -> None:
        head = connection.parser.head
        assert head is not None
        self._secrets = secrets if head.status >= HTTPStatus.MULTIPLE_CHOICES else ()
        if self._secrets:
            masked = {name: _masked(value, self._secrets) for name, value in head.headers.items()}
            head = msgspec.structs.replace(head, headers=masked)
        self.head: ResponseHead = head
        self._name = name
        self._connection = connection
        self._clock = clock
        self._first = first
        self._unread = b""
        self._decoder: ContentDecoder | None = None
        self._decoded: Iterator[bytes] = iter(())

    @property
    def is_complete(self) -> bool:
        """Whether the end of the body has been received, so that `read` has nothing to wait for."""
        return self._connection.parser.is_complete

    async def read(self) -> bytes:
        """Wait for the next bytes of the body and return them; empty at the end of the body.

        Raises `UpstreamFailed` when the connection ends before the body does, and `ContentFailed`.
        """
        if self._unread:
            piece, self._unread = self._unread, b""
            return piece
        if self._decoder is None:
            return self._shown(await self._receive())
        try:
            while not (piece := next(self._decoded, b"")):
                data = await self._receive()
                if not data:
                    self._decoder.end()
                    return b""
                self._decoded = self._decoder.decode(data)
        except InvalidContent as error:
            raise ContentFailed(f"{self._name} sent {error}") from error
        await trio.lowlevel.checkpoint()  # a few bytes may decode to many pieces
        return self._shown(piece)

    def unread(self, data: bytes) -> None:
        """Let the next `read` return this."""
        self._unread = data

    def decode(self) -> None:
        """Undo the body's content coding from now on. Raises `ContentFailed` if it is unknown."""
        try:
            self._decoder = decoder_of(self.head.headers.get("content-encoding", ""))
        except ValueError as error:
            raise ContentFailed(f"{self._name} sent {error}") from error

    async def _receive(self) -> bytes:
        """Return the next bytes of the body as they were sent; empty at its end."""
        if self._first:
            first, self._first = self._first, b""
            return first
        parser = self._connection.parser
        while not parser.is_complete:
            self._clock.restart()
            if piece := await self._connection.receive():
                return piece
        return b""

    def _shown(self, piece: bytes) -> bytes:
        if not self._secrets:
            return piece
        return _masked(piece.decode("latin-1"), self._secrets).encode("latin-1")

    async def pause(self, until: Callable[[], Awaitable[None]]) -> None:
        """Read nothing until `until` returns; meanwhile no time limit of the response runs."""
        self._clock.suspend()
        await until()

    async def read_all(self, most_bytes: int) -> bytes:
        """Return the rest of the body. Raises `UpstreamFailed`.

        Raises `ResponseTooLarge` for more than `most_bytes`, without reading if the length is announced.
        """
        too_large = ResponseTooLarge(f"{self._name} sent more than {most_bytes} bytes")
        if (self._connection.parser.length or 0) > most_bytes:
            raise too_large
        body = bytearray()
        while piece := await self.read():
            if len(body) + len(piece) > most_bytes:
                body.clear()  # the error's traceback refers to it, and would keep it
                raise too_large
            body += piece
        return bytes(body)

    async def drain(self, within_s: float) -> None:
        """Read and drop the rest, so that the connection can be reused; give up if it is long or slow."""
        self._clock.suspend()
        parser, left = self._connection.parser, DRAIN_BYTES
        with trio.move_on_after(within_s), suppress(OSError, InvalidResponse):
            while not parser.is_complete and left > 0:
                left -= len(await self._connection.receive())


class Upstream:
    """One server. Raises `ValueError` for an invalid URL.

    url: each request's path is below its path (see `roots_of`); its query is kept.
    name: the beginning of messages of `UpstreamFailed`.
    api_path: as for `RequestHeads`.
    api_key: as for `RequestHeads`.
    speaks_messages: as for `RequestHeads`.
    capacity: how many exchanges run at a time, one connection each; more wait, first come, first served.
    timeouts: its limits; None: the defaults.
    tls: the context for HTTPS; None: the usual one.
    may_be_restricted: whether the server may have a link-local or metadata address.
    socket_path: the Unix socket that it listens on, if any; then the URL only names it in requests.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str,
        api_path: str | None = None,
        api_key: str | None = None,
        speaks_messages: bool = False,
        capacity: int = 8,
        timeouts: UpstreamTimeouts | None = None,
        tls: ssl.SSLContext | None = None,
        may_be_restricted: bool = True,
        socket_path: str | None = None,
    ) -> None:
        parts = urlsplit(url)
        if not is_http_url(url):
            raise ValueError(f"{shown_url(url)!r} is not the URL of a server, such as http://host:port")
        self.name = name
        self._socket_path = socket_path
        self._may_be_restricted = may_be_restricted
        self._host = str(parts.hostname)
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._heads = RequestHeads(parts, api_path=api_path, api_key=api_key, speaks_messages=speaks_messages)
        self._secrets = secrets_in(parts.query, api_key or "")
        self._capacity = capacity
        self._timeouts = timeouts or UpstreamTimeouts()
        self._idle = IdleConnections(self._timeouts.idle_s)
        self._busy = 0
        self._opened = 0
        self._reused = 0
        self._waiting = trio.lowlevel.ParkingLot()
        self.last_received_at = -float("inf")

    @asynccontextmanager
    async def exchange(
        self,
        method: str,
        path: str,
        body: bytes | StreamedBody = b"",
        *,
        accept: str = "application/json",
        headers: Mapping[str, str] | None = None,
        within_s: float | None = None,
    ) -> AsyncIterator[UpstreamResponse]:
        """Send a request; yield its response when the head has been received.

        method: the method.
        path: the path, below that of the URL.
        body: the body. The source of a `StreamedBody` runs in a task of the exchange; what it raises ends
            that.
        accept: the type of answer that is expected.
        headers: further headers. They come from clients: empty and invalid ones are left out.
        within_s: how long the exchange may last; None: only its parts are bounded.

        Raises `UpstreamFailed`, also within the block.
        """
        own = {"Accept": accept, "Accept-Encoding": "identity"}
        request = self._heads.request(method, path, body, {**own, **(headers or {})})
        streamed = body if isinstance(body, StreamedBody) else None
        # A loop, because others may take the free connection before the task that was woken for it runs.
        while self._busy >= self._capacity:
            await self._waiting.park()
        self._busy += 1
        lease = _Lease()
        clock = Clock(within_s)
        try:
            with clock.scope:
                if streamed is None and len(request) <= SENT_AT_ONCE_BYTES:
                    yield await self._open(request, clock, lease)
                else:
                    async with Sending(streamed, clock) as sending:
                        yield await self._open(request, clock, lease, sending)
                        await sending.settle()
            if clock.scope.cancelled_caught:
                raise UpstreamFailed(f"{self.name} {clock.reason}")
        except (OSError, InvalidResponse) as error:
            raise UpstreamFailed(f"{self.name} {describe(error)}") from error
        finally:
            self._busy -= 1
            self._waiting.unpark()
            if lease.connection is not None:
                self._idle.put(lease.connection)

    def resize(self, capacity: int) -> None:
        """Allow this many exchanges from now on; those under way continue."""
        self._capacity = capacity
        self._waiting.unpark_all()

    def close(self) -> None:
        """Close the idle connections. Those in use are closed by their exchanges."""
        self._idle.close()

    def close_stale(self) -> None:
        """Close the connections that were idle for too long, or that the server has closed."""
        self._idle.close_stale()

    def statistics(self) -> UpstreamStatistics:
        """Return the current counts."""
        return UpstreamStatistics(
            busy=self._busy,
            idle=len(self._idle),
            waiting=len(self._waiting),
            opened=self._opened,
            reused=self._reused,
        )

    # One exchange ------------------------------------------------------------------------------------

    async def _open(
        self, request: bytes, clock: Clock, lease: "_Lease", sending: Sending | None = None
    ) -> UpstreamResponse:
        """Send the request and wait for the head of the response.

        A kept connection may have been closed meanwhile. If so, and if nothing was received, the request is
        sent again, once, over a new one. A streamed body cannot be sent again, and gets a new one.
        """
        if sending is None or sending.may_be_repeated:
            lease.connection = self._idle.take()
        if lease.connection is not None:
            self._reused += 1
            try:
                return await self._send(request, clock, lease.connection, sending)
            except OSError:
                if lease.connection.parser.has_begun:
                    raise
                if sending is not None:
                    await sending.stop()
                lease.connection.link.close()
                lease.connection = None
        clock.begin("did not accept a connection", self._timeouts.connect_s)
        try:
            if self._socket_path is not None:
                link = await connect_to_path(self._socket_path)
            else:
                link = await connect(
                    self._host, self._port, self._tls, may_be_restricted=self._may_be_restricted
                )
        except OSError as error:
            kind = LocalShortage if is_local_shortage(error) else UpstreamFailed
            raise kind(f"{self.name} cannot be reached: {reason_of(error)}") from error
        self._opened += 1
        lease.connection = ClientConnection(link, self._on_data)
        return await self._send(request, clock, lease.connection, sending)

    async def _send(
        self, request: bytes, clock: Clock, connection: ClientConnection, sending: Sending | None
    ) -> UpstreamResponse:
        connection.parser = parser = ResponseParser(has_body=not request.startswith(b"HEAD "))
        connection.is_sent = False
        clock.begin("did not respond", self._timeouts.first_byte_s)
        if sending is None:
            connection.is_sent = await connection.send(request)
        else:
            sending.start(connection, request)
        first = b""
        while parser.head is None:
            first = await connection.receive()
        clock.begin("did not continue its response", self._timeouts.between_bytes_s)
        if sending is not None and parser.head.status >= HTTPStatus.MULTIPLE_CHOICES:
            await sending.stop()
        return UpstreamResponse(self.name, connection, clock, first, self._secrets)

    def _on_data(self) -> None:
        self.last_received_at = trio.current_time()


def _masked(text: str, secrets: Sequence[str]) -> str:
    """Replace secrets by as many asterisks, so that the announced length of a body stays right."""
    for secret in secrets:
        text = text.replace(secret, "*" * len(secret))
    return text


class _Lease:
    """What an exchange must release, however it ends."""

    __slots__ = ("connection",)

    def __init__(self) -> None:
        self.connection: ClientConnection | None = None
