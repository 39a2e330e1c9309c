"""One attempt at a job: its failure ends the attempt, not the response."""

import pytest
import trio

from fairlead.base.errors import EngineFailed, NodeFailed
from fairlead.base.job import Delta
from fairlead.nodes.streams.attempt import Attempt, retry_sink
from fairlead.nodes.streams.deltas import Deltas
from upstream_readers import CHAT_READER


async def test_attempt_uses_put_of_the_channel_directly():
    deltas = Deltas(1)
    attempt = Attempt(deltas)
    assert deltas.put == attempt.put
    attempt.put(Delta(0, "a"))
    assert [delta.text for delta in await deltas.take()] == ["a"]


async def test_failure_ends_the_attempt_and_not_the_response():
    deltas = Deltas(1)
    attempt = Attempt(deltas)
    with trio.fail_after(60), attempt.scope:
        attempt.fail(NodeFailed("gone"))
        await deltas.ended()
    assert not deltas.is_over
    assert isinstance(attempt.error, NodeFailed)


async def test_first_failure_is_kept_and_later_deltas_are_dropped():
    deltas = Deltas(1)
    attempt = Attempt(deltas)
    attempt.fail(NodeFailed("gone"))
    attempt.fail(EngineFailed("NaN"))
    attempt.put(Delta(0, "late", finish_reason="stop"))
    assert str(attempt.error) == "gone"
    assert (deltas.tokens, deltas.is_over) == (0, False)


async def test_closed_attempt_drops_deltas():
    deltas = Deltas(1)
    attempt = Attempt(deltas)
    attempt.close()
    attempt.put(Delta(0, "late", finish_reason="stop"))
    assert not deltas.is_over


async def test_retry_before_any_read_starts_over():
    deltas = Deltas(1, keeps=True)
    deltas.put(Delta(0, "uno ", [1]))
    assert deltas is retry_sink(deltas)
    deltas.put(Delta(0, "one.", [2], finish_reason="stop"))
    assert [delta.text for delta in await deltas.take()] == ["one."]


async def test_retry_is_impossible_after_a_read_that_was_not_kept():
    deltas = Deltas(1)
    deltas.put(Delta(0, "one ", [1]))
    await deltas.take()
    assert retry_sink(deltas) is None


@pytest.mark.parametrize("attempts", [1, 2, 3])
async def test_retry_after_a_read_continues_after_all_deltas_put(attempts):
    deltas = Deltas(1, keeps=True)
    deltas.put(Delta(0, "one ", [1]))
    assert [delta.text for delta in await deltas.take()] == ["one "]
    deltas.put(Delta(0, "two ", [2]))
    for attempt in range(attempts):
        sink = retry_sink(deltas, CHAT_READER)
        assert sink is not None
        for number, text in enumerate(["one ", "two ", "three ", "four ", "five "][: 3 + attempt], start=1):
            sink.put(Delta(0, text, [number]))
    delivered = "".join(["two ", "three ", "four ", "five "][: 1 + attempts])
    assert delivered == "".join(delta.text for delta in await deltas.take())
    assert 2 + attempts == deltas.tokens


async def test_retry_on_another_kind_of_node_is_not_merged_with_unread_deltas():
    deltas = Deltas(1, keeps=True)
    deltas.put(Delta(0, "one ", [1]))
    await deltas.take()
    deltas.put(Delta(0, "two ", [2]))
    sink = retry_sink(deltas, CHAT_READER)
    assert sink is not None
    event = b'data: {"choices":[{"index":0,"delta":{"content":"one two three "}}]}\n\n'
    sink.put(Delta(0, "one two three ", raw=[event], relayed_tokens=1))
    own, other = await deltas.take()
    assert (own.text, own.raw) == ("two ", [])
    assert b'"content":"three "' in b"".join(other.raw)


async def test_failure_ends_only_the_replay_and_a_difference_fails_the_response():
    deltas = Deltas(1, keeps=True)
    deltas.put(Delta(0, "one ", [1]))
    await deltas.take()
    sink = retry_sink(deltas, CHAT_READER)
    assert sink is not None
    attempt = Attempt(sink)
    attempt.fail(NodeFailed("gone"))
    assert not deltas.is_over
    sink = retry_sink(deltas, CHAT_READER)
    assert sink is not None
    Attempt(sink).put(Delta(0, "uno ", [1]))
    with pytest.raises(NodeFailed, match="did not repeat"):
        await deltas.take()
