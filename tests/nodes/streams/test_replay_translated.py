"""A second attempt at a translated answer, or by translation, continues exactly or fails with the reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.base.job import CallPiece, Delta, Translation
from nodes.streams.test_replay import chat, raw, retried

ORIGIN = Translation("openai")
CALL = CallPiece(0, "f", '{"a": ')


def translated(text="", **parts):
    """Return the delta of one event."""
    return Delta(
        0, text, relayed_tokens=1, reasoning_tokens=int("reasoning" in parts), translation=ORIGIN, **parts
    )


def end(**more):
    return Delta(0, finish_reason="stop", translation=Translation("openai", 3), **more)


ANSWER = [
    translated(reasoning="Let me "),
    translated(reasoning="see."),
    translated("I "),
    translated("call."),
    translated(calls=[CALL]),
    translated(calls=[CallPiece(0, None, "1}")]),
    translated(calls=[CallPiece(1, "g", "{}")]),
]


def joined(client):
    whole = Delta(0)
    for delta in client.deltas:
        whole.merge(delta)
    return whole


@given(sent=st.integers(0, len(ANSWER)))
def test_translated_answer_is_continued_with_all_its_parts_and_counts(sent):
    client = retried(ANSWER[:sent], [*ANSWER, end(relayed_tokens=2, cached_tokens=1)])
    assert client.error is None
    whole = joined(client)
    assert (whole.reasoning, whole.text) == ("Let me see.", "I call.")
    assert [(call.name, call.arguments) for call in whole.calls] == [("f", '{"a": 1}'), ("g", "{}")]
    assert (whole.relayed_tokens, whole.reasoning_tokens, whole.cached_tokens) == (9, 2, 1)
    assert whole.translation == Translation("openai", 3)


DIFFERENCES = [
    ([translated("one")], [translated("two")], "received 'two' instead of 'one'"),
    ([translated("one")], [end()], "it ended earlier"),
    ([translated(reasoning="one")], [translated(reasoning="on"), end()], "it ended earlier"),
    ([translated(calls=[CALL])], [translated(calls=[CallPiece(0, "f", "{")]), end()], "it ended earlier"),
    (
        [translated(calls=[CALL])],
        [translated(calls=[CallPiece(0, "g", '{"a": ')])],
        "it calls another function",
    ),
    ([translated(reasoning="one")], [translated(reasoning="on"), translated("x")], "it continues elsewhere"),
    ([translated("one")], [translated(calls=[CALL])], "it continues elsewhere"),
]


@pytest.mark.parametrize(("first", "second", "message"), DIFFERENCES)
def test_error_states_the_difference(first, second, message):
    client = retried(first, second)
    assert message in client.error.message
    assert len(client.deltas) == 1


def test_translated_answer_can_continue_one_of_an_engine():
    client = retried([Delta(0, "w0 w", [1, 2])], [translated("w0 "), translated("w1 "), end()])
    assert client.error is None
    assert (client.text(), client.tokens) == ("w0 w1 ", 3)


def test_answer_of_an_engine_can_continue_a_translated_one():
    second = [Delta(0, "w0 ", [1]), Delta(0, "w1 ", [2]), Delta(0, "w2 ", [3], finish_reason="stop")]
    client = retried([translated("w0 "), translated("w")], second)
    assert client.error is None
    assert client.text() == "w0 w1 w2 "


def test_translated_answer_can_continue_a_relayed_one():
    first = [raw(chat(None, reasoning_content="hm"), chat("w0 "))]
    client = retried(first, [translated(reasoning="h"), translated(reasoning="m"), translated("w0 w"), end()])
    assert client.error is None
    assert client.text() == "hmw0 w"
    assert joined(client).reasoning == ""


def test_relayed_answer_can_continue_a_translated_one():
    client = retried([translated("w0 ")], [raw(chat("w0 "), chat("w1 "), chat("", "stop"))])
    assert client.error is None
    assert client.text() == "w0 w1 "
    assert b"w0" not in client.raw


CALLED = {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "f", "arguments": '{"a": '}}]}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (translated(reasoning="hm"), raw(chat(None, reasoning_content="hm"))),
        (translated(calls=[CALL]), raw(chat(None, **CALLED))),
        (raw(chat(None, **CALLED)), translated(calls=[CALL])),
    ],
)
def test_reasoning_and_calls_cannot_be_compared_with_events(first, second):
    client = retried([first], [second])
    assert client.error is not None
    assert len(client.deltas) == 1
