"""A server that sends exactly the bytes that a test chooses, over simulated connections without a socket.

The whole client is under test, from the pool of connections up. Sources may be endless: a connection counts
the bytes read from it (`read_bytes`), and records whether it was closed.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from typing import Any
from unittest.mock import patch

import trio

from fairlead.base.config import HealthConfig
from fairlead.nodes.http import client as module
from fairlead.nodes.http.client import Upstream
from fairlead.nodes.http.links import Link
from fairlead.nodes.remote_node import RemoteNode
from nodes.listening import RecordingListener

# A float among the pieces is a pause in seconds.
Answer = Callable[[bytes], Iterable[bytes | float]]

STREAM_BODY = (
    b'data: {"choices":[{"index":0,"delta":{"content":"well"}}]}\n\n'
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    b"data: [DONE]\n\n"
)


class ScriptedLink(Link):
    """One connection: it returns the server's response to each request, then end-of-file."""

    def __init__(self, server: "ScriptedServer") -> None:
        self._server = server
        self._pieces: Iterator[bytes | float] | None = None
        self.read_bytes = 0
        self.is_closed = False

    async def send(self, data: bytes) -> None:
        self._server.requests.append(data)
        self._pieces = iter(self._server.answer(data))

    async def receive(self) -> bytes:
        await trio.lowlevel.checkpoint()
        while self._pieces is None:  # a large request is sent by another task
            await trio.lowlevel.checkpoint()
        piece = next(self._pieces, b"")
        while isinstance(piece, float):
            await trio.sleep(piece)
            piece = next(self._pieces, b"")
        self.read_bytes += len(piece)
        return piece

    def is_stale(self) -> bool:
        return False

    def close(self) -> None:
        self.is_closed = True


class ScriptedServer:
    """`answer` maps a request to pieces of a response, and may be replaced. `links` are all connections."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[bytes] = []
        self.links: list[ScriptedLink] = []

    @property
    def open_links(self) -> int:
        return sum(not link.is_closed for link in self.links)

    async def connect(self, *_address: Any, **_options: Any) -> ScriptedLink:
        await trio.lowlevel.checkpoint()
        self.links.append(ScriptedLink(self))
        return self.links[-1]


@contextmanager
def scripted(answer: Answer) -> Iterator[ScriptedServer]:
    """Connect every pool to this server within the block."""
    server = ScriptedServer(answer)
    with patch.object(module, "connect", server.connect):
        yield server


def node(listener: Any = None, *, failures: int | None = None, **options: Any) -> RemoteNode:
    """Return a node that is up and not probed; with `failures`, its breaker opens after that many."""
    upstream = Upstream("http://127.0.0.1:1", name="remote")
    health = None if failures is None else HealthConfig(failures=failures)
    options = {"names": {"m": "m"}, "seats": 4, **options}
    made = RemoteNode("remote", upstream, listener or RecordingListener(), health=health, **options)
    made.came_up()
    return made


# Responses -------------------------------------------------------------------------------------------


def head(kind: str | None = "application/json", *lines: str, status: str = "200 OK") -> bytes:
    """Return the head of a response."""
    kinds = [] if kind is None else [f"Content-Type: {kind}"]
    return "\r\n".join([f"HTTP/1.1 {status}", *kinds, *lines, "", ""]).encode("latin-1")


def full_response(
    body: bytes, kind: str | None = "application/json", *lines: str, status: str = "200 OK"
) -> bytes:
    """Return a response with a content length."""
    return head(kind, *lines, f"Content-Length: {len(body)}", status=status) + body


def chunk(data: bytes) -> bytes:
    """Return a chunk of a body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


STREAM_HEAD = head("text/event-stream", "Transfer-Encoding: chunked")


def stream(*events: bytes) -> bytes:
    """Return a whole streamed response."""
    return STREAM_HEAD + b"".join(map(chunk, events)) + b"0\r\n\r\n"


def endless(event: bytes, *before: bytes) -> Iterator[bytes]:
    """Return an endless stream, in pieces of about 8 KiB."""
    return chain([STREAM_HEAD, *map(chunk, before)], repeat(chunk(event * max(1, 8192 // len(event)))))
