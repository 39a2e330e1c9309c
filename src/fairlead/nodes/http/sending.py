"""A request that is sent by a task of its own, because the server may answer before it has read all of it."""

from types import TracebackType
from typing import Self

import trio

from fairlead.nodes.http.client_connection import ClientConnection, Clock
from fairlead.nodes.http.request_head import StreamedBody


class Sending:
    """Sends a large request, or one with a streamed body, beside the block, and at most until its end.

    A failure to send, or of the body's source, cancels the block and is raised instead. An error of the block
    is raised as it is, not in a group.
    """

    def __init__(self, body: StreamedBody | None, clock: Clock) -> None:
        self._body = body
        self._clock = clock
        self._manager = trio.open_nursery()
        self._nursery: trio.Nursery
        self._connection: ClientConnection | None = None
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self._failure: Exception | None = None

    async def __aenter__(self) -> Self:
        self._nursery = await self._manager.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._nursery.cancel_scope.cancel()
        if error is None or isinstance(error, Exception):
            await self._manager.__aexit__(None, None, None)
            return False
        try:
            was_cancelled_here = await self._manager.__aexit__(kind, error, traceback)
        except BaseExceptionGroup as group:
            if group.split(trio.Cancelled)[1] is not None:
                raise
            return False
        if was_cancelled_here and self._failure is not None:
            raise self._failure
        return bool(was_cancelled_here)

    @property
    def may_be_repeated(self) -> bool:
        """Whether all of the request can be sent again: a streamed body comes once."""
        return self._body is None

    def start(self, connection: ClientConnection, request: bytes) -> None:
        """Start to send over this connection."""
        self._connection = connection
        self._scope, self._ended = trio.CancelScope(), trio.Event()
        self._nursery.start_soon(self._run, connection, request, self._scope, self._ended)

    async def stop(self) -> None:
        """Send nothing more, so that the connection can be closed."""
        self._scope.cancel()
        await self._ended.wait()

    async def settle(self) -> None:
        """Let a send return that has sent its last byte: with TLS it does so a step later."""
        if self._connection is not None and not self._connection.is_sent:
            await trio.lowlevel.checkpoint()

    async def _run(
        self, connection: ClientConnection, request: bytes, scope: trio.CancelScope, ended: trio.Event
    ) -> None:
        try:
            with scope:
                is_sent = await connection.send(request)
                if is_sent and self._body is not None:
                    is_sent = await self._send_pieces(connection, self._body)
                connection.is_sent = is_sent
        except Exception as error:  # noqa: BLE001  # the source of a body may raise anything
            self._failure = error
            self._nursery.cancel_scope.cancel()
        finally:
            ended.set()

    async def _send_pieces(self, connection: ClientConnection, body: StreamedBody) -> bool:
        """Send the body; return False if the server takes no more. The source may take any time."""
        left = body.length
        self._suspend(connection)
        async for piece in body.pieces:
            if not piece:
                continue
            if left is not None:
                left -= len(piece)
                if left < 0:
                    raise ValueError("a body is longer than its announced length")
            self._restart(connection)
            if not await connection.send(
                piece if left is not None else b"%x\r\n%s\r\n" % (len(piece), piece)
            ):
                return False
            self._suspend(connection)
        if left:
            raise ValueError("a body is shorter than its announced length")
        self._restart(connection)
        return left is not None or await connection.send(b"0\r\n\r\n")

    def _suspend(self, connection: ClientConnection) -> None:
        """Suspend the server's time limit while the source is awaited, unless the server answers already."""
        if connection.parser.head is None:
            self._clock.suspend()

    def _restart(self, connection: ClientConnection) -> None:
        if connection.parser.head is None:
            self._clock.restart()
