"""HTTP/1.1 on one connection: from bytes to ASGI and back, based on Hypercorn's protocol.

Hypercorn's `H11Protocol` blocks its reader while a request is handled, upgrades to HTTP/2 and WebSocket, and
answers errors with an empty page. This one parses as far as it can and returns. It supports only HTTP/1.0 and
1.1, and WebSockets of one path (`websocket`), with the checks of `framing` and `refusals`, and answers every
error in JSON. It owns the h11 state and the app's tasks. It does no I/O: `send` takes bytes, `Closed` and
`Updated` events, and time passes by `deadline` and `expire`.

Requests may be pipelined, up to `PIPELINED_BYTES` behind the current one. They are read ahead because a
client's FIN arrives after them. If a client sends more, its disconnect could go unnoticed while its request
still runs. So it is refused, together with that request.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import h11
import structlog
import trio
from hypercorn.events import Closed, RawData, Updated
from hypercorn.protocol.events import Body, EndBody, Request, Response, StreamClosed
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.protocol.http_stream import ASGIHTTPState
from hypercorn.utils import suppress_body

from fairlead.base.config import Limits
from fairlead.base.formats.headers import http_date
from fairlead.base.unread import UnreadBytes
from fairlead.server.listener.accept_queue import ReadingTurns, RequestTurns
from fairlead.server.listener.asgi import ClientDisconnected, RequestBodyChannel, Stream
from fairlead.server.listener.callers import Callers
from fairlead.server.listener.forwarded import FORWARDED
from fairlead.server.listener.framing import StrictConnection
from fairlead.server.listener.refusals import (
    log_refusal,
    malformed,
    objection,
    path_of,
    refusal,
    with_host_of_target,
)
from fairlead.server.listener.websocket import WEBSOCKET, WebSocketSession, accept_of

logger = structlog.get_logger("fairlead.server.listener")

PIPELINED_BYTES = 64 * 1024
# Larger bodies are written apart from their heads and frames. Joining them would copy a body for each client.
JOINED_BYTES = 16 * 1024


@dataclass(frozen=True)
class Shared:
    """What a listener's connections share.

    app: the ASGI app.
    config: Hypercorn's configuration.
    context: Hypercorn's context of workers.
    state: Hypercorn's state of the app's lifespan.
    limits: the bounds of connections and requests.
    callers: finds who sends a request.
    turns: the order in which requests begin.
    reading: the order in which pieces of bodies are read.
    """

    app: Any
    config: Any
    context: Any
    state: dict[str, Any]
    limits: Limits
    callers: Callers
    turns: RequestTurns = field(default_factory=RequestTurns)
    reading: ReadingTurns = field(default_factory=ReadingTurns)


class Protocol(H11Protocol):  # type: ignore[misc]  # hypercorn's types are not followed
    """HTTP/1.x on one connection. Its reader calls `receive`, `advance` and `expire`; the app the rest."""

    connection: StrictConnection
    stream: Stream | None

    def __init__(
        self,
        shared: Shared,
        *,
        client: tuple[str, int],
        server: tuple[str, int | None],
        start_soon: Callable[..., None],
        wake: Callable[[], None],
        send: Callable[[Any], Awaitable[None]],
        writable: Callable[[], bool],
        write_now: Callable[[bytes], None],
        abort: Callable[[], None],
    ) -> None:
        super().__init__(
            shared.app,
            shared.config,
            shared.context,
            self,  # as the task group: see spawn_app
            shared.state,
            ssl=False,
            client=client,
            server=server,
            send=send,
        )
        self.connection = StrictConnection(shared.limits.header_bytes)
        self._limits = shared.limits
        self._turns = shared.turns
        self._reading = shared.reading
        self._headers: list[tuple[bytes, bytes]] = []  # of the current request
        self._callers = shared.callers
        # Of the current request: the client's address, and whether the request was forwarded.
        self._address: str | None = client[0]
        self._is_forwarded = False
        self._start_soon = start_soon
        self._wake = wake
        self._writable = writable
        self._write_now = write_now
        self._abort = abort
        self._body_channel = RequestBodyChannel(self._resume)
        self._begun = False  # a part of the next request's head has arrived
        self._body_s = shared.limits.body_timeout_s  # how long the current body may take
        self._websocket: WebSocketSession | None = None  # the connection has been upgraded
        self._paused = False  # the whole request has arrived, and more data after it
        self._pending_head = b""  # the head of a response, until it is sent with the body
        self._is_chunked = False
        self.ended = False
        self.deadline = trio.current_time() + shared.limits.header_timeout_s

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.stream is None if self._websocket is None else self._websocket.idle

    @property
    def _has_upgraded(self) -> bool:
        return self._websocket is not None

    @property
    def unread(self) -> UnreadBytes | None:
        """What counts the bytes of the current response that wait for the client."""
        return None if self.stream is None else self.stream.unread

    @property
    def blocked(self) -> bool:
        """Whether received data must wait for the app: for its response, or for space in its body channel."""
        if self._websocket is not None:
            return self._websocket.blocked
        return self.stream is not None and (self._paused or self._body_channel.full)

    @property
    def reads_ahead(self) -> bool:
        """Whether to pass received data to it although it is blocked. It bounds the amount itself."""
        return self._paused

    @property
    def reads_body(self) -> bool:
        """Whether what comes next is a piece of a body, or a WebSocket's."""
        return self._has_upgraded or (self.stream is not None and self.deadline < inf)

    async def turn_to_read(self) -> None:
        """Wait for the turn of a piece of the current body."""
        line_of = partial(self._callers.line, self._address, self._headers)
        await self._reading.wait(self._address or "", line_of)

    # The reader's side -----------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Buffer received data. `advance` parses it."""
        if self._websocket is not None:
            self._websocket.receive(data)
            return
        if self.stream is None and not self._begun:
            data = self.connection.without_empty_lines(data)
            if not data:
                return
            self._begun = True
            self.deadline = trio.current_time() + self._limits.header_timeout_s
        self.connection.receive_data(data)

    async def advance(self) -> None:
        """Parse as much as possible now."""
        if self._websocket is not None:
            await self._websocket.advance()
            self.deadline = self._websocket.deadline
            return
        if self._paused and self.connection.buffered_bytes > PIPELINED_BYTES:
            await self.refuse(400, f"more than {PIPELINED_BYTES} bytes were sent ahead of the response")
            return
        while not (self.ended or self.blocked):
            if self.connection.they_are_waiting_for_100_continue:
                await self.send(
                    RawData(self.connection.send(h11.InformationalResponse(status_code=100, headers=[])))
                )
            try:
                event = self.connection.next_event()
            except h11.RemoteProtocolError as error:
                # h11 raises it in a frame that refers to it.
                await self.refuse(*malformed(error.with_traceback(None)))
                return
            if type(event) is h11.Request:
                await self._begin(event)
                if self._has_upgraded:
                    return
            elif type(event) is h11.Data and self.stream is not None:
                await self.stream.handle(Body(STREAM_ID, event.data))
            elif type(event) is h11.EndOfMessage and self.stream is not None:
                self.deadline = inf
                await self.stream.handle(EndBody(STREAM_ID))
            else:
                self._paused = event is h11.PAUSED
                return

    async def expire(self) -> None:
        """Handle a `deadline` that has passed: refuse an unfinished head, close the connection otherwise."""
        if self._websocket is not None:
            await self._websocket.expire()
            self.deadline = self._websocket.deadline
        elif self.stream is None and self._begun:
            await self.refuse(408, "the head of the request took too long to arrive")
        else:
            await self.leave()

    async def leave(self) -> None:
        """End the connection. The app receives a disconnect, its further sends `ClientDisconnected`."""
        self.ended = True
        if self._websocket is not None:
            await self._websocket.disconnect()
        await self._close_stream()
        await self.send(Closed())

    def dispose(self) -> None:
        """Break the reference cycles after the last task of the connection.

        The protocol and its callbacks refer to each other. Under a flood of connections the cyclic garbage
        collector would free them in pauses of up to a tenth of a second.
        """
        self.__dict__.clear()

    def farewell(self) -> bytes:
        """Return what an idle connection sends before it is closed; usually nothing."""
        return b"" if self._websocket is None else self._websocket.farewell()

    async def refuse(self, status: int, message: str, request: h11.Request | None = None) -> None:
        """Send an error response unless a response has begun, and end the connection.

        `request`: the refused request, if its head was parsed but the app has not seen it.
        """
        unanswered = self.connection.our_state in {h11.IDLE, h11.SEND_RESPONSE}
        self.ended = True
        if unanswered and status != 500:  # `_run` has logged internal errors
            scope = None if self.stream is None else self.stream.scope
            log_refusal(status, message, self._address, request, scope)
        await self._close_stream()
        if unanswered:
            await self.send(RawData(refusal(status, message)))
        await self.send(Closed())

    async def _begin(self, request: h11.Request) -> None:
        self._begun = False
        self._body_s = self._limits.body_timeout_s
        self.deadline = self._end_of_body()
        path = path_of(request)
        headers = self._headers = list(request.headers)
        self._address, self._is_forwarded = self._callers.proxies.client(self.client[0], headers)
        problem = objection(request, headers, self._limits)
        if problem:
            await self.refuse(*problem, request)
            return
        client = self.client
        if b"websocket" in dict(headers).get(b"upgrade", b"").lower():
            if self.connection.buffered_bytes:
                await self.refuse(400, "nothing may be sent before the answer to a handshake", request)
                return
            await self._upgrade(request, headers, path)
            return
        if self._address != client[0]:
            client = None if self._address is None else (self._address, 0)  # its port is not known
        self.stream = Stream(
            self.app,
            self.config,
            self.context,
            self,
            self.ssl,
            client,
            self.server,
            self.stream_send,
            STREAM_ID,
        )
        self.stream.abort = self._abort
        self.stream.allow_body = self._allow_body
        await self.stream.handle(
            Request(
                stream_id=STREAM_ID,
                headers=with_host_of_target(request, headers),
                http_version=request.http_version.decode(),
                method=request.method.decode(),
                raw_path=path,
                state=self.connection_state,
            )
        )

    async def _upgrade(self, request: h11.Request, headers: list[tuple[bytes, bytes]], path: bytes) -> None:
        """Go on as a WebSocket. `objection` has checked the handshake."""
        accept = accept_of(request.method, headers)
        assert accept is not None
        raw_path, _, query = path.partition(b"?")
        scope = {
            "type": "http",
            "asgi": {"spec_version": "2.1", "version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": raw_path.decode("ascii"),
            "raw_path": raw_path,
            "query_string": query,
            "root_path": "",
            "headers": with_host_of_target(request, headers),
            "client": None if self._address is None else (self._address, 0),
            "server": self.server,
            "state": self.connection_state,
            WEBSOCKET: {},
            FORWARDED: self._is_forwarded,
        }
        self._websocket = WebSocketSession(
            self.app,
            scope,
            send=self._send_now,
            end=self.leave,
            wake=self._wake,
            is_draining=self.context.terminated.is_set,
        )
        self._start_soon(self._websocket.run)
        await self._send_now(
            b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
            b"sec-websocket-accept: " + accept + b"\r\n\r\n"
        )
        self.deadline = self._websocket.deadline

    # The app's side --------------------------------------------------------------------------------

    async def spawn_app(
        self, app: Any, _config: Any, scope: Any, _send: Any
    ) -> Callable[..., Awaitable[None]]:
        """Start the app on the request: Hypercorn's streams call this on their task group.

        An app that uses the extension `fairlead` (`asgi.Direct`) can also rely on the cancellation of its
        task when the client disconnects.
        """
        self._body_channel = RequestBodyChannel(self._resume)
        scope["extensions"]["fairlead"] = self.stream
        scope[FORWARDED] = self._is_forwarded
        self._start_soon(self._run, app, scope, self._body_channel.receive, self.stream)
        return self._body_channel.put

    async def _run(self, app: Any, scope: Any, receive: Any, stream: Stream) -> None:
        try:
            # Requests that are cancelled at this moment unwind before this one sees any state.
            line_of = partial(self._callers.line, self._address, scope["headers"])
            await self._turns.wait(self._address or "", line_of)
            await app(scope, receive, stream.app_send)
        except* ClientDisconnected:
            pass
        except* Exception as group:
            logger.exception("request failed", path=scope["path"], exc_info=group)
        finally:
            scope["extensions"].pop("fairlead", None)  # or each request would be a reference cycle
        if stream.closed:
            return
        if stream.state is ASGIHTTPState.REQUEST:
            await self.refuse(500, "the server failed")
        else:
            await self.leave()  # a truncated response must not look complete

    def _resume(self) -> None:
        """Restart the deadline and resume reading. The time of a full channel does not count."""
        self.deadline = self._end_of_body()
        self._wake()

    def _allow_body(self, seconds: float) -> None:
        self._body_s = seconds
        if self.deadline < inf:  # the body has not arrived
            self._resume()

    def _end_of_body(self) -> float:
        return trio.current_time() + self._body_s + self._limits.stall_s

    async def stream_send(self, event: Any) -> None:
        """Send a part of the response. A head with a known length is held, to be sent with its body."""
        kind = type(event)
        if kind is Body:
            await self._send_body(event.data)
        elif kind is EndBody:
            await self._send_now(self.connection.send(h11.EndOfMessage()))
        elif kind is StreamClosed:
            await self._recycle()
        elif kind is Response:
            await self._send_head(event)

    async def _send_head(self, response: Response) -> None:
        headers = [*response.headers, (b"date", http_date())]
        if self.context.terminated.is_set() or self.connection.their_state is h11.SEND_BODY:
            headers.append((b"connection", b"close"))  # no next request: we stop, or a body is unread
        elif self.connection.keeps_open_for_1_0:
            headers.append((b"connection", b"keep-alive"))  # h11 replaces it if the length is not known
        head = self.connection.send(h11.Response(headers=headers, status_code=response.status_code))
        self._is_chunked = False
        if any(name == b"content-length" for name, _ in response.headers):
            self._pending_head = head
            return
        await self._send_now(head)
        assert self.stream is not None
        scope = self.stream.scope
        if scope["http_version"] == "1.1" and not suppress_body(scope["method"], response.status_code):
            self._is_chunked = True
            self.stream.open_direct(self._writable, self._send_chunk)

    async def _send_body(self, data: bytes) -> None:
        """Send a piece of the body. A large one is not copied: all its readers share its bytes."""
        if len(data) <= JOINED_BYTES:
            await self._send_now(self.connection.send(h11.Data(data=data)))
        elif self._is_chunked:  # without h11, as in `_send_chunk`
            for part in (b"%x\r\n" % len(data), data, b"\r\n"):
                await self.send(RawData(part))
        else:
            await self._send_now(b"")
            await self.send(RawData(self.connection.send(h11.Data(data=data))))

    def _send_chunk(self, data: bytes) -> None:
        """Write a chunk without h11, which keeps no state for chunks, at a third of the cost."""
        self._write_now(b"%x\r\n%b\r\n" % (len(data), data))

    async def _send_now(self, data: bytes) -> None:
        if self._pending_head:
            data, self._pending_head = self._pending_head + data, b""
        if data:
            await self.send(RawData(data))

    async def _recycle(self) -> None:
        """After a complete response, prepare for the next request or end the connection."""
        await self._close_stream()
        finished = self.connection.our_state is h11.DONE and self.connection.their_state is h11.DONE
        if not finished or self.context.terminated.is_set():
            self.ended = True
            await self.send(Closed())
            return
        ahead, _ = self.connection.trailing_data
        self.deadline = trio.current_time() + self._limits.idle_timeout_s
        self._paused = False
        if ahead:  # a new h11 connection, because only `receive` skips empty lines between requests
            self.connection = StrictConnection(self._limits.header_bytes)
            self.receive(ahead)
        else:
            self.connection.start_next_cycle()
        await self.send(Updated(idle=not ahead))
