"""Strict framing of requests that h11 would accept, compared with a simple parser of the whole data."""

import re

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.server.listener.framing import StrictBuffer, StrictConnection

PIECES = [
    b"\r",
    b"\n",
    b"\r\n",
    b"\r\n\r\n",
    b" ",
    b"\t",
    b"a",
    b"X: 1",
    b"Content-Length: 1",
    b",",
    b"5;x",
    b":",
]
BARE = re.compile(rb"(?<!\r)\n|\r(?!\n)")
BAD_LENGTH = re.compile(rb"(?si)\ncontent-length:(?:[^\r]*,|.*\ncontent-length:)")


def expected(data: bytes) -> list[bytes] | str | None:
    """Return the lines of the head at the start of `data`, its error, or None if it is incomplete."""
    if data.startswith(b"\r\n"):
        return []
    head, end, _ = data.partition(b"\r\n\r\n")
    head += end
    bare = BARE.search(head)
    if bare is not None and (end or bare[0] == b"\n" or bare.end() < len(head)):
        return "a line does not end with CR LF"
    if not end:
        return None
    if re.search(rb"\n[ \t]", head):
        return "a header is folded over several lines"
    if BAD_LENGTH.search(head):
        return "several values of Content-Length"
    return head.removesuffix(b"\r\n\r\n").split(b"\r\n")


def outcome(pieces: list[bytes]) -> tuple[list[bytes] | str | None, bytes]:
    """Return the buffer's result and the data it leaves. It may refuse before it has all pieces."""
    buffer = StrictBuffer()
    lines = None
    for index, piece in enumerate(pieces):
        buffer += piece
        try:
            lines = buffer.maybe_extract_lines()
        except h11.LocalProtocolError as error:
            return str(error), b""
        if lines is not None:
            return [bytes(line) for line in lines], bytes(buffer) + b"".join(pieces[index + 1 :])
    return None, bytes(buffer)


@given(st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join), st.lists(st.integers(0, 60), max_size=6))
def test_head_is_read_wherever_it_is_split(data, cuts):
    ends = sorted({min(cut, len(data)) for cut in cuts})
    pieces = [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)]
    lines, left = outcome(pieces)
    assert lines == expected(data)
    if isinstance(lines, list):
        taken = b"\r\n".join(lines) + (b"\r\n\r\n" if lines else b"\r\n")
        assert taken + left == data


@given(st.lists(st.sampled_from(PIECES), max_size=8).map(b"".join))
def test_line_before_a_chunk_ends_in_crlf_only(data):
    buffer = StrictBuffer()
    buffer += data
    line, end, _ = data.partition(b"\r\n")
    if BARE.search(line + end) if end else b"\n" in data:
        with pytest.raises(h11.LocalProtocolError, match="CR LF"):
            buffer.maybe_extract_next_line()
    else:
        assert buffer.maybe_extract_next_line() == (line + end if end else None)


def test_every_byte_of_a_slow_head_is_examined_once():
    class Counting(bytearray):
        examined = 0

        def count(self, what, start=0, end=None):
            type(self).examined += (len(self) if end is None else end) - start
            return super().count(what, start, len(self) if end is None else end)

    buffer = StrictBuffer()
    buffer._data = Counting()
    head = b"GET / HTTP/1.1\r\nHost: test\r\nX-Slow: " + b"x" * 5000 + b"\r\n\r\n"
    for index in range(len(head)):
        buffer._data.append(head[index])
        lines = buffer.maybe_extract_lines()
    assert len(lines) == 3
    assert Counting.examined <= 3 * (len(head) + 4)  # by each of three counts


def test_h11_uses_the_strict_buffer():
    """Another version of h11 could silently bypass the buffer."""
    connection = StrictConnection(1000)
    connection.receive_data(b"GET / HTTP/1.1\nHost: test\n\n")
    with pytest.raises(h11.RemoteProtocolError, match="CR LF"):
        connection.next_event()
    lenient = h11.Connection(h11.SERVER)
    lenient.receive_data(b"GET / HTTP/1.1\nHost: test\n\n")
    assert type(lenient.next_event()) is h11.Request
