"""Responses that violate the API, or their own headers, fail only their job."""

from itertools import product

import pytest

from fairlead.base.errors import NodeFailed, NodeRefused
from fairlead.nodes.http.client import UpstreamFailed
from fairlead.nodes.streams.upstream_stream import RelayFailed
from nodes.listening import RecordingListener, generated, relayed_job
from nodes.scripted import STREAM_BODY, full_response, head, node, scripted

ANSWER = b'{"choices": [{"message": {"content": "hi"}}]}'
PAGE = b"<html><script>alert(document.domain)</script></html>"
LIMIT = 100_000

# Content type, encoding, status and body ----------------------------------------------------------------


async def relay(answer: bytes, *, streams: bool = False):
    """Return the result of a job that gets this response."""
    with scripted(lambda _request: [answer]) as server:
        result = await generated(node(), relayed_job(stream=streams))
        assert len(server.requests) == 1
    return result


@pytest.mark.parametrize(
    "kind",
    [
        "application/json",
        "Application/JSON",
        "application/json; charset=utf-8",
        "application/json;charset=iso-8859-1",
        "application/json ; boundary=x",
    ],
)
async def test_json_type_is_accepted_with_any_parameters(kind):
    result = await relay(full_response(ANSWER, kind))
    assert (result.error, result.raw) == (None, ANSWER)


OTHER_TYPES = [
    "text/html",
    "text/html; charset=application/json",
    "image/svg+xml",
    "application/xhtml+xml",
    "application/octet-stream",
    "application/x-ndjson",
    "application/json-seq",
    "application/jsonp",
    "application/problem+json",
    "multipart/mixed; boundary=application/json",
    "application/json, text/html",
    "text/html, application/json",
    '"application/json"',
    "json",
]
UNTOLD_TYPES = ["text/plain", "Text/Plain; charset=utf-8", ";application/json", "", None]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        *product(OTHER_TYPES, [PAGE, ANSWER]),
        *product(UNTOLD_TYPES, [PAGE, b"", b"[]", b'{"status": "ok"}', b'"choices"', b"\xef\xbb\xbf <p>"]),
    ],
)
async def test_other_content_type_is_a_failure_of_the_node(kind, streams, body):
    result = await relay(full_response(body, kind), streams=streams)
    assert result.deltas == []
    assert isinstance(result.error, NodeFailed)
    assert (result.error.status, result.error.code) == (502, "node_failed")
    assert "instead of" in result.error.message or not body
    assert result.error.message.isprintable()


async def test_two_content_types_are_refused():
    result = await relay(full_response(ANSWER, "application/json", "Content-Type: text/html"))
    assert isinstance(result.error, NodeFailed)


@pytest.mark.parametrize(
    ("answer", "streams"),
    [
        *((full_response(ANSWER, kind), True) for kind in ("application/json", *UNTOLD_TYPES)),
        *((full_response(STREAM_BODY, kind), False) for kind in ("text/event-stream", *UNTOLD_TYPES)),
    ],
)
async def test_stream_instead_of_json_or_the_reverse_fails_only_its_job(answer, streams):
    result = await relay(answer, streams=streams)
    assert result.deltas == []
    assert isinstance(result.error, RelayFailed)


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "deflate", "br", "x", "identity, gzip", "gzip, gzip"])
@pytest.mark.parametrize("streams", [False, True])
async def test_content_that_is_not_encoded_as_its_head_says_is_a_failure_of_the_node(encoding, streams):
    kind = "text/event-stream" if streams else "application/json"
    result = await relay(full_response(ANSWER, kind, f"Content-Encoding: {encoding}"), streams=streams)
    assert result.deltas == []
    assert isinstance(result.error, NodeFailed)


