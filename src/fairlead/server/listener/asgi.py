"""The ASGI side of one request: `RequestBodyChannel.receive` and `Stream.app_send`.

Both sides are bounded: parsing stops while an app does not read, and an app that always has data to send
yields to other tasks. Independent of the HTTP format and of sockets.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import trio
from hypercorn.protocol.http_stream import HTTPStream

from fairlead.base.unread import UnreadBytes

# Unread data at which parsing for an app stops. A message costs more than the bytes in it, which matters
# when a client sends its body in chunks of one byte.
UNREAD_BYTES = 64 * 1024
MESSAGE_BYTES = 512
SENDS_PER_TURN = 8


class ClientDisconnected(OSError):
    """The client has disconnected, or its response is complete: nothing can be sent."""


class RequestBodyChannel:
    """Received messages that the app has not read yet. A disconnect discards the body."""

    def __init__(self, on_space: Callable[[], None]) -> None:
        self._messages: deque[dict[str, Any]] = deque()
        self._bytes = 0
        self._disconnected = False
        self._reported = False  # the disconnect, to the app
        self._arrival = trio.Event()
        self._on_space = on_space

    @property
    def full(self) -> bool:
        """Whether the app has so much to read that no more may be added."""
        return self._bytes >= UNREAD_BYTES

    async def put(self, message: dict[str, Any]) -> None:
        """Add a message. Never waits: the caller must not add more to a full channel."""
        if message["type"] == "http.disconnect":
            self._disconnected = True
            self._messages.clear()
        else:
            self._messages.append(message)
            self._bytes += MESSAGE_BYTES + len(message["body"])
        self._arrival.set()

    async def receive(self) -> dict[str, Any]:
        """Return the next message: ASGI's `receive`."""
        if not self._messages:
            if self._reported:
                await trio.lowlevel.checkpoint()  # an app may call this in a loop
            elif not self._disconnected:
                self._arrival = trio.Event()
                await self._arrival.wait()
            if self._disconnected:
                self._reported = True
                return {"type": "http.disconnect"}
        was_full = self.full
        message = self._messages.popleft()
        self._bytes -= MESSAGE_BYTES + len(message["body"])
        if was_full and not self.full:
            self._on_space()
        return message


class Direct(Protocol):
    """The extension `fairlead` of a request's scope: ASGI's `send` without waiting, and the connection's end.

    `unread` counts the bytes of the response that the kernel does not take; None: nothing counts them.
    """

    unread: UnreadBytes | None

    @property
    def writable(self) -> bool:
        """Whether a piece of the response body can be sent now."""

    def send_now(self, data: bytes) -> None:
        """Send a piece, which must not be empty. The next ordinary `send` raises if this failed."""

    def abort(self) -> None:
        """Close the connection at once, and drop what is unsent."""

    def allow_body(self, seconds: float) -> None:
        """Let the body take so long to arrive, from now on, instead of `limits.body_timeout_s`."""


class Stream(HTTPStream):  # type: ignore[misc]  # hypercorn's types are not followed
    """One request's ASGI state. Sending to a client that has disconnected raises."""

    unread: UnreadBytes | None = None
    abort: Callable[[], None]
    allow_body: Callable[[float], None]
    _sends = 0
    _can_send: Callable[[], bool] | None = None
    _send_piece: Callable[[bytes], None]

    def open_direct(self, can_send: Callable[[], bool], send: Callable[[bytes], None]) -> None:
        """Enable `send_now` from here on: it uses `send`, while `can_send()` is true."""
        self._can_send = can_send
        self._send_piece = send

    @property
    def writable(self) -> bool:
        """Whether a piece of the body can be sent now: its head and all earlier data have been."""
        return self._can_send is not None and not self.closed and self._can_send()

    def send_now(self, data: bytes) -> None:
        """Send a piece of the body at once; only when `writable`."""
        self._send_piece(data)

    async def app_send(self, message: Any) -> None:
        """Send a message: ASGI's `send`. Most sends, and all for HEAD, do not wait, so some yield."""
        if self.closed:
            raise ClientDisconnected
        await super().app_send(message)
        self._sends += 1
        if self._sends % SENDS_PER_TURN == 0:
            await trio.lowlevel.checkpoint()
