"""What does it cost to relay a job to another server, compared with asking that server directly?

The server is a process of its own that answers from memory. This process asks it in two ways, in alternating
rounds: directly, over bare sockets that know beforehand what will come, and through a `RemoteNode` (queue and
HTTP of our own side are not in it). Reported are medians over the rounds: time added at one request a time
(p50, p99), requests a second at 32, and chunks a second, each sent as a chunk of its own. And what reading an
answer costs, by our parser, by h11 and, where it is installed, by httptools.

    python bench/router.py [--rounds 5] [--out bench/results/router.json]
"""

import argparse
import importlib
import json
import multiprocessing
import platform
import selectors
import socket
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import h11
import trio

from fairlead.errors import FairleadError
from fairlead.job import Delta, Job, Relay, Sampling
from fairlead.nodes.answer_parser import AnswerParser
from fairlead.nodes.node import Node, NodeLimits
from fairlead.nodes.remote_node import RemoteNode
from fairlead.nodes.upstream import Upstream

REQUESTS = 1500
CONCURRENT = 32
CHUNKS = 40_000

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


def framed(event: bytes) -> bytes:
    """Return the event as a chunk of its own."""
    return b"%x\r\n%s\r\n" % (len(event), event)


STREAM = STREAM_HEAD + framed(EVENT) * CHUNKS + framed(LAST) + framed(b"data: [DONE]\n\n") + STREAM_END


# The server ----------------------------------------------------------------------------------------


def serve(ready: Connection) -> None:
    """Answer from memory until killed; send the port through `ready`."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    ready.send(listener.getsockname()[1])
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
            else:
                key.fileobj.sendall(STREAM if b'"stream":true' in request else WHOLE)


# The two ways ------------------------------------------------------------------------------------------


class Direct:
    """Bare sockets, kept open; an answer is over when so many bytes have come."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[socket.socket] = []

    async def ask(self, *, stream: bool) -> None:
        """Have one answer."""
        sock = self._idle.pop() if self._idle else await self._connect()
        body = body_of(stream=stream)
        sock.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: b\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        left = len(STREAM if stream else WHOLE)
        while left:
            await trio.lowlevel.wait_readable(sock)
            left -= len(sock.recv(1 << 18))
        self._idle.append(sock)

    async def _connect(self) -> socket.socket:
        stream = await trio.open_tcp_stream("127.0.0.1", self._port)
        sock = socket.socket(fileno=stream.socket.detach())
        sock.setblocking(False)
        return sock

    def close(self) -> None:
        """Close what is open."""
        for sock in self._idle:
            sock.close()


class Relayed:
    """A `RemoteNode`, asked as the gateway asks it."""

    def __init__(self, port: int) -> None:
        self._upstream = Upstream(f"http://127.0.0.1:{port}", name="bench")
        self._node = RemoteNode("bench", self._upstream, Nobody(), names={"m": "m"}, seats=CONCURRENT)
        self._node.came_up()

    async def ask(self, *, stream: bool) -> None:
        """Have one answer."""
        into = Counted()
        job = Job(
            id="chatcmpl-1",
            tenant="A",
            model="m",
            prompts=(),
            sampling=Sampling(max_tokens=100),
            stream=stream,
            request_id="bench",
            relay=Relay("/v1/chat/completions", body_of(stream=stream), stream),
        )
        async with self._node.generate(job, into):
            await into.over.wait()
        assert into.error is None, into.error
        assert not stream or into.tokens == CHUNKS + 1, into.tokens

    def close(self) -> None:
        """Close what is open."""
        self._upstream.close()


class Counted:
    """A sink that keeps nothing but counts."""

    def __init__(self) -> None:
        self.over = trio.Event()
        self.tokens = 0
        self.error: FairleadError | None = None

    def put(self, delta: Delta) -> None:
        """See `Sink`."""
        b"".join(delta.raw)  # what is passed on is written in one piece
        self.tokens += delta.relayed_tokens
        if delta.finish_reason is not None:
            self.over.set()

    def fail(self, error: FairleadError) -> None:
        """See `Sink`."""
        self.error = error
        self.over.set()


class Nobody:
    """A listener that does not care."""

    def node_up(self, node: Node, limits: NodeLimits) -> None:
        """See `NodeListener`."""

    def node_down(self, node: Node) -> None:
        """See `NodeListener`."""

    def load_failed(self, node: Node, error: FairleadError) -> None:
        """See `NodeListener`."""

    def seats_changed(self, node: Node, limits: NodeLimits) -> None:
        """See `RemoteListener`."""


