"""Parts of `router.py`: a server with canned responses, a Fairlead in front of it, and a client.

The client uses bare sockets and parses a response only as far as needed to find its end. It is the same for
both servers.
"""

import json
import multiprocessing
import os
import re
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import trio

from fairlead.base.config import Config, NodeConfig
from fairlead.server.app import run

CHUNKS = 40_000
PACED_CHUNKS = 400
PACE_S = 0.005
SEATS = 64

ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "m",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "Hello! " * 20}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 9, "completion_tokens": 40, "total_tokens": 49},
    }
).encode()
WHOLE = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nServer: bench\r\n"
    b"Date: Thu, 01 Jan 2026 00:00:00 GMT\r\nContent-Length: %d\r\n\r\n%s" % (len(ANSWER), ANSWER)
)
EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1767225600,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}]}\n\n'
)
LAST = EVENT.replace(b'"finish_reason":null', b'"finish_reason":"stop"')
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM_END = b"0\r\n\r\n"

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_SENT = re.compile(rb'"content":" (\d+)"')


def framed(event: bytes) -> bytes:
    """Return the event as one chunk."""
    return b"%x\r\n%s\r\n" % (len(event), event)


_END = framed(LAST) + framed(b"data: [DONE]\n\n") + STREAM_END
STREAM = STREAM_HEAD + framed(EVENT) * CHUNKS + _END


def body_of(kind: str) -> bytes:
    """Return a request body of common size, for a `full`, a `burst` or a `paced` response."""
    mode = b"false" if kind == "full" else b"true"
    return b'{"model":"m","stream":%s,"user":"%s","messages":[{"role":"user","content":"%s"}]}' % (
        mode,
        kind.encode(),
        b"Hello. " * 40,
    )


# The server with canned responses -----------------------------------------------------------------------


def serve(ready: Connection) -> None:
    """Send the address through `ready`, then serve until killed."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    ready.send(f"http://127.0.0.1:{listener.getsockname()[1]}")
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                accepted, _ = listener.accept()
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                selector.register(accepted, selectors.EVENT_READ)
                continue
            assert isinstance(key.fileobj, socket.socket)
            request = key.fileobj.recv(65536)
            if not request:
                selector.unregister(key.fileobj)
                key.fileobj.close()
            elif request.startswith(b"GET"):
                key.fileobj.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            elif b'"paced"' in request:
                threading.Thread(target=_pace, args=(key.fileobj,), daemon=True).start()
            else:
                key.fileobj.sendall(STREAM if b'"burst"' in request else WHOLE)


def _pace(sock: socket.socket) -> None:
    """Send chunks at intervals; each contains the time at which it was sent."""
    sock.sendall(STREAM_HEAD)
    for _ in range(PACED_CHUNKS):
        time.sleep(PACE_S)
        sock.sendall(framed(EVENT.replace(b"token", b"%d" % time.monotonic_ns())))
    sock.sendall(_END)


# Fairlead ----------------------------------------------------------------------------------------------


class Ready:
    """An announcer that sends the address through a pipe."""

    def __init__(self, ready: Connection) -> None:
        self._ready = ready

    def loading(self, model: str, fraction: float | None, stage: str) -> None:
        """See `Announcer`."""

    def ready(self, url: str, models: Sequence[str]) -> None:  # noqa: ARG002  # the signature is the protocol's
        """See `Announcer`."""
        self._ready.send(url)

    def failed(self, model: str, reason: str) -> None:
        """See `Announcer`."""

    def stopping(self) -> None:
        """See `Announcer`."""


def fairlead(ready: Connection, url: str) -> None:
    """Serve as `fairlead serve` does, with the server at `url` as its only node and without a log."""
    sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115  # until the end of the process
    node = NodeConfig(id="bench", url=url, seats=SEATS, models=("m",))
    run(Config(models=(), nodes=(node,), port=0), Ready(ready))


class Address(NamedTuple):
    """The URL of a server and the id of its process."""

    url: str
    pid: int

    def cpu_s(self) -> float:
        """Return its CPU time so far; 0 if the system does not report it."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def process(target: Callable[..., None], *arguments: object) -> Iterator[Address]:
    """Run a server in its own process until the end of the block; yield its address."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    running = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    running.start()
    try:
        assert ours.poll(60), "the server does not start"
        assert running.pid is not None
        yield Address(ours.recv(), running.pid)
    finally:
        running.kill()
        running.join()


# The client --------------------------------------------------------------------------------------------


class Sockets:
    """Persistent connections to a server."""

    def __init__(self, url: str) -> None:
        self._address = ("127.0.0.1", int(url.rpartition(":")[2]))
        self._idle: list[socket.socket] = []

    async def full(self) -> None:
        """Send a request and read its response."""
        sock, data = await self._send("full"), b""
        while not (head := data.partition(b"\r\n\r\n"))[1]:
            data += await _read(sock)
        assert data.startswith(b"HTTP/1.1 200"), data
        length = _LENGTH.search(head[0])
        assert length is not None
        left = int(length[1]) - len(head[2])
        while left > 0:
            left -= len(await _read(sock))
        self._idle.append(sock)

    async def burst(self) -> None:
        """Read a stream without pauses between its chunks."""
        sock, events, tail = await self._send("burst"), 0, b""
        while not tail.endswith(STREAM_END):
            data = tail + await _read(sock)
            tail = data[-8:]  # an event may be split between two reads
            events += data.count(b"data: {") - tail.count(b"data: {")
        assert events == CHUNKS + 1, events
        self._idle.append(sock)

    async def paced(self) -> list[float]:
        """Read a stream with pauses between its chunks; return the latency of each chunk in ms."""
        sock, times, tail = await self._send("paced"), [], b""
        while not tail.endswith(STREAM_END):
            data = tail + await _read(sock)
            now = time.monotonic_ns()
            end = data.rfind(b"\n\n") + 1
            times += [(now - int(sent)) / 1e6 for sent in _SENT.findall(data, 0, end)]
            tail = data[end:]
        assert len(times) == PACED_CHUNKS, len(times)
        self._idle.append(sock)
        return times

    def close(self) -> None:
        """Close all connections."""
        for sock in self._idle:
            sock.close()

    async def _send(self, kind: str) -> socket.socket:
        sock = self._idle.pop() if self._idle else await self._connect()
        body = body_of(kind)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(
            body
        )
        sock.send(head + body)
        return sock

    async def _connect(self) -> socket.socket:
        stream = await trio.open_tcp_stream(*self._address)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock = socket.socket(fileno=stream.socket.detach())
        sock.setblocking(False)
        return sock


async def _read(sock: socket.socket) -> bytes:
    while True:
        with suppress(BlockingIOError):
            data = sock.recv(1 << 18)
            assert data, "the server closed the connection"
            return data
        await trio.lowlevel.wait_readable(sock)