@pytest.mark.parametrize(
    "status",
    [
        *("100", "101", "102", "103", "199", "204", "206"),
        *("300", "301", "302", "303", "304", "307", "308", "399", "600", "999", "000", "099", "20", "2000"),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
async def test_status_that_is_neither_a_success_nor_an_error_is_a_failure_of_the_node(status, streams):
    answer = full_response(
        ANSWER, "application/json", "Location: http://127.0.0.1:1/", status=f"{status} Odd"
    )
    result = await relay(answer, streams=streams)
    assert result.deltas == []
    assert isinstance(result.error, NodeFailed)


@pytest.mark.parametrize(
    "answer",
    [
        full_response(b""),
        head("application/json", "Connection: close"),
        head("application/json", "Transfer-Encoding: chunked") + b"0\r\n\r\n",
    ],
)
async def test_empty_response_is_a_failure_of_the_node(answer):
    result = await relay(answer)
    assert result.deltas == []
    assert isinstance(result.error, NodeFailed)


@pytest.mark.parametrize(
    "lines",
    [
        ["Content-Length: 1000"],
        ["Content-Length: -1"],
        ["Content-Length: +45"],
        ["Content-Length: 4 5"],
        ["Content-Length: 45", "Content-Length: 46"],
        ["Content-Length: 45, 45, 46"],
        ["Content-Length: " + "9" * 30],
        ["Content-Length: ４５".encode().decode("latin-1")],
        ["Transfer-Encoding: chunked", "Content-Length: 45"],
        ["Transfer-Encoding: chunked, chunked"],
        ["Transfer-Encoding: xchunked"],
        ["Transfer-Encoding : chunked"],
    ],
)
async def test_wrong_length_of_the_body_is_a_failure_of_the_node(lines):
    result = await relay(head("application/json", *lines) + ANSWER)
    assert result.deltas == []
    assert isinstance(result.error, UpstreamFailed)


@pytest.mark.parametrize(
    "body",
    [
        PAGE,
        b"[]",
        b"null",
        b'"hi"',
        b'{"choices": [NaN]}',
        b'{"choices": ' + b"[" * 50_000,
        b'{"choices": [{"message": {"content": "hi"}}]',
        b"\xff\xfe",
        b" ",
    ],
)
async def test_body_that_is_not_a_json_object_fails_its_job(body):
    result = await relay(full_response(body))
    assert result.deltas == []
    assert isinstance(result.error, RelayFailed)


@pytest.mark.parametrize(
    "body",
    [
        b'{"choices": [], "choices": 5, "choices": [[]]}',
        b'{"choices": [{"message": {"content": "\\ud83d\\ude00"}}], "x": ' + b"[" * 50 + b"]" * 50 + b"}",
        b'{"choices": [], "usage": {"completion_tokens": NaN}}'.replace(b"NaN", b"9" * 5000),
        b'{"\xff": 1, "choices": []}',
    ],
)
async def test_unusual_json_object_is_relayed_unchanged(body):
    result = await relay(full_response(body))
    assert (result.error, result.raw) == (None, body)


async def test_error_with_status_200_fails_the_job():
    result = await relay(full_response(b'{"error": {"message": "no credit\\n left"}}'))
    assert result.deltas == []
    assert isinstance(result.error, RelayFailed)
    assert result.error.message == "remote failed: no credit  left"


async def test_error_with_status_200_counts_as_the_status_that_it_names():
    result = await relay(full_response(b'{"error": {"message": "too\\n long", "code": 400}}'))
    assert result.deltas == []
    assert isinstance(result.error, NodeRefused)
    assert (result.error.status, result.error.message) == (400, "remote answered 400: too  long")


# Refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["application/json", "application/problem+json; charset=utf-8"])
async def test_refusal_in_json_is_relayed_unchanged(kind):
    body = b'{"error":  {"message": "no such tool"}}'
    result = await relay(full_response(body, kind, status="422 Odd"))
    assert isinstance(result.error, NodeRefused)
    assert (result.error.status, result.error.body) == (422, body)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (PAGE, "text/html"),
        (ANSWER, "text/html"),
        (PAGE, "application/json"),
        (PAGE, "text/plain"),
        (PAGE, None),
        (b'["x"]', "application/json"),
        (b'{"error": "\xff"}', "application/json"),
        (b'{"error": ' + b"[" * 50_000, "application/json"),
        (b'{"error": NaN}', "application/json"),
        (b"", "application/json"),
        (ANSWER, "application/xhtml+xml"),
        (ANSWER, "image/svg+json"),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
async def test_other_refusal_is_quoted_in_one_short_line(body, kind, streams):
    result = await relay(full_response(body, kind, status="400 Bad"), streams=streams)
    assert isinstance(result.error, NodeRefused)
    assert (result.error.status, result.error.body) == (400, b"")
    assert result.error.message.startswith("remote answered 400")
    assert result.error.message.isprintable()
    assert len(result.error.message) < 250


async def test_compressed_refusal_is_not_relayed():
    result = await relay(
        full_response(b'{"error": 1}', "application/json", "Content-Encoding: gzip", status="400 Bad")
    )
    assert isinstance(result.error, NodeRefused)
    assert (result.error.message, result.error.body) == ("remote answered 400", b"")


# Failures of the node -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "is_closed"),
    [
        (b"220 smtp.example.org ready\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 300 + b"\r\n", True),
        (head("application/json", "Content-Length: 100") + b"{", True),
        # Any complete answer shows that the server lives, and a client's request may have caused it.
        (full_response(PAGE, "text/html"), False),
        (full_response(ANSWER, None), False),
        (full_response(b""), False),
        (full_response(b'{"a": "%s"}' % (b"x" * LIMIT)), False),
        (full_response(b'{"a": "%s"}' % (b"x" * 1_100_000), status="422 Odd"), False),
        (full_response(b'{"a": NaN}'), False),
        (full_response(PAGE, "text/html", status="400 Bad"), False),
        *(
            (full_response(PAGE, "text/html", status=f"{status} Odd"), False)
            for status in (204, 302, 429, 500, 502, 503, 504, 529)
        ),
    ],
)
async def test_only_broken_connections_stop_new_jobs(answer, is_closed):
    listener = RecordingListener()
    with scripted(lambda _request: [answer]):
        remote = node(listener, failures=3, answer_bytes=LIMIT)
        for _ in range(3):
            assert remote.status().is_up
            await generated(remote, relayed_job(stream=False))
    assert remote.status().is_up == (not is_closed)
    assert (("closed", "remote") in listener.reports) == is_closed
    assert ("down", "remote") not in listener.reports
