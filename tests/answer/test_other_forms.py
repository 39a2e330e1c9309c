"""Answers of servers that compress unasked, begin with a mark, or have another status or type than usual."""

import gzip
import json

import pytest
import trio

from fairlead.answer.upstream_stream import RelayFailed
from fairlead.errors import NodeFailed, NodeRefused
from fairlead.http.client import UpstreamFailed
from nodes.coded import CODINGS, ENCODE
from nodes.listening import generated, relayed_job
from nodes.scripted import STREAM_BODY, full_response, node, scripted

ANSWER = b'{"choices": [{"message": {"content": "hi"}}]}'
MARK = b"\xef\xbb\xbf"
EVENTS = "text/event-stream"


async def relay(answer, *, streams=False, **options):
    with scripted(lambda _request: [answer]) as server:
        result = await generated(node(**options), relayed_job(stream=streams))
        assert len(server.requests) == 1
    assert b"Accept-Encoding: identity\r\n" in server.requests[0]
    return result


@pytest.mark.parametrize("coding", CODINGS)
async def test_answer_that_is_encoded_unasked_is_decoded(coding):
    header = f"Content-Encoding: {coding}"
    whole = await relay(full_response(ENCODE[coding](ANSWER), "application/json", header))
    assert (whole.error, whole.raw) == (None, ANSWER)
    streamed = await relay(full_response(ENCODE[coding](STREAM_BODY), EVENTS, header), streams=True)
    assert (streamed.error, streamed.raw) == (None, STREAM_BODY)


@pytest.mark.parametrize("coding", CODINGS)
async def test_encoded_refusal_has_its_message(coding):
    body = ENCODE[coding](b'{"error": {"message": "no such tool"}}')
    result = await relay(
        full_response(body, "application/json", f"Content-Encoding: {coding}", status="400 Bad")
    )
    assert isinstance(result.error, NodeRefused)
    assert "no such tool" in result.error.message


@pytest.mark.parametrize("streams", [False, True])
async def test_bomb_fails_within_the_bounds_of_an_answer(streams):
    body = gzip.compress(b"data: " + bytes(20_000_000))
    kind = EVENTS if streams else "application/json"
    result = await relay(
        full_response(body, kind, "Content-Encoding: gzip"), streams=streams, answer_bytes=100_000
    )
    assert isinstance(result.error, NodeFailed)
    assert "more than 100000 bytes" in result.error.message


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("body", [b"no gzip", gzip.compress(ANSWER)[:-5]])
async def test_encoded_answer_that_cannot_be_decoded_is_a_failure(body, streams):
    kind = EVENTS if streams else "application/json"
    result = await relay(full_response(body, kind, "Content-Encoding: gzip"), streams=streams)
    assert isinstance(result.error, UpstreamFailed)


@pytest.mark.parametrize("status", ["200 OK", "201 Created", "202 Accepted", "203 Other"])
@pytest.mark.parametrize("mark", [b"", MARK])
@pytest.mark.parametrize("kind", ["application/json", "text/plain; charset=utf-8", None])
async def test_whole_answer_is_known_by_its_content(status, mark, kind):
    result = await relay(full_response(mark + ANSWER, kind, status=status))
    assert (result.error, result.raw) == (None, ANSWER)


@pytest.mark.parametrize("mark", [b"", MARK])
@pytest.mark.parametrize("kind", [EVENTS, "text/plain", None])
async def test_stream_is_known_by_its_content(mark, kind):
    result = await relay(full_response(mark + STREAM_BODY, kind), streams=True)
    assert (result.error, result.raw) == (None, STREAM_BODY)


@pytest.mark.parametrize("kind", ["text/plain", None])
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("body", [b"<html>log in</html>", b"Bad gateway", b'"text"', b"[]"])
async def test_page_without_a_type_is_a_failure(kind, streams, body):
    result = await relay(full_response(body, kind), streams=streams)
    assert isinstance(result.error, NodeFailed)
    assert result.raw == b""


async def test_error_in_place_of_a_stream_counts_as_the_status_that_it_names():
    body = json.dumps(
        {"error": {"message": "too long", "type": "invalid_request_error", "code": 400}}
    ).encode()
    result = await relay(full_response(body), streams=True)
    assert isinstance(result.error, NodeRefused)
    assert (result.error.status, result.error.message) == (400, "remote answered 400: too long")


@pytest.mark.parametrize("body", [ANSWER, b'{"error": {"message": "out of memory"}}', b"{}", b"{"])
async def test_whole_answer_in_place_of_a_stream_is_a_failure(body):
    result = await relay(full_response(body), streams=True)
    assert isinstance(result.error, RelayFailed)


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 200 OK\nContent-Length: 2\n\n{}", b"HTTP/1.1 200 OK\r\nX: y\n\n{}"]
)
async def test_head_with_bare_line_feeds_fails_at_once(answer, autojump_clock):
    began_s = trio.current_time()
    result = await relay(answer + b" " * 10)
    assert isinstance(result.error, UpstreamFailed)
    assert "LF alone" in result.error.message
    assert trio.current_time() == began_s
