"""Streams of lines are split where lines end."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.base.formats.lines import LineSplitter, split_lines


@given(
    lines=st.lists(st.binary(max_size=5).map(lambda line: line.replace(b"\n", b"") + b"\n"), max_size=8),
    rest=st.sampled_from([b"", b"half", b"\r"]),
    positions=st.lists(st.integers(0, 60), max_size=8),
)
def test_lines_are_complete_wherever_the_stream_is_split(lines, rest, positions):
    stream = b"".join(lines) + rest
    ends = sorted({position % (len(stream) + 1) for position in positions} | {0, len(stream)})
    splitter = LineSplitter(100)
    received = []
    for start, end in pairwise(ends):
        received += split_lines(splitter.feed(stream[start:end]))
    assert received == lines
    assert splitter.has_rest == bool(rest.strip())


def test_line_over_the_limit_is_refused():
    splitter = LineSplitter(100)
    assert splitter.feed(b"x" * 95) == b""
    with pytest.raises(OverflowError, match="more than 100 bytes"):
        splitter.feed(b"x" * 10)
    assert not splitter.has_rest


def test_rest_after_the_last_line_is_one_more():
    assert split_lines(b"a\n\nb") == [b"a\n", b"\n", b"b"]
