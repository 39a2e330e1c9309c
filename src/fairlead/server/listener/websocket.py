"""The WebSocket mode of OpenAI's Responses: each message is a request, and its events are messages.

A connection that has upgraded gives the app one request after the other, each with the headers of the
handshake: `POST` to its path, with a message as its body. So keys, origins, limits and the queue are the same
as for other requests. The scope has `WEBSOCKET`, by which the view knows what the body is. What it answers as
server-sent events is sent as a message for each event, and an error as a message of the type `error`.

Messages that come while one is answered wait in the connection, up to `AHEAD_BYTES`. Nothing is read after
that, so a client that sends more is slowed down. Independent of sockets: bytes go in, and `send` takes bytes.
"""

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import structlog
import trio
from wsproto import ConnectionType
from wsproto.connection import Connection, ConnectionState
from wsproto.events import BytesMessage, CloseConnection, Ping, Pong, TextMessage
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import RemoteProtocolError, generate_accept_token

from fairlead.server.listener.asgi import ClientDisconnected, RequestBodyChannel

WEBSOCKET = "fairlead.websocket"
"""The key in the scope of a request that is a message of a WebSocket; its dict lasts as long as that."""
AHEAD_BYTES, PIECE_BYTES = 64 * 1024, 64
"""How much is read ahead of the app, and what a piece of a message counts besides its bytes."""
PING_INTERVAL_S = 20.0
ANSWER_BYTES = 1024 * 1024
"""The most bytes of an error's body that are passed on."""

_HOP_HEADERS = frozenset(
    {b"connection", b"upgrade", b"content-length", b"content-type", b"content-encoding", b"transfer-encoding"}
)
_DATA = b"data: "

logger = structlog.get_logger("fairlead.server.listener")


def accept_of(method: bytes, headers: list[tuple[bytes, bytes]]) -> bytes | None:
    """Return what the handshake answers to the client's key; None for an invalid handshake."""
    values = {name.lower(): value.strip() for name, value in headers}
    key = values.get(b"sec-websocket-key", b"")
    has_upgrade = b"upgrade" in {part.strip() for part in values.get(b"connection", b"").lower().split(b",")}
    if method != b"GET" or not has_upgrade or values.get(b"sec-websocket-version") != b"13":
        return None
    return bytes(generate_accept_token(key)) if len(key) == 24 and key.isascii() else None


