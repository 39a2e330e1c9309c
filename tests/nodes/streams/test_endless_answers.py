"""Endless responses take little memory, end with an error, and leave their node able to serve again."""

import tracemalloc
from itertools import chain, repeat
from pathlib import Path

import pytest
import trio

from fairlead.base.config import HealthConfig, NodeConfig
from fairlead.base.errors import NodeFailed, NodeRefused
from fairlead.nodes.remote_node import remote_node
from fairlead.nodes.streams import upstream_stream
from nodes.listening import RecordingListener, generated, ready_node, relayed_job, stub
from nodes.scripted import (
    STREAM_BODY,
    STREAM_HEAD,
    chunk,
    endless,
    full_response,
    head,
    node,
    scripted,
    stream,
)

ANSWER = b'{"choices": [{"message": {"content": "hi"}}]}'
LIMIT = 100_000

BEGUN = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
ENDED = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
NO_LENGTH = head("application/json", "Connection: close")
JSON_CHUNKED = head("application/json", "Transfer-Encoding: chunked")

# The server's data, the pattern of the error, and whether the job streams.
ENDLESS = {
    "whole": (lambda: chain([NO_LENGTH], repeat(b"x" * 8192)), "more than 100000 bytes", False),
    "whole, announced": (
        lambda: chain([head("application/json", f"Content-Length: {10**12}")], repeat(b"x" * 8192)),
        "more than 100000 bytes",
        False,
    ),
    "whole, in tiny pieces": (lambda: chain([NO_LENGTH], repeat(b"x" * 64)), "more than 100000 bytes", False),
    "whole, in chunks of a byte": (
        lambda: chain([JSON_CHUNKED], repeat(chunk(b"x") * 1000)),
        "too many bytes of chunk framing",
        False,
    ),
    "head": (lambda: chain([b"HTTP/1.1 200 OK\r\n"], repeat(b"X: y\r\n" * 1000)), "a head of more", True),
    "header": (lambda: chain([b"HTTP/1.1 200 OK\r\nX: "], repeat(b"y" * 8192)), "a head of more", True),
    "headers": (
        lambda: [b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000 + b"\r\n"],
        "a head of more|more than 200 headers",
        True,
    ),
    "interim heads": (lambda: repeat(b"HTTP/1.1 103 Hints\r\n\r\n"), "more than 10 interim responses", True),
    "first line": (lambda: repeat(b"HTTP/1.1 200 " + b"K" * 8192), "a head of more", True),
    "event": (lambda: endless(b"x", b"data: "), "an event of more than 100000 bytes", True),
    "event, in tiny pieces": (
        lambda: chain([head("text/event-stream", "Connection: close"), b"data: "], repeat(b"x" * 64)),
        "an event of more than 100000 bytes",
        True,
    ),
    "event of many lines": (lambda: endless(b"data: x\n"), "an event of more than 100000 bytes", True),
    "comment": (lambda: endless(b"x", b":"), "an event of more than 100000 bytes", True),
    "comments": (lambda: endless(b": x\n\n"), "events without content", True),
    "comments after a token": (lambda: endless(b": x\n\n", BEGUN), "events without content", True),
    "empty events": (lambda: endless(b"\n\n"), "events without content", True),
    "unreadable events": (lambda: endless(b"data: {\n\n", BEGUN), "events without content", True),
    "events without a token": (
        lambda: endless(b'data: {"choices":[]}\n\n'),
        "more than 100000 bytes beside its answer",
        True,
    ),
    "large events without a token": (
        lambda: endless(b'data: {"choices":[], "x": "%s"}\n\n' % (b"y" * 9000)),
        "more than 100000 bytes beside its answer",
        True,
    ),
    "events after the end": (
        lambda: endless(b'data: {"choices":[]}\n\n', BEGUN, ENDED),
        "more than 100000 bytes beside its answer",
        True,
    ),
    "ends after the end": (
        lambda: endless(ENDED, BEGUN, ENDED),
        "events without content",
        True,
    ),
    "chunk extension": (
        lambda: chain([STREAM_HEAD, b"1;"], repeat(b"e" * 8192)),
        "too many bytes of chunk framing",
        True,
    ),
    "chunk extensions": (
        lambda: chain([STREAM_HEAD], repeat(b"1;" + b"e" * 1000 + b"\r\n:\r\n")),
        "too many bytes of chunk framing",
        True,
    ),
    "chunk size": (lambda: [STREAM_HEAD, b"f" * 30 + b"\r\n"], "an invalid chunk", True),
    "trailers": (
        lambda: chain([STREAM_HEAD, b"0\r\n"], repeat(b"X: y\r\n" * 1000)),
        "chunk framing or trailers",
        True,
    ),
    "chunk": (
        lambda: chain([STREAM_HEAD, b"fffffffffffffff\r\n"], repeat(b"x" * 8192)),
        "an event of more than 100000 bytes",
        True,
    ),
}


