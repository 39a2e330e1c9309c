"""Server-sent events: splitting them out of reads, reading one, and writing one."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.base.formats.server_sent_events import (
    EventSplitter,
    encode_comment,
    encode_event,
    event_comments,
    event_data,
    event_name,
    split_events,
)

ENDS = ["\n\n", "\r\n\r\n", "\r\r"]

lines = st.text(
    st.characters(blacklist_characters="\r\n", blacklist_categories=["Cs"]), min_size=1, max_size=12
)


@given(
    events=st.lists(st.tuples(lines, st.sampled_from(ENDS)), max_size=8),
    rest=st.sampled_from(["", "data: half"]),
    positions=st.lists(st.integers(0, 200), max_size=8),
)
def test_events_are_complete_wherever_the_stream_is_split(events, rest, positions):
    complete = [(line + end).encode() for line, end in events]
    stream = b"".join(complete) + rest.encode()
    ends = sorted({position % (len(stream) + 1) for position in positions} | {0, len(stream)})
    splitter = EventSplitter(1000)
    received = []
    for start, end in pairwise(ends):
        received += split_events(splitter.feed(stream[start:end]))
    assert stream == b"".join(received) + bytes(splitter._rest)
    assert bool(rest) == splitter.has_rest
    assert len(complete) == len(received)
    assert [event.strip() for event in complete] == [event.strip() for event in received]


def test_event_over_the_limit_is_refused():
    splitter = EventSplitter(100)
    assert splitter.feed(b"data: " + b"x" * 90) == b""
    with pytest.raises(OverflowError, match="more than 100 bytes"):
        splitter.feed(b"x" * 10)


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: {}\n\n", b"{}"),
        (b"data:{}\r\n\r\n", b"{}"),
        (b"data: {}\r\r", b"{}"),
        (b"\xef\xbb\xbfdata: {}\n\n", b"{}"),
        (b": comment\nid: 1\ndata: [1,\ndata: 2]\n\n", b"[1,\n2]"),
        (b"event: x\r\ndata: {}\r\n\r\n", b"{}"),
        (b"data\n\n", b""),
        (b"data:\n\n", b""),
        (b"database: 1\n\n", None),
        (b": data: 1\n\n", None),
        (b"\n\n", None),
    ],
)
def test_data_of_an_event_is_its_data_lines(event, data):
    assert event_data(event) == data


@pytest.mark.parametrize(
    ("event", "name", "comments"),
    [
        (b"data: 1\n\n", "message", []),
        (b"event: a\nevent: b\ndata: 1\n\n", "b", []),
        (b": one\n:two\r\n\r\n", "message", ["one", "two"]),
        (b"no colon\n\n", "message", []),
    ],
)
def test_name_and_comments_of_an_event_are_read(event, name, comments):
    assert (event_name(event), event_comments(event)) == (name, comments)


def test_written_event_is_read_back():
    for name in ("", "snapshot"):
        event = encode_event(b'{"a": 1}', name=name)
        assert split_events(event) == [event]
        assert (event_name(event), event_data(event)) == (name or "message", b'{"a": 1}')
    assert event_comments(encode_comment("queued position=1")) == ["queued position=1"]