class WebSocketSession:
    """One connection after its handshake.

    app: the ASGI app.
    scope: the scope of all its requests, without what changes.
    send: sends bytes to the client; may wait.
    end: ends the connection.
    wake: has the reader of the connection look again whether the session is `blocked`.
    is_draining: returns whether the server takes no more requests.
    """

    def __init__(
        self,
        app: Any,
        scope: dict[str, Any],
        *,
        send: Callable[[bytes], Awaitable[None]],
        end: Callable[[], Awaitable[None]],
        wake: Callable[[], None],
        is_draining: Callable[[], bool],
    ) -> None:
        self.deadline = trio.current_time() + PING_INTERVAL_S
        self._app = app
        headers = [
            (name, value)
            for name, value in scope["headers"]
            if name not in _HOP_HEADERS and not name.startswith(b"sec-websocket-")
        ]
        self._scope = {**scope, "headers": [*headers, (b"content-type", b"application/json")]}
        self._send = send
        self._end = end
        self._wake = wake
        self._is_draining = is_draining
        self._frames = Connection(ConnectionType.SERVER)
        self._received = bytearray()
        self._pieces: deque[tuple[bytes, bool]] = deque()  # each with whether its message ends
        self._ahead = 0  # the size of these pieces
        self._skips = False  # the rest of a message is dropped
        self._channel: RequestBodyChannel | None = None
        self._is_complete = False  # the whole body of the current request has arrived
        self._is_unanswered = False  # a ping
        self._requests, self._next = trio.open_memory_channel[RequestBodyChannel](1)

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self._channel is None

    @property
    def blocked(self) -> bool:
        """Whether received bytes must wait."""
        return self._ahead >= AHEAD_BYTES

    def receive(self, data: bytes) -> None:
        """Buffer received bytes."""
        self._received += data

    async def advance(self) -> None:
        """Handle as much as possible now."""
        await self._feed()
        while self._received and not self.blocked:
            data, self._received = bytes(self._received[:AHEAD_BYTES]), self._received[AHEAD_BYTES:]
            try:
                self._frames.receive_data(data)
                for event in self._frames.events():
                    await self._handle(event)
                await self._feed()
            except RemoteProtocolError as error:
                hint = error.event_hint
                code = hint.code if isinstance(hint, CloseConnection) else CloseReason.PROTOCOL_ERROR
                await self.close(code)
                return

    async def expire(self) -> None:
        """Send a ping when it is time for one; end the connection if the last one was not answered."""
        if self._is_unanswered:
            await self._end()
            return
        self._is_unanswered = True
        self.deadline = trio.current_time() + PING_INTERVAL_S
        await self._send(self._frames.send(Ping()))

    def farewell(self) -> bytes:
        """Return the frame that ends the connection of a server that stops; empty if it has ended."""
        if self._frames.state is not ConnectionState.OPEN:
            return b""
        return bytes(self._frames.send(CloseConnection(code=CloseReason.GOING_AWAY)))

    async def close(self, code: int) -> None:
        """Close the connection with a code."""
        if self._frames.state is ConnectionState.OPEN:
            await self._send(self._frames.send(CloseConnection(code=code)))
        await self._end()

    async def disconnect(self) -> None:
        """Report the end of the connection to the request in progress."""
        if self._channel is not None:
            await self._channel.put({"type": "http.disconnect"})

    async def run(self) -> None:
        """Give the app one request after the other, until cancelled."""
        async for channel in self._next:
            await self._answer(channel)
            self._skips = not self._is_complete  # the app has not read its message to the end
            self._channel, self._is_complete = None, False
            if self._is_draining():
                await self.close(CloseReason.GOING_AWAY)
                return
            await self._feed()
            self._wake()

    async def _handle(self, event: Any) -> None:
        self._is_unanswered = False
        match event:
            case TextMessage() | BytesMessage():
                data = event.data.encode() if isinstance(event.data, str) else bytes(event.data)
                self._pieces.append((data, event.message_finished))
                self._ahead += PIECE_BYTES + len(data)
            case Ping():
                await self._send(self._frames.send(event.response()))
            case CloseConnection():
                if self._frames.state is ConnectionState.REMOTE_CLOSING:
                    await self._send(self._frames.send(event.response()))
                await self.close(event.code)  # of an invalid frame: it is for the client
            case Pong():
                pass

    async def _feed(self) -> None:
        """Give the app what it can take of the current message, or the next one. Never waits."""
        while self._pieces and not self._is_complete:
            if self._channel is not None and self._channel.full:
                return
            data, is_last = self._pieces.popleft()
            self._ahead -= PIECE_BYTES + len(data)
            if self._skips:
                self._skips = not is_last
                continue
            if self._channel is None:
                self._channel = RequestBodyChannel(self._wake)
                self._requests.send_nowait(self._channel)
            self._is_complete = is_last
            await self._channel.put({"type": "http.request", "body": data, "more_body": not is_last})

    # Answers -----------------------------------------------------------------------------------------

    async def _answer(self, channel: RequestBodyChannel) -> None:
        answer = _Answer(self._send_text)
        scope = {**self._scope, "state": dict(self._scope["state"]), "extensions": {}}
        try:
            await self._app(scope, channel.receive, answer.send)
        except* ClientDisconnected:
            raise
        except* Exception as group:
            logger.exception("request failed", path=scope["path"], exc_info=group)
        await answer.finish()

    async def _send_text(self, text: str) -> None:
        if self._frames.state is not ConnectionState.OPEN:
            raise ClientDisconnected
        await self._send(self._frames.send(TextMessage(data=text)))


class _Answer:
    """One response of the app, as messages. `send` is ASGI's; `send_text` sends a message."""

    def __init__(self, send_text: Callable[[str], Awaitable[None]]) -> None:
        self._send_text = send_text
        self._status = 0
        self._rest = b""
        self._has_events = self._has_ended = False

    async def send(self, message: dict[str, Any]) -> None:
        """Take a part of the response."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            types = [value for name, value in message["headers"] if name.lower() == b"content-type"]
            self._has_events = any(value.startswith(b"text/event-stream") for value in types)
        elif message["type"] == "http.response.body":
            self._rest += message.get("body", b"")
            if self._has_events:
                await self._send_events()
            elif len(self._rest) > ANSWER_BYTES:
                self._rest = self._rest[:ANSWER_BYTES]
            self._has_ended = not message.get("more_body", False)

    async def finish(self) -> None:
        """Send an error if the response was one, or if it is not complete."""
        if self._has_events and self._has_ended:
            return
        if self._has_events or not self._has_ended:
            status, fault = 500, {"message": "the server failed", "type": "server_error"}
        else:
            status, fault = self._status, _fault_of(self._rest)
        event = {
            "type": "error",
            "status": status,
            "code": fault.get("code"),
            "message": fault.get("message"),
            "param": fault.get("param"),
            "error": fault,
        }
        await self._send_text(msgspec.json.encode(event).decode())

    async def _send_events(self) -> None:
        *events, self._rest = self._rest.split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(_DATA):
                    await self._send_text(line.removeprefix(_DATA).decode())


def _fault_of(body: bytes) -> dict[str, Any]:
    """Return the error in the body of an error response."""
    try:
        document = msgspec.json.decode(body)
    except msgspec.DecodeError:
        document = None
    error = document.get("error") if isinstance(document, dict) else None
    return (
        error if isinstance(error, dict) else {"message": "the request was refused", "type": "server_error"}
    )
