"""HTTP responses split into reads anywhere: valid ones parse as with h11, invalid ones are refused."""

import gc
from itertools import pairwise

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.nodes.http.response_parser import HEAD_BYTES, InvalidResponse, ResponseParser

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"

bodies = st.lists(st.binary(min_size=1, max_size=40), max_size=6)


def cut(data, positions):
    """Return the data in pieces that end at these positions."""
    ends = sorted({position % (len(data) + 1) for position in positions} | {0, len(data)})
    return [data[start:end] for start, end in pairwise(ends)]


def parsed(pieces):
    """Return the parser after all pieces, and the body."""
    parser = ResponseParser()
    return parser, b"".join(parser.feed(piece) for piece in pieces)


def parsed_by_h11(pieces):
    """Return status, headers and body as h11 parses them; None if the response is incomplete."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    connection.send(h11.EndOfMessage())
    head, body = None, b""
    for piece in [*pieces, b""]:
        connection.receive_data(piece)
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA or isinstance(event, h11.ConnectionClosed):
                break
            if isinstance(event, h11.Response):
                head = event
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None
                return head.status_code, {name.decode(): value.decode() for name, value in head.headers}, body
    return None


@st.composite
def answers(draw):
    """Draw a valid response, in any framing, possibly after interim ones."""
    parts = draw(bodies)
    interim = draw(
        st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Hints\r\nLink: x\r\n\r\n"])
    )
    head = OK + b"X-Odd:  some\tvalue \r\n"
    framing = draw(st.sampled_from(["length", "chunked", "close"]))
    body = b"".join(parts)
    if framing == "length":
        return interim + head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    if framing == "close":
        return interim + head + b"\r\n" + body
    extension = draw(st.sampled_from([b"", b";a=b"]))
    trailer = draw(st.sampled_from([b"", b"X-After: 1\r\n"]))
    chunks = b"".join(b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in parts)
    return interim + head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n" + trailer + b"\r\n"


@given(answer=answers(), positions=st.lists(st.integers(0, 400), max_size=8))
def test_response_split_anywhere_parses_as_with_h11(answer, positions):
    pieces = cut(answer, positions)
    parser, body = parsed(pieces)
    assert parser.end()
    assert parser.head is not None
    assert parsed_by_h11(pieces) == (parser.head.status, parser.head.headers, body)
    assert not parser.surplus


@given(answer=answers(), data=st.data())
def test_truncated_response_is_incomplete(answer, data):
    end = data.draw(st.integers(0, len(answer) - 1))
    parser, body = parsed([answer[:end]])
    until_close = b"Length" not in answer and b"chunked" not in answer
    if parser.head is None or not until_close:
        assert not parser.end()
    elif until_close:
        assert parser.end()
        assert answer[:end].endswith(body)


@given(data=st.binary(max_size=200), head=st.sampled_from([b"", OK, CHUNKED, CHUNKED + b"5\r\n"]))
def test_random_bytes_raise_only_invalid_response(data, head):
    parser = ResponseParser()
    try:
        parser.feed(head)
        parser.feed(data)
    except InvalidResponse:
        pass
    parser.end()


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-x\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 200OK\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
        OK + b"no colon\r\n\r\n",
        OK + b" folded: x\r\n\r\n",
        OK + b"bad name: x\r\n\r\n",
        OK + b"A: b\nC: d\r\n\r\n",
        OK + b"A: \x00\r\n\r\n",
        OK + b"A: b\r\n folded: x\r\n\r\n",
        b"HTTP/1.1 200 O\x00K\r\n\r\n",
        b"HTTP/1.1 600 OK\r\n\r\n",
        b"HTTP/2.0 200 OK\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        OK + b"Transfer-Encoding: chunked, chunked\r\n\r\n",
        CHUNKED + b"5\nabcde\r\n",
        OK + b"Content-Length: -1\r\n\r\n",
        OK + b"Content-Length: 1_0\r\n\r\n",
        OK + b"Content-Length: 5, 6\r\n\r\n",
        OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
        OK + b"Content-Length: 99999999999999999\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n",
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
        CHUNKED + b"0x5\r\n",
        CHUNKED + b"+5\r\n",
        CHUNKED + b"5_0\r\n",
        CHUNKED + b" 5\r\n",
        CHUNKED + b"\r\n",
        CHUNKED + b"fffffffffffffffff\r\n",
        CHUNKED + b"5\r\nabcdeXX",
        CHUNKED + b"9" * 2000,
        CHUNKED + b"0\r\n" + b"x" * 20_000,
        OK + b"x: y\r\n" * 201 + b"\r\n",
        OK + b"x: " + b"y" * HEAD_BYTES,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 11,
    ],
)
def test_invalid_response_is_refused(answer):
    with pytest.raises(InvalidResponse):
        parsed([answer, b""])


def test_repeated_equal_content_length_is_accepted():
    parser, body = parsed([OK + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc"])
    assert body == b"abc"
    assert parser.is_complete


@pytest.mark.parametrize("framed", [OK + b"Content-Length: 1\r\n\r\na", CHUNKED + b"1\r\na\r\n0\r\n\r\n"])
def test_bytes_after_the_response_are_surplus(framed):
    parser, body = parsed([framed + b"more"])
    assert body == b"a"
    assert parser.is_complete
    assert parser.surplus


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_status_204_and_304_have_no_body(status):
    parser, _ = parsed([b"HTTP/1.1 " + status + b"\r\n\r\n"])
    assert parser.is_complete


@pytest.mark.parametrize(
    ("version", "connection", "keeps"),
    [(b"1.1", b"", True), (b"1.1", b"close", False), (b"1.0", b"", False), (b"1.0", b"Keep-Alive", True)],
)
def test_keep_alive_follows_the_version_and_the_connection_header(version, connection, keeps):
    head = b"HTTP/%s 200 OK\r\nConnection: %s\r\nContent-Length: 0\r\n\r\n" % (version, connection)
    parser, _ = parsed([head])
    assert parser.head is not None
    assert keeps == parser.head.keep_alive


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\nContent-Length: 2\n\n{}",
        b"HTTP/1.1 200 OK\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\n\r\n{}",
    ],
)
@pytest.mark.parametrize("step", [1, 100])
def test_head_with_a_bare_line_feed_is_refused_at_once(head, step):
    with pytest.raises(InvalidResponse, match=r"LF|CR"):
        parsed(head[start : start + step] for start in range(0, len(head), step))


def test_valid_part_of_a_read_is_returned_before_the_rest_is_refused():
    parser = ResponseParser()
    assert parser.feed(CHUNKED + b"3\r\nabc\r\nzz\r\n") == b"abc"
    with pytest.raises(InvalidResponse):
        parser.feed(b"x")


def test_response_to_head_has_no_body_whatever_its_content_length():
    parser = ResponseParser(has_body=False)
    assert parser.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n") == b""
    assert (parser.is_complete, parser.surplus) == (True, False)


def test_body_after_a_response_to_head_is_surplus():
    parser = ResponseParser(has_body=False)
    parser.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
    assert (parser.is_complete, parser.surplus) == (True, True)


@pytest.mark.parametrize(
    "second", [OK + b"Content-Length: 2\r\n\r\nhi", CHUNKED + b"2\r\nhi\r\n0\r\n\r\n", b"\r\n"]
)
@pytest.mark.parametrize("positions", [[], [60, 64, 66]])
def test_second_response_is_surplus_and_none_of_it_is_body(second, positions):
    parser, body = parsed(cut(CHUNKED + b"1\r\na\r\n0\r\n\r\n" + second, positions))
    assert (body, parser.is_complete, parser.surplus) == (b"a", True, True)


def test_trailers_do_not_change_the_head():
    parser, _ = parsed([CHUNKED + b"1\r\na\r\n0\r\nContent-Type: text/html\r\n\r\n"])
    assert parser.head is not None
    assert parser.is_complete
    assert parser.head.headers == {"transfer-encoding": "chunked"}


def test_chunk_size_may_be_padded_with_spaces():
    parser, body = parsed([CHUNKED + b"1  \r\na\r\n0   \r\n\r\n"])
    assert (body, parser.is_complete, parser.surplus) == (b"a", True, False)


def test_parser_is_freed_without_the_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        parsed([CHUNKED + b"1\r\na\r\n0\r\n\r\n" + OK])
        assert gc.collect() == 0
    finally:
        gc.enable()
