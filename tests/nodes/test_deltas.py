"""The channel between a step and a reader: what is not read is merged, and nothing is lost or repeated."""

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from fairlead.errors import NodeFailed
from fairlead.job import Delta
from fairlead.nodes.deltas import Deltas

pieces = st.lists(st.tuples(st.integers(0, 2), st.text(max_size=3), st.lists(st.integers(0, 9), max_size=2)))


async def test_a_slow_reader_gets_fewer_larger_deltas():
    deltas = Deltas(1)
    for text in "abc":
        deltas.put(Delta(0, text=text, token_ids=[1]))
    assert [Delta(0, text="abc", token_ids=[1, 1, 1])] == await deltas.take()


async def test_the_end_is_an_empty_list():
    deltas = Deltas(1)
    deltas.put(Delta(0, text="a", finish_reason="stop"))
    assert ["a"] == [delta.text for delta in await deltas.take()]
    assert [] == await deltas.take()
    await deltas.ended()


async def test_it_ends_only_when_every_choice_has_ended(autojump_clock):
    deltas = Deltas(2)
    deltas.put(Delta(0, finish_reason="stop"))
    with trio.move_on_after(1) as scope:
        await deltas.ended()
    assert scope.cancelled_caught
    deltas.put(Delta(1, finish_reason="length"))
    await deltas.ended()


async def test_a_failure_comes_after_what_was_there_before_it():
    deltas = Deltas(1)
    deltas.put(Delta(0, text="a"))
    deltas.fail(NodeFailed("gone"))
    await deltas.started()
    assert ["a"] == [delta.text for delta in await deltas.take()]
    with pytest.raises(NodeFailed, match="gone"):
        await deltas.take()


async def test_a_failure_before_anything_else_is_raised_at_the_start():
    deltas = Deltas(1)
    deltas.fail(NodeFailed("gone"))
    with pytest.raises(NodeFailed, match="gone"):
        await deltas.started()


async def test_what_comes_after_the_end_is_dropped():
    deltas = Deltas(1)
    deltas.put(Delta(0, text="a", finish_reason="stop"))
    deltas.put(Delta(0, text="late"))
    deltas.fail(NodeFailed("too late to matter"))
    assert ["a"] == [delta.text for delta in await deltas.take()]
    assert [] == await deltas.take()


async def test_a_waiting_reader_is_woken_by_each_put(autojump_clock):
    deltas = Deltas(1)
    seen = []

    async def read() -> None:
        while taken := await deltas.take():
            seen.append(taken[0].text)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        for text in "ab":
            await trio.sleep(1)
            deltas.put(Delta(0, text=text))
        await trio.sleep(1)
        deltas.put(Delta(0, finish_reason="stop"))
    assert ["a", "b", ""] == seen


@given(pieces=pieces, reads=st.lists(st.booleans(), max_size=20))
def test_whenever_it_is_read_the_sum_is_what_was_put(pieces, reads):
    async def main() -> None:
        deltas = Deltas(3)
        got = {index: ("", []) for index in range(3)}

        async def take() -> None:
            for delta in await deltas.take():
                text, tokens = got[delta.index]
                got[delta.index] = (text + delta.text, tokens + delta.token_ids)

        schedule = iter(reads)
        for index, text, tokens in pieces:
            deltas.put(Delta(index, text=text, token_ids=list(tokens)))
            if next(schedule, False):
                await take()
        for index in range(3):
            deltas.put(Delta(index, finish_reason="stop"))
        await take()
        for choice in range(3):
            text = "".join(text for index, text, _ in pieces if index == choice)
            tokens = [token for index, _, tokens in pieces for token in tokens if index == choice]
            assert (text, tokens) == got[choice]

    trio.run(main)
