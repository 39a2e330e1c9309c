"""An HTTP/1.1 client of the simulated server, which may close the connection at any byte."""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import trio

from simulation.streams import End


class Answer(NamedTuple):
    """One answer. `is_whole`: it is complete according to its framing."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_whole: bool

    @property
    def is_stream(self) -> bool:
        """Whether it consists of server-sent events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def events(self) -> list[str]:
        """The data of each event."""
        lines = self.body.decode(errors="replace").split("\n")
        return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]

    @property
    def document(self) -> Any:
        """The body as JSON; None if it is something else."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @property
    def error(self) -> str | None:
        """The code of its error, which in a stream may come at the end; None if it has none."""
        error_events: list[str] = []
        if self.is_stream:
            error_events = [event for event in self.events if event.startswith('{"error"')]
        elif self.status >= 400:
            error_events = [self.body.decode(errors="replace")]
        for text in error_events:
            try:
                return str(json.loads(text)["error"].get("code"))
            except (ValueError, TypeError, KeyError, AttributeError):
                return f"no error document, status {self.status}" if self.is_whole else "cut"
        return None


class Client:
    """One connection, with a pause of `pause_s` before each read. `has_received`: since the request."""

    def __init__(self, end: End) -> None:
        self.end = end
        self.pause_s = 0.0
        self.has_received = False
        self._received = bytearray()

    @property
    def is_stale(self) -> bool:
        """Whether the server has closed it."""
        return self.end.is_ready("read")

    async def fetch(
        self, request: bytes, *, on_bytes: Callable[[int], bool] = lambda _size: True
    ) -> Answer | None:
        """Send a request; return its answer, None if there is none.

        `on_bytes` is called with the size of the body so far and returns whether to read on.
        """
        self.has_received = False
        with suppress(OSError):  # the server may answer before it has read everything
            await self.end.send(request)
        return await self.read(on_bytes)

    async def read(self, on_bytes: Callable[[int], bool] = lambda _size: True) -> Answer | None:
        """Return the next answer, as `fetch` does."""
        while (end := self._received.find(b"\r\n\r\n")) < 0:
            if not await self._receive():
                return None
        lines = self._received[:end].decode("latin-1").split("\r\n")
        del self._received[: end + 4]
        status = int(lines[0].split(" ")[1])
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        if status == 100:
            return await self.read(on_bytes)
        if headers.get("transfer-encoding") == "chunked":
            body, whole = await self._chunks(on_bytes)
        else:
            body, whole = await self._exactly(int(headers.get("content-length", "0")), on_bytes)
        return Answer(status, headers, body, whole)

    def leave(self, *, with_reset: bool = False) -> None:
        """Close the connection, or reset it."""
        if with_reset:
            self.end.reset()
        self.end.closing()
        self.end.release()

    async def _exactly(self, size: int, on_bytes: Callable[[int], bool]) -> tuple[bytes, bool]:
        while len(self._received) < size:
            if not on_bytes(len(self._received)) or not await self._receive():
                return self._take(len(self._received)), False
        return self._take(size), True

    async def _chunks(self, on_bytes: Callable[[int], bool]) -> tuple[bytes, bool]:
        body = bytearray()
        while True:
            while (end := self._received.find(b"\r\n")) < 0:
                if not await self._receive():
                    return bytes(body), False
            size = int(self._received[:end], 16)
            while len(self._received) < end + 4 + size:
                if not await self._receive():
                    return bytes(body + self._received[end + 2 :]), False
            body += self._received[end + 2 : end + 2 + size]
            del self._received[: end + 4 + size]
            if not size:
                return bytes(body), True
            if not on_bytes(len(body)):
                return bytes(body), False

    async def _receive(self) -> bool:
        if self.pause_s:
            await trio.sleep(self.pause_s)
        try:
            data = await self.end.receive()
        except OSError:
            return False
        self._received += data
        self.has_received = self.has_received or bool(data)
        return bool(data)

    def _take(self, size: int) -> bytes:
        taken = bytes(self._received[:size])
        del self._received[:size]
        return taken


def request(
    method: str, path: str, body: object = None, *, headers: dict[str, str] | None = None, close: bool = False
) -> bytes:
    """Return the bytes of a request; a body other than bytes is sent as JSON."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 10.0.0.1"]
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    if body is not None:
        if "Content-Type" not in (headers or {}):
            lines.append("Content-Type: application/json")
        lines.append(f"Content-Length: {len(data)}")
    if close:
        lines.append("Connection: close")
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + data
