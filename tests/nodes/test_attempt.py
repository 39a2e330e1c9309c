"""One try at a job: its failure ends the try, not the answer."""

import pytest
import trio

from fairlead.errors import EngineFailed, NodeFailed
from fairlead.job import Delta
from fairlead.nodes.attempt import Attempt, again
from fairlead.nodes.deltas import Deltas


async def test_what_is_put_arrives_without_a_function_in_between():
    deltas = Deltas(1)
    attempt = Attempt(deltas)
    assert deltas.put == attempt.put
    attempt.put(Delta(0, "a"))
    assert ["a"] == [delta.text for delta in await deltas.take()]


async def test_a_failure_ends_the_attempt_and_not_the_answer():
    deltas = Deltas(1)
    attempt = Attempt(deltas)
    with trio.fail_after(60), attempt.scope:
        attempt.fail(NodeFailed("gone"))
        await deltas.ended()
    assert not deltas.is_over
    assert isinstance(attempt.error, NodeFailed)


async def test_the_first_failure_counts_and_nothing_comes_after_it():
    deltas = Deltas(1)
    attempt = Attempt(deltas)
    attempt.fail(NodeFailed("gone"))
    attempt.fail(EngineFailed("NaN"))
    attempt.put(Delta(0, "late", finish_reason="stop"))
    assert "gone" == str(attempt.error)
    assert (0, False) == (deltas.tokens, deltas.is_over)


async def test_an_attempt_that_is_closed_lets_nothing_pass():
    deltas = Deltas(1)
    attempt = Attempt(deltas)
    attempt.close()
    attempt.put(Delta(0, "late", finish_reason="stop"))
    assert not deltas.is_over


async def test_another_attempt_at_what_nobody_has_read_is_a_new_beginning():
    deltas = Deltas(1, keeps=True)
    deltas.put(Delta(0, "uno ", [1]))
    assert deltas is again(deltas)
    deltas.put(Delta(0, "one.", [2], finish_reason="stop"))
    assert ["one."] == [delta.text for delta in await deltas.take()]


async def test_another_attempt_at_what_was_read_and_not_kept_is_none():
    deltas = Deltas(1)
    deltas.put(Delta(0, "one ", [1]))
    await deltas.take()
    assert again(deltas) is None


@pytest.mark.parametrize("attempts", [1, 2, 3])
async def test_another_attempt_at_what_was_read_goes_on_behind_all_that_was_put(attempts):
    deltas = Deltas(1, keeps=True)
    deltas.put(Delta(0, "one ", [1]))
    assert ["one "] == [delta.text for delta in await deltas.take()]
    deltas.put(Delta(0, "two ", [2]))
    for attempt in range(attempts):
        sink = again(deltas)
        assert sink is not None
        for number, text in enumerate(["one ", "two ", "three ", "four ", "five "][: 3 + attempt], start=1):
            sink.put(Delta(0, text, [number]))
    told = "".join(["two ", "three ", "four ", "five "][: 1 + attempts])
    assert told == "".join(delta.text for delta in await deltas.take())
    assert 2 + attempts == deltas.tokens


async def test_what_another_kind_of_node_adds_is_not_mixed_with_what_was_not_read():
    deltas = Deltas(1, keeps=True)
    deltas.put(Delta(0, "one ", [1]))
    await deltas.take()
    deltas.put(Delta(0, "two ", [2]))
    sink = again(deltas)
    assert sink is not None
    event = b'data: {"choices":[{"index":0,"delta":{"content":"one two three "}}]}\n\n'
    sink.put(Delta(0, "one two three ", raw=[event], relayed_tokens=1))
    own, theirs = await deltas.take()
    assert ("two ", []) == (own.text, own.raw)
    assert b'"content":"three "' in b"".join(theirs.raw)


async def test_a_failure_in_a_replay_is_the_attempts_and_a_difference_is_the_answers():
    deltas = Deltas(1, keeps=True)
    deltas.put(Delta(0, "one ", [1]))
    await deltas.take()
    sink = again(deltas)
    assert sink is not None
    attempt = Attempt(sink)
    attempt.fail(NodeFailed("gone"))
    assert not deltas.is_over
    sink = again(deltas)
    assert sink is not None
    Attempt(sink).put(Delta(0, "uno ", [1]))
    with pytest.raises(NodeFailed, match="did not repeat"):
        await deltas.take()
