"""A second attempt by a node that sends arbitrary events: it differs or continues, and never raises."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.base.errors import NodeFailed
from fairlead.base.job import Delta
from fairlead.nodes.streams.deltas import Deltas
from fairlead.nodes.streams.replay import RecordingSink, ReplaySink
from nodes.listening import CollectedDeltas
from nodes.streams.test_replay import event_deltas
from nodes.stub_server import stream_events
from upstream_readers import CHAT_READER

FIRST = event_deltas(stream_events("/v1/chat/completions", {}, 8, 1))[:5]

arbitrary = st.recursive(
    st.sampled_from([None, True, 5, -1, 1.5, 10**30, "w0 ", "w0 w1 w2 w3 w4", "\ud800", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["content", "function", "delta", "tool_calls"]), inner, max_size=3)
    ),
    max_leaves=5,
)
members = st.dictionaries(
    st.sampled_from(["content", "text", "reasoning", "tool_calls", "delta", "name", "function", "x"]),
    arbitrary,
    max_size=2,
)
contents = st.sampled_from(["w0 ", "w1 w2", "w0 w1 w2 w3 w4"])


@st.composite
def events(draw):
    """Draw a chat event with unexpected members, or an invalid event."""
    if draw(st.booleans()):
        extra = st.sampled_from([b"data: [DONE]\n\n", b":\n\n", b"data: \xff\n\n", b"data: {\n\n", b"\n\n"])
        return draw(extra | arbitrary.map(lambda document: f"data: {json.dumps(document)}\n\n".encode()))
    delta = draw(members) | {"content": draw(contents)}
    choice = draw(members) | {"index": 0, "delta": delta}
    document = draw(members) | {"choices": [choice, *draw(st.lists(arbitrary, max_size=1))]}
    return f"data: {json.dumps(document)}\n\n".encode()


@given(second=st.lists(events(), min_size=1, max_size=6))
def test_second_attempt_never_raises(second):
    client = CollectedDeltas()
    recorded = RecordingSink(client)
    for delta in FIRST:
        recorded.put(delta)
    replay = ReplaySink(recorded, CHAT_READER)
    for delta in event_deltas(second):
        replay.put(delta)
    assert client.error is None or isinstance(client.error, NodeFailed)
    assert client.error is None or len(client.error.message) < 300


def test_error_message_quotes_only_the_beginning_of_a_difference():
    client = CollectedDeltas()
    recorded = RecordingSink(client)
    recorded.put(Delta(0, "a" * 10_000, raw=[b"a"]))
    ReplaySink(recorded, CHAT_READER).put(Delta(0, "b" * 10_000 + "\x1b", [1]))
    assert client.error is not None
    assert len(client.error.message) < 200


async def test_token_count_of_a_replay_in_other_pieces_is_never_negative():
    deltas = Deltas(1, keeps=True)
    recorded = RecordingSink(deltas)
    recorded.put(text_delta("x" * 1000))
    replay = ReplaySink(recorded, CHAT_READER)
    for _ in range(1000):
        replay.put(text_delta("x"))
    # The node reports that this was one token.
    replay.put(Delta(0, raw=[b"data: [DONE]\n\n"], relayed_tokens=1 - 1000))
    assert deltas.tokens == 0
    replay.put(text_delta("y"))
    assert deltas.tokens == 1


def text_delta(text: str) -> Delta:
    event = b'data: {"choices": [{"index": 0, "delta": {"content": "%s"}}]}\n\n' % text.encode()
    assert CHAT_READER.read_event(event).text == text
    return Delta(0, text, raw=[event], relayed_tokens=1)


@pytest.mark.parametrize("tool_calls", [5, [5], {"function": 5}, [{"function": [5]}]])
def test_invalid_tool_calls_are_ignored(tool_calls):
    choice = {"index": 0, "delta": {"content": "w0 w1 w2 w3 w4 w5"}, "tool_calls": tool_calls}
    client = CollectedDeltas()
    recorded = RecordingSink(client)
    for delta in FIRST:
        recorded.put(delta)
    ReplaySink(recorded, CHAT_READER).put(
        event_deltas([f"data: {json.dumps({'choices': [choice]})}\n\n".encode()])[0]
    )
    assert client.error is None
    assert client.text() == "w0 w1 w2 w3 w4 w5"