def body_of(*, stream: bool) -> bytes:
    """Return a request of common size."""
    mode = b"true" if stream else b"false"
    return b'{"model":"m","stream":%s,"messages":[{"role":"user","content":"%s"}]}' % (mode, b"Hello. " * 40)


# Measuring -------------------------------------------------------------------------------------------

Ask = Callable[[], Awaitable[None]]


async def one_by_one(ask: Ask) -> dict[str, float]:
    """Return the time of a request, alone, in ms."""
    times = []
    for _ in range(REQUESTS):
        began = time.perf_counter()
        await ask()
        times.append(1000 * (time.perf_counter() - began))
    times = sorted(times[50:])
    return {"p50_ms": times[len(times) // 2], "p99_ms": times[int(len(times) * 0.99)]}


async def together(ask: Ask) -> float:
    """Return requests a second at `CONCURRENT` at a time."""

    async def visitor() -> None:
        for _ in range(REQUESTS // CONCURRENT):
            await ask()

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(CONCURRENT):
            nursery.start_soon(visitor)
    return REQUESTS // CONCURRENT * CONCURRENT / (time.perf_counter() - began)


async def measure(port: int) -> dict[str, dict[str, float]]:
    """Run one round of each way."""
    results = {}
    for name, way in (("direct", Direct(port)), ("relayed", Relayed(port))):
        result = await one_by_one(lambda way=way: way.ask(stream=False))  # type: ignore[misc]
        result["requests_per_s"] = await together(lambda way=way: way.ask(stream=False))  # type: ignore[misc]
        began = time.perf_counter()
        await way.ask(stream=True)
        result["chunks_per_s"] = CHUNKS / (time.perf_counter() - began)
        way.close()
        results[name] = result
    return results


READ = framed(EVENT) * 100
Parse = Callable[[bytes, int], None]


def by_ours(data: bytes, more: int) -> None:
    """Parse an answer and so many more reads of its body."""
    parser = AnswerParser()
    parser.feed(data)
    for _ in range(more):
        parser.feed(READ)


def by_h11(data: bytes, more: int) -> None:
    """The same."""
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    parser.send(h11.EndOfMessage())
    parser.receive_data(data)
    for number in range(more + 1):
        while not isinstance(parser.next_event(), h11.EndOfMessage | type(h11.NEED_DATA)):
            pass
        if number < more:
            parser.receive_data(READ)


def by_httptools(httptools: Any) -> Parse:
    """The same."""

    class Taken:
        def on_body(self, data: bytes) -> None:
            pass

        def on_header(self, name: bytes, value: bytes) -> None:
            pass

    def parse(data: bytes, more: int) -> None:
        parser = httptools.HttpResponseParser(Taken())
        parser.feed_data(data)
        for _ in range(more):
            parser.feed_data(READ)

    return parse


def parsers() -> dict[str, dict[str, float]]:
    """Return microseconds for an answer and for a chunk of a stream, in reads of 100, by each parser."""
    ways: dict[str, Parse] = {"ours": by_ours, "h11": by_h11}
    with suppress(ImportError):
        ways["httptools"] = by_httptools(importlib.import_module("httptools"))
    return {
        name: {
            "answer_us": 1e6 * min(_timed(way, WHOLE, 0) for _ in range(300)),
            "chunk_us": 1e6 * min(_timed(way, STREAM_HEAD, 20) for _ in range(10)) / 2000,
        }
        for name, way in ways.items()
    }


def _timed(way: Parse, data: bytes, more: int) -> float:
    began = time.perf_counter()
    way(data, more)
    return time.perf_counter() - began


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    try:
        port = ours.recv()
        rounds = [trio.run(measure, port) for _ in range(options.rounds)]
    finally:
        server.kill()
    result: dict[str, Any] = {
        way: {
            name: round(statistics.median(each[way][name] for each in rounds), 4) for name in rounds[0][way]
        }
        for way in rounds[0]
    }
    result["added"] = {
        name: round(statistics.median(each["relayed"][name] - each["direct"][name] for each in rounds), 4)
        for name in ("p50_ms", "p99_ms")
    }
    result["added"]["chunk_us"] = round(
        statistics.median(
            1e6 / each["relayed"]["chunks_per_s"] - 1e6 / each["direct"]["chunks_per_s"] for each in rounds
        ),
        3,
    )
    result["parsers"] = {
        name: {what: round(value, 3) for what, value in costs.items()} for name, costs in parsers().items()
    }
    result["machine"] = {"python": platform.python_version(), "processor": platform.machine()}
    print(json.dumps(result, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
