"""A listener on a free port, and a client that sends any bytes, valid HTTP or not."""

import json
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import trio

from fairlead.base.config import Limits
from fairlead.server.listener.callers import Callers
from fairlead.server.listener.listener import bind, serve_http

# Long: what the tests wait for takes milliseconds, unless the machine is busy or the test fails.
TIMEOUT_S = 60

# For a mock clock. On the real one, only a timeout that the test waits for may be short: the machine may
# pause the test itself at any time.
SHORT = Limits(
    header_timeout_s=0.3,
    body_timeout_s=0.3,
    idle_timeout_s=0.3,
    stall_s=0.3,
    drain_s=0.3,
)


async def until(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds, as no event is set for it."""
    with trio.fail_after(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.001)


class Answer(NamedTuple):
    """One response as it was received; `whole` if it is complete by its framing."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_complete: bool

    @property
    def error(self) -> dict[str, Any]:
        """The error in OpenAI's format."""
        return json.loads(self.body)["error"]


class Client:
    """One connection to the listener."""

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self.socket = sock
        self._received = b""

    async def send(self, data: bytes) -> None:
        """Send all of the data."""
        while data:
            data = data[await self.socket.send(data) :]

    async def send_ignoring_close(self, data: bytes) -> None:
        """Send data that the server may not read completely before it closes the connection."""
        with suppress(ConnectionError):
            await self.send(data)

    async def answer(self, *, head: bool = False) -> Answer:
        """Read one response."""
        while b"\r\n\r\n" not in self._received:
            if not await self._receive():
                raise EOFError(self._received)
        top, _, self._received = self._received.partition(b"\r\n\r\n")
        lines = top.decode().split("\r\n")
        status = int(lines[0].split(" ")[1])
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        if status == 100 or head:
            return Answer(status, headers, b"", is_complete=True)
        if headers.get("transfer-encoding") == "chunked":
            return Answer(status, headers, *await self._chunks())
        if "content-length" in headers:
            return Answer(status, headers, *await self._exactly(int(headers["content-length"])))
        while await self._receive():
            pass
        return Answer(status, headers, self._received, is_complete=True)

    async def fetch(self, data: bytes) -> Answer:
        """Send a request and read its response."""
        await self.send(data)
        return await self.answer()

    async def chunk(self) -> bytes:
        """Return the received data that are unread, or the next ones."""
        if not self._received:
            await self._receive()
        data, self._received = self._received, b""
        return data

    async def until(self, expected: bytes) -> None:
        """Receive data, in any number of pieces, until they contain `said`. They remain unread."""
        while expected not in self._received:
            if not await self._receive():
                raise EOFError(self._received)

    async def end(self) -> bytes:
        """Return all data until the server closes or resets the connection."""
        while await self._receive():
            pass
        return self._received

    def reset(self) -> None:
        """Close with a reset, as when a process with unread data is killed."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    async def _receive(self) -> bool:
        try:
            data = await self.socket.recv(65536)
        except ConnectionError:
            return False
        self._received += data
        return bool(data)

    async def _exactly(self, length: int) -> tuple[bytes, bool]:
        while len(self._received) < length:
            if not await self._receive():
                return self._received, False
        body, self._received = self._received[:length], self._received[length:]
        return body, True

    async def _chunks(self) -> tuple[bytes, bool]:
        body = b""
        while True:
            while b"\r\n" not in self._received:
                if not await self._receive():
                    return body, False
            size, _, self._received = self._received.partition(b"\r\n")
            chunk, is_complete = await self._exactly(int(size, 16) + 2)
            body += chunk[:-2]
            if not is_complete or size == b"0":
                return body, is_complete


class Server:
    """A running listener. `shutdown` stops it; `ended` is set when `serve_http` has returned."""

    def __init__(self, address: tuple[str, int], shutdown: trio.Event, ended: trio.Event) -> None:
        self.address = address
        self.shutdown = shutdown
        self.ended = ended
        self._clients = ExitStack()

    async def connect(self, *, receive_buffer: int | None = None) -> Client:
        """Return a new connection. A small receive buffer makes the server wait for the client to read."""
        sock = trio.socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._clients.enter_context(sock)
        await sock.connect(self.address)
        return Client(sock)

    def close_clients(self) -> None:
        """Close all connections of `connect` that are still open."""
        self._clients.close()

    async def fetch(self, data: bytes) -> Answer:
        """Return the response to a request on a new connection."""
        client = await self.connect()
        with client.socket:
            return await client.fetch(data)


@asynccontextmanager
async def serving(
    app: Callable[..., Awaitable[None]],
    limits: Limits | None = None,
    *,
    drained: bool = True,
    callers: Callers | None = None,
    timeout_s: float = TIMEOUT_S,
):
    """Serve `app`. On exit the listener is drained; if it does not end in time, the test fails."""
    ended = trio.Event()
    shutdown = trio.Event()

    async def run(*, task_status):
        sockets = bind("127.0.0.1", 0)
        serve = partial(
            serve_http, app, sockets, limits=limits or Limits(), shutdown=shutdown, callers=callers
        )
        await serve(task_status=task_status)
        ended.set()

    with trio.fail_after(timeout_s):
        async with trio.open_nursery() as nursery:
            addresses = await nursery.start(run)
            server = Server(addresses[0], shutdown, ended)
            try:
                yield server
            finally:
                server.close_clients()
            shutdown.set()
            if not drained:
                nursery.cancel_scope.cancel()


def get(path: str = "/", *headers: str, version: str = "1.1") -> bytes:
    """Return a GET request."""
    return "\r\n".join([f"GET {path} HTTP/{version}", "Host: localhost", *headers, "", ""]).encode()


def post(body: bytes, path: str = "/", *headers: str) -> bytes:
    """Return a POST request."""
    head = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(head).encode() + body


class Apps:
    """Small ASGI apps, selected by path, and events that report their progress."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.waiting = trio.Event()
        self.cancelled = trio.Event()  # an app was ended, as when its client disconnects
        self.go = trio.Event()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            return
        self.requests.append(scope["path"])
        answer = getattr(self, scope["path"].strip("/"), self.hello)
        await answer(receive, send)

    async def hello(self, receive, send) -> None:
        """Respond at once, on every path without an app of its own."""
        await reply(send, b"hello")

    async def echo(self, receive, send) -> None:
        """Respond with the request's body."""
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                await reply(send, body)
                return

    async def wait(self, receive, send) -> None:
        """Wait without reading, as for a seat; respond when the test sets `go`."""
        self.waiting.set()
        try:
            await self.go.wait()
        except trio.Cancelled:
            self.cancelled.set()
            raise
        await reply(send, b"waited")

    async def flood(self, receive, send) -> None:
        """Stream endlessly, as fast as the client reads."""
        await start(send)
        try:
            while True:
                await send({"type": "http.response.body", "body": bytes(65536), "more_body": True})
        finally:
            self.cancelled.set()

    async def stream_in_two_parts(self, receive, send) -> None:
        """Stream one chunk, wait for `go`, then stream the last one."""
        await start(send)
        await send({"type": "http.response.body", "body": b"first ", "more_body": True})
        self.waiting.set()
        await self.go.wait()
        await send({"type": "http.response.body", "body": b"last", "more_body": False})

    async def fail(self, receive, send) -> None:
        """Raise before the response starts."""
        raise ExceptionGroup("two", [ValueError("one"), ExceptionGroup("more", [KeyError("two")])])

    async def fail_later(self, receive, send) -> None:
        """Raise in the middle of the response."""
        await start(send)
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise ValueError("late")


async def start(send, headers=()) -> None:
    """Start a response."""
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def reply(send, body: bytes) -> None:
    """Send a complete response."""
    await start(send, [(b"content-length", b"%d" % len(body))])
    await send({"type": "http.response.body", "body": body, "more_body": False})
