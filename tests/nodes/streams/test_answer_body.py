"""Answers of which the head says too little, too much or something odd are read by what they contain."""

import gzip
import json
import tracemalloc
import zlib
from functools import partial

import pytest
import trio

from fairlead.base.errors import NodeFailed, NodeRefused
from fairlead.nodes.http.client import ContentFailed, Upstream
from fairlead.nodes.streams.relay import relay
from fairlead.nodes.streams.upstream_stream import RelayFailed
from nodes.coded import ENCODERS
from nodes.listening import CollectedDeltas, generated, relayed_job, translated_job
from nodes.scripted import STREAM_BODY, chunk, full_response, head, node, scripted

MARK = b"\xef\xbb\xbf"
ANSWER = json.dumps(
    {
        "id": "c1",
        "object": "chat.completion",
        "created": 1,
        "model": "up",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello there"},
                "finish_reason": "stop",
            }
        ],
    }
).encode()
TOO_LONG = (
    b'{"error":{"message":"the prompt is 12 tokens too long","type":"invalid_request_error","code":400}}'
)
EVENTS = "text/event-stream"


def answered(body: bytes, kind: str | None, *lines: str, status: str = "200 OK"):
    """Return a server whose every response is this."""
    return scripted(lambda _request: [full_response(body, kind, *lines, status=status)])


async def whole(body: bytes = ANSWER, kind: str | None = "application/json", *lines: str, **options):
    with answered(body, kind, *lines, **options) as server:
        result = await generated(node(), relayed_job(stream=False))
        assert len(server.requests) == 1
    return result


async def streamed(body: bytes = STREAM_BODY, kind: str | None = EVENTS, *lines: str, **options):
    with answered(body, kind, *lines, **options) as server:
        result = await generated(node(), relayed_job())
        assert len(server.requests) == 1
    return result


async def test_servers_are_asked_for_answers_that_are_not_encoded():
    with answered(ANSWER, "application/json") as server:
        await generated(node(), relayed_job(stream=False))
    assert b"\r\nAccept-Encoding: identity\r\n" in server.requests[0]


@pytest.mark.parametrize("status", ["200 OK", "201 Created", "202 A", "203 N", "226 IM Used"])
async def test_success_of_any_status_is_an_answer(status):
    assert (await whole(status=status)).raw == ANSWER
    assert (await streamed(status=status)).raw == STREAM_BODY


@pytest.mark.parametrize("kind", ["application/json", "text/plain; charset=utf-8", "Text/Plain", "", None])
@pytest.mark.parametrize("mark", [b"", MARK])
async def test_object_with_choices_is_an_answer_whatever_its_type(kind, mark):
    result = await whole(mark + ANSWER, kind)
    assert (result.error, result.raw, result.deltas[0].finish_reason) == (None, ANSWER, "stop")


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/v1/messages", {"type": "message", "content": [{"type": "text", "text": "hi"}]}),
        ("/v1/responses", {"output": []}),
        ("/v1/embeddings", {"data": [{"embedding": [0.5]}]}),
        ("/v1/rerank", {"results": []}),
        ("/api/chat", {"message": {"content": "hi"}, "done": True}),
        ("/api/generate", {"response": "hi", "done": True}),
        ("/v1/messages/count_tokens", {"input_tokens": 5}),
    ],
)
async def test_answer_of_every_dialect_needs_no_type(path, answer):
    with answered(body := json.dumps(answer).encode(), None):
        assert (await generated(node(), relayed_job(path, stream=False))).raw == body


@pytest.mark.parametrize("kind", [EVENTS, "text/plain", "", None])
@pytest.mark.parametrize("mark", [b"", MARK])
@pytest.mark.parametrize("before", [b"", b": waiting\n\n", b"\n", b"id: 1\n", b"event: x\n", b"retry: 9\n\n"])
@pytest.mark.parametrize("size", [1, 4, 1000])
async def test_events_are_a_stream_whatever_their_type(kind, mark, before, size):
    body = mark + before + STREAM_BODY
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    with scripted(lambda _request: [head(kind, "Connection: close"), *pieces]):
        result = await generated(node(), relayed_job())
    assert (result.error, result.text()) == (None, "well")
    assert b"data:" in result.raw
    assert not result.raw.startswith(MARK)


@pytest.mark.parametrize("kind", ["application/x-ndjson", "text/plain", None])
async def test_lines_are_a_stream_whatever_their_type(kind):
    lines = b'{"message": {"content": "well"}}\n{"message": {"content": ""}, "done": true}\n'
    with answered(lines, kind):
        result = await generated(node(), relayed_job("/api/chat"))
    assert (result.error, result.text(), result.raw) == (None, "well", lines)


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("encoder", ENCODERS)
async def test_encoded_content_is_decoded(encoder, size):
    coding, encode = ENCODERS[encoder]
    for streams, body, kind in ((False, ANSWER, "application/json"), (True, STREAM_BODY, EVENTS)):
        encoded = encode(MARK + body)
        pieces = [chunk(encoded[start : start + size]) for start in range(0, len(encoded), size)]
        first = head(kind, f"Content-Encoding: {coding}", "Transfer-Encoding: chunked")
        with scripted(lambda _, sent=(first, *pieces, b"0\r\n\r\n"): sent):
            result = await generated(node(), relayed_job(stream=streams))
        assert (result.error, result.raw) == (None, body)


