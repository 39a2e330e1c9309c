"""Reads responses from a socket, and checks them."""

import json
import re
from dataclasses import dataclass

import trio

MAX_HEAD_BYTES = 64 * 1024
MAX_BODY_BYTES = 16 * 1024 * 1024
STREAM_S = 0.3  # how long a stream is read before the client disconnects
STREAM = "text/event-stream"

# Errors in Ollama's form have no code. 501: a route that changes models.
EXPECTED_WITHOUT_CODE = {501, 502, 503, 504}
# Codes of 5xx responses that are correct and do not report a fault of the server.
EXPECTED_5XX = {
    "engine_failed",
    "node_failed",
    "no_node",  # the request was for a model of a node that the attack has added
    "queue_timeout",  # the same, while the node was not yet known to be down
    "load_failed",
    "not_served",  # keys and usage, of a server without a store
    "http_version_not_supported",
}
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) [ -~]*")


class BrokenAnswer(Exception):
    """The received data is not a response."""


@dataclass
class Reply:
    """A response. `whole`: it was read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    whole: bool = True

    @property
    def closes(self) -> bool:
        return self.headers.get("connection", "").lower() == "close" or not self.whole

    @property
    def code(self) -> str:
        """The error code; empty without one."""
        try:
            found = json.loads(self.body)["error"]["code"]
        except (ValueError, LookupError, TypeError):
            return ""
        return str(found)


class Wire:
    """One connection to the server."""

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self.socket = sock
        self._received = b""

    async def send(self, data: bytes) -> None:
        """Send all of it."""
        while data:
            data = data[await self.socket.send(data) :]

    async def reply(self, method: str) -> Reply:
        """Read the response to a method. Raises `BrokenAnswer`, or `EOFError` if there is none."""
        while True:
            found = await self._head()
            if found.status != 100:
                break
        if method == "HEAD" or found.status in {204, 304}:
            return found
        if found.headers.get("content-type", "").startswith(STREAM):
            with trio.move_on_after(STREAM_S) as clock:
                await self._body(found)
            found.whole &= not clock.cancelled_caught
        else:
            await self._body(found)
            if not found.whole:
                raise BrokenAnswer("the answer ends too early")
        return found

    async def _head(self) -> Reply:
        while b"\r\n\r\n" not in self._received:
            if len(self._received) > MAX_HEAD_BYTES:
                raise BrokenAnswer("an endless head")
            if not await self._receive():
                raise EOFError(self._received[:200])
        top, _, self._received = self._received.partition(b"\r\n\r\n")
        first, *lines = top.split(b"\r\n")
        status = _STATUS.fullmatch(first)
        if status is None:
            raise BrokenAnswer(f"no status line: {first[:100]!r}")
        pairs = (line.decode("latin-1").partition(":") for line in lines)
        return Reply(int(status[1]), {name.strip().lower(): value.strip() for name, _, value in pairs})

    async def _body(self, reply: Reply) -> None:
        if reply.headers.get("transfer-encoding") == "chunked":
            await self._chunks(reply)
        elif "content-length" in reply.headers:
            length = int(reply.headers["content-length"])
            reply.body, reply.whole = await self._exactly(length)
        else:
            while await self._receive():
                pass
            reply.body, self._received = self._received, b""

    async def _chunks(self, reply: Reply) -> None:
        while True:
            while b"\r\n" not in self._received:
                if not await self._receive():
                    reply.whole = False
                    return
            size, _, self._received = self._received.partition(b"\r\n")
            if re.fullmatch(rb"[0-9a-f]{1,8}", size) is None:
                raise BrokenAnswer(f"no chunk: {size[:100]!r}")
            chunk, reply.whole = await self._exactly(int(size, 16) + 2)
            reply.body += chunk[:-2]
            if not reply.whole or size == b"0":
                return

    async def _exactly(self, length: int) -> tuple[bytes, bool]:
        if length > MAX_BODY_BYTES:
            raise BrokenAnswer(f"a body of {length} bytes")
        while len(self._received) < length:
            if not await self._receive():
                return self._received, False
        found, self._received = self._received[:length], self._received[length:]
        return found, True

    async def _receive(self) -> bool:
        data = await self.socket.recv(65536)
        self._received += data
        return bool(data)


def fault_of(reply: Reply, method: str) -> str | None:
    """Return the fault of a response to any hostile request; None if it has none."""
    is_expected = reply.code in EXPECTED_5XX or (not reply.code and reply.status in EXPECTED_WITHOUT_CODE)
    if reply.status >= 500 and not is_expected and method != "HEAD":
        return f"status {reply.status} {reply.code}"
    if reply.status == 500 and method == "HEAD":
        return "status 500"
    if not 200 <= reply.status < 600:
        return f"status {reply.status}"
    if reply.status >= 400 and method != "HEAD":
        if reply.headers.get("content-type") != "application/json":
            return f"an error that is not JSON: {reply.headers.get('content-type')}"
        try:
            document = json.loads(reply.body)
        except ValueError:
            return "an error that is not JSON"
        if not isinstance(document, dict) or "error" not in document:
            return "an error without `error`"
    return None