@pytest.mark.parametrize("name", ENDLESS)
async def test_endless_response_is_ended_early_with_little_memory(name):
    answer, message, streams = ENDLESS[name]
    with scripted(lambda _request: answer()) as server:
        remote = node(answer_bytes=LIMIT)
        job = relayed_job(stream=streams)
        await generated(remote, job)  # creates objects that are created only once
        tracemalloc.start()
        result = await generated(remote, job)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert isinstance(result.error, NodeFailed)
        assert [link.read_bytes for link in server.links if link.read_bytes > 700_000] == []
        assert server.open_links == 0
        assert peak_bytes < 2_000_000
        with pytest.raises(NodeFailed, match=message):
            raise result.error

        server.answer = lambda _request: [stream(STREAM_BODY)]
        result = await generated(remote, relayed_job())
        assert (result.error, result.raw) == (None, STREAM_BODY)
        assert server.open_links == 1
        assert remote.status().connections.busy == 0


async def test_data_after_the_end_of_a_stream_is_dropped_with_its_connection():
    with scripted(lambda _request: endless(b"x" * 8192, STREAM_BODY)) as server:
        result = await generated(node(), relayed_job())
        assert (result.error, result.raw) == (None, STREAM_BODY)
        assert server.links[0].read_bytes < 200_000
        assert server.open_links == 0


async def test_stream_with_comments_between_its_events_succeeds():
    event = b'data: {"choices":[{"text":"a"}]}\n\n'
    events = [(b": keep-alive\n\n" * 9 + event) * 20] * 100
    with scripted(lambda _request: [stream(*events, STREAM_BODY)]):
        result = await generated(node(), relayed_job())
    assert result.error is None
    assert result.text() == "a" * 2000 + "well"


@pytest.mark.parametrize(("answer_bytes", "is_accepted"), [(len(ANSWER), True), (len(ANSWER) - 1, False)])
async def test_size_limit_of_a_response_is_configurable(answer_bytes, is_accepted):
    config = NodeConfig(id="remote", url="http://127.0.0.1:1", models=("m",), answer_bytes=answer_bytes)
    with scripted(lambda _request: [full_response(ANSWER)]):
        remote = remote_node(config, RecordingListener(), HealthConfig())
        remote.came_up()
        result = await generated(remote, relayed_job(stream=False))
    assert (result.error is None) == is_accepted


async def test_broken_responses_leak_no_descriptors_or_tasks(monkeypatch):
    monkeypatch.setattr(upstream_stream, "STREAM_BYTES", 1_000_000)
    async with stub() as server:
        remote = ready_node(server, answer_bytes=1000)
        await generated(remote, relayed_job())
        before = open_descriptors(), trio.lowlevel.current_statistics().tasks_living
        for how in ("gone", "reset", "garbage", "kind", "gzip", "half", "broken", "bad_chunk", "endless"):
            for streams in (False, True):
                await generated(remote, relayed_job(stream=streams, stub={"how": how, "after": 4}))
        await generated(remote, relayed_job())
        while server.connections > 1:
            await trio.lowlevel.checkpoint()
        assert (open_descriptors(), trio.lowlevel.current_statistics().tasks_living) == before


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_endless_refusal_is_read_only_up_to_its_limit():
    answer = head("application/json", "Connection: close", status="413 Too Large")
    with scripted(lambda _request: chain([answer], repeat(b" " * 8192))) as server:
        result = await generated(node(), relayed_job())
        assert server.links[0].read_bytes < 1_100_000
        assert server.open_links == 0
    assert isinstance(result.error, NodeRefused)
    assert (result.error.status, result.error.body) == (413, b"")