async def test_events_of_an_encoded_stream_are_relayed_as_they_arrive():
    compressor = zlib.compressobj(wbits=31)
    first, rest = STREAM_BODY.split(b"\n\n", 1)
    flushed = compressor.compress(first + b"\n\n") + compressor.flush(zlib.Z_SYNC_FLUSH)
    with scripted(
        lambda _: [
            head(EVENTS, "Content-Encoding: gzip", "Connection: close"),
            flushed,
            1000.0,
            compressor.compress(rest) + compressor.flush(),
        ]
    ):
        job, into = relayed_job(), CollectedDeltas()
        with trio.move_on_after(1):
            async with node().generate(job, into):
                await into.over.wait()
    assert into.text() == "well"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("coding", ["gzip", "zstd"])
async def test_bomb_is_the_nodes_failure_and_takes_no_memory(coding, streams):
    _, encode = ENCODERS[coding]
    bomb = encode((b"data: " if streams else b'{"choices": "') + bytes(400_000_000))
    kind = EVENTS if streams else "application/json"
    with answered(bomb, kind, f"Content-Encoding: {coding}"):
        one = node(answer_bytes=1_000_000)
        tracemalloc.start()
        result = await generated(one, relayed_job(stream=streams))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert isinstance(result.error, RelayFailed)
    assert result.deltas == []
    assert peak < 8_000_000


@pytest.mark.parametrize("streams", [False, True])
async def test_encoded_content_that_ends_too_early_fails(streams):
    body, kind = (STREAM_BODY[:-20], EVENTS) if streams else (ANSWER, "application/json")
    send = streamed if streams else whole
    result = await send(gzip.compress(body)[:-9], kind, "Content-Encoding: gzip")
    assert isinstance(result.error, ContentFailed)
    assert "ends too early" in result.error.message


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
@pytest.mark.parametrize("mark", [b"", MARK])
async def test_encoded_refusal_is_relayed(coding, mark):
    _, encode = ENCODERS[coding]
    for send in (whole, streamed):
        result = await send(
            encode(mark + TOO_LONG), "application/json", f"Content-Encoding: {coding}", status="400 Bad"
        )
        assert isinstance(result.error, NodeRefused)
        assert (result.error.status, result.error.body) == (400, TOO_LONG)


@pytest.mark.parametrize("kind", ["application/json", "text/plain", None])
async def test_error_in_json_for_a_stream_counts_as_the_status_that_it_names(kind):
    for send in (whole, streamed):
        result = await send(MARK + TOO_LONG, kind)
        assert isinstance(result.error, NodeRefused)
        assert result.error.status == 400
        assert "the prompt is 12 tokens too long" in result.error.message
        assert result.deltas == []


@pytest.mark.parametrize("error", [{"message": "out of memory"}, "out of memory", {"error": {"code": 500}}])
async def test_error_in_json_that_names_no_status_is_the_nodes_failure(error):
    result = await streamed(json.dumps({"error": error}).encode(), "application/json")
    assert isinstance(result.error, NodeFailed)
    assert result.deltas == []


async def test_whole_chat_for_a_translated_stream_is_its_only_piece():
    with answered(ANSWER, "application/json"):
        result = await generated(node(dialects=("openai",)), translated_job())
    assert (result.error, result.text(), result.deltas[-1].finish_reason) == (None, "Hello there", "stop")


async def test_error_for_a_translated_stream_counts_as_the_status_that_it_names():
    with answered(TOO_LONG, "application/json"):
        result = await generated(node(dialects=("openai",)), translated_job())
    assert isinstance(result.error, NodeRefused)
    assert result.error.status == 400


async def test_refusal_that_comes_before_the_request_was_read_is_the_answer():
    """A server of the operating system is needed: only its connections can be reset."""

    async def refuse(stream):
        async with stream:
            while b"\r\n\r\n" not in await stream.receive_some(1000):
                pass
            await stream.send_all(full_response(TOO_LONG, "application/json", status="413 Too Large"))

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, refuse, 0, host="127.0.0.1"))
        upstream = Upstream(f"http://127.0.0.1:{listener.socket.getsockname()[1]}", name="remote")
        for streams in (False, True):
            job = relayed_job(stream=streams, messages=["x" * 10_000_000])
            into = CollectedDeltas()
            with pytest.raises(NodeRefused) as refused:
                await relay(upstream, job, job.relay, into, model="m")
            assert (refused.value.status, refused.value.body) == (413, TOO_LONG)
        upstream.close()
        nursery.cancel_scope.cancel()


async def test_secret_in_an_encoded_refusal_is_masked():
    async def repeat(stream):
        async with stream:
            await stream.receive_some(10_000)
            body = gzip.compress(b'{"error": {"message": "no key sk-12345678"}}')
            await stream.send_all(
                full_response(body, "application/json", "Content-Encoding: gzip", status="400 Bad")
            )

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, repeat, 0, host="127.0.0.1"))
        url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        upstream = Upstream(url, name="remote", api_key="sk-12345678")
        job = relayed_job(stream=False)
        with pytest.raises(NodeRefused) as refused:
            await relay(upstream, job, job.relay, CollectedDeltas(), model="m")
        upstream.close()
        nursery.cancel_scope.cancel()
    assert b"no key ***" in refused.value.body
    assert b"12345678" not in refused.value.body
