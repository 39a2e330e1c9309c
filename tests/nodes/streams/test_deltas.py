"""The channel from engine steps to a reader: unread deltas are merged, and none is lost or repeated."""

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from fairlead.base.errors import NodeFailed
from fairlead.base.job import Delta
from fairlead.nodes.streams.deltas import Deltas

pieces = st.lists(st.tuples(st.integers(0, 2), st.text(max_size=3), st.lists(st.integers(0, 9), max_size=2)))


async def test_slow_reader_gets_fewer_larger_deltas():
    deltas = Deltas(1)
    for text in "abc":
        deltas.put(Delta(0, text=text, token_ids=[1]))
    assert [Delta(0, text="abc", token_ids=[1, 1, 1])] == await deltas.take()


async def test_take_returns_an_empty_list_at_the_end():
    deltas = Deltas(1)
    deltas.put(Delta(0, text="a", finish_reason="stop"))
    assert [delta.text for delta in await deltas.take()] == ["a"]
    assert await deltas.take() == []
    await deltas.ended()


async def test_channel_ends_only_when_every_choice_has_ended(autojump_clock):
    deltas = Deltas(2)
    deltas.put(Delta(0, finish_reason="stop"))
    with trio.move_on_after(1) as scope:
        await deltas.ended()
    assert scope.cancelled_caught
    deltas.put(Delta(1, finish_reason="length"))
    await deltas.ended()


async def test_failure_is_raised_after_earlier_deltas_are_read():
    deltas = Deltas(1)
    deltas.put(Delta(0, text="a"))
    deltas.fail(NodeFailed("gone"))
    await deltas.started()
    assert [delta.text for delta in await deltas.take()] == ["a"]
    with pytest.raises(NodeFailed, match="gone"):
        await deltas.take()


async def test_failure_before_any_delta_is_raised_by_started():
    deltas = Deltas(1)
    deltas.fail(NodeFailed("gone"))
    with pytest.raises(NodeFailed, match="gone"):
        await deltas.started()


async def test_sealed_deltas_are_not_merged_with_later_ones():
    deltas = Deltas(2)
    deltas.put(Delta(1, "b"))
    deltas.put(Delta(0, "a"))
    deltas.seal()
    deltas.put(Delta(0, "c"))
    deltas.fail(NodeFailed("gone"))
    await deltas.started()
    assert [delta.text for delta in await deltas.take()] == ["b", "a", "c"]
    with pytest.raises(NodeFailed, match="gone"):
        await deltas.take()


async def test_sealed_delta_is_read_before_on_delta_is_called_again():
    deltas = Deltas(1)
    taken, accepted = [], []

    def on_delta(offered: list[Delta]) -> bool:
        accepted.extend(delta.text for delta in offered)
        return offered[0].text != "first"

    async def read() -> None:
        taken.extend(delta.text for delta in await deltas.take(on_delta))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        deltas.put(Delta(0, "first"))  # refused by `on_delta`
        deltas.seal()
        deltas.put(Delta(0, "second"))
    assert taken == ["first", "second"]
    assert accepted == ["first"]


async def test_deltas_and_failures_after_the_end_are_dropped():
    deltas = Deltas(1)
    deltas.put(Delta(0, text="a", finish_reason="stop"))
    deltas.put(Delta(0, text="late"))
    deltas.fail(NodeFailed("after the end"))
    assert [delta.text for delta in await deltas.take()] == ["a"]
    assert await deltas.take() == []


async def test_waiting_reader_is_woken_by_each_put(autojump_clock):
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
    assert seen == ["a", "b", ""]


async def read_with_on_delta(deltas: Deltas, taken: list[str], *, accepts: bool = True) -> list[str]:
    """Read to the end with an `on_delta` that records what it accepts; return what the reader received."""
    received = []

    def on_delta(pieces: list[Delta]) -> bool:
        if accepts:
            taken.extend(piece.text for piece in pieces)
        return accepts

    while pieces := await deltas.take(on_delta):
        received.append("".join(piece.text for piece in pieces))
    return received


@pytest.mark.parametrize(("accepts", "accepted", "read"), [(True, ["a", "b"], ["!"]), (False, [], ["ab!"])])
async def test_reader_receives_only_deltas_that_on_delta_refuses(accepts, accepted, read):
    deltas = Deltas(1)
    taken: list[str] = []
    received: list[str] = []

    async def follow() -> None:
        received.extend(await read_with_on_delta(deltas, taken, accepts=accepts))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow)
        await trio.testing.wait_all_tasks_blocked()
        deltas.put(Delta(0, text="a", token_ids=[1]))
        deltas.put(Delta(0, text="b", token_ids=[2]))
        deltas.put(Delta(0, text="!", token_ids=[3], finish_reason="stop"))
    assert (accepted, read, 3) == (taken, received, deltas.tokens)


async def test_on_delta_is_not_called_while_earlier_deltas_are_unread():
    deltas = Deltas(1)
    taken: list[str] = []
    received: list[str] = []
    busy = True

    def on_delta(pieces: list[Delta]) -> bool:
        if not busy:
            taken.extend(piece.text for piece in pieces)
        return not busy

    async def follow() -> None:
        while pieces := await deltas.take(on_delta):
            received.extend(piece.text for piece in pieces)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow)
        await trio.testing.wait_all_tasks_blocked()
        deltas.put(Delta(0, text="a"))
        busy = False
        deltas.put(Delta(0, text="b"))
        await trio.testing.wait_all_tasks_blocked()
        deltas.put(Delta(0, text="c"))
        deltas.put(Delta(0, finish_reason="stop"))
    assert (received, taken) == (["ab", ""], ["c"])


async def test_cancelled_reader_removes_its_on_delta(autojump_clock):
    deltas = Deltas(1)
    taken: list[str] = []
    with trio.move_on_after(1):
        await read_with_on_delta(deltas, taken)
    deltas.put(Delta(0, text="a"))
    assert (taken, [delta.text for delta in await deltas.take()]) == ([], ["a"])


@given(pieces=pieces, reads=st.lists(st.booleans(), max_size=20))
def test_reads_at_any_time_return_all_deltas(pieces, reads):
    async def main() -> None:
        deltas = Deltas(3)
        received = {index: ("", []) for index in range(3)}

        async def take() -> None:
            for delta in await deltas.take():
                text, tokens = received[delta.index]
                received[delta.index] = (text + delta.text, tokens + delta.token_ids)

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
            assert (text, tokens) == received[choice]

    trio.run(main)


@pytest.mark.parametrize("keeps", [False, True])
async def test_unread_channel_can_be_restarted(autojump_clock, keeps):
    deltas = Deltas(2, keeps=keeps)
    deltas.put(Delta(0, "old", [1, 2], finish_reason="stop"))
    deltas.put(Delta(1, "old", [3]))
    assert deltas.restart()
    with trio.move_on_after(1) as scope:
        await deltas.started()
    assert scope.cancelled_caught
    for index in range(2):
        deltas.put(Delta(index, "new", [4], finish_reason="stop"))
    assert [delta.text for delta in await deltas.take()] == ["new", "new"]
    assert await deltas.take() == []
    assert deltas.tokens == 2
    assert deltas.is_over


async def test_reader_woken_before_a_restart_continues_to_wait(autojump_clock, nursery):
    deltas = Deltas(1)
    read: list[str] = []

    async def reading() -> None:
        while taken := await deltas.take():
            read.extend(delta.text for delta in taken)

    nursery.start_soon(reading)
    await trio.testing.wait_all_tasks_blocked()
    deltas.put(Delta(0, "old"))
    assert deltas.restart()
    await trio.sleep(1)
    deltas.put(Delta(0, "new", finish_reason="stop"))
    await trio.testing.wait_all_tasks_blocked()
    assert read == ["new"]


@pytest.mark.parametrize("uses_on_delta", [False, True])
async def test_channel_cannot_be_restarted_after_a_read(nursery, uses_on_delta):
    deltas = Deltas(1)
    nursery.start_soon(deltas.take, (lambda _: True) if uses_on_delta else None)
    await trio.testing.wait_all_tasks_blocked()
    deltas.put(Delta(0, "some", [1]))
    await trio.testing.wait_all_tasks_blocked()
    assert not deltas.restart()
    assert deltas.tokens == 1
    nursery.cancel_scope.cancel()


async def test_channel_can_be_restarted_when_on_delta_took_nothing(nursery):
    deltas = Deltas(1)
    with trio.move_on_after(0.0):
        await deltas.take(lambda _: False)
    deltas.put(Delta(0, "some"))
    assert deltas.restart()


@given(st.data(), pieces)
async def test_all_deltas_are_kept_whether_read_or_accepted(data, pieces):
    deltas = Deltas(3, keeps=True)
    accepted: list[Delta] = []
    expected: dict[int, Delta] = {}

    def on_delta(taken: list[Delta]) -> bool:
        accepts = data.draw(st.booleans())
        accepted.extend(taken if accepts else ())
        return accepts

    async with trio.open_nursery() as nursery:
        for index, text, token_ids in pieces:
            if data.draw(st.booleans()):
                nursery.start_soon(deltas.take, on_delta)
                await trio.testing.wait_all_tasks_blocked()
            deltas.put(Delta(index, text, list(token_ids)))
            await trio.testing.wait_all_tasks_blocked()
            expected.setdefault(index, Delta(index)).merge(Delta(index, text, list(token_ids)))
        nursery.cancel_scope.cancel()
    kept: dict[int, Delta] = {}
    for delta in deltas.kept or ():
        kept.setdefault(delta.index, Delta(delta.index)).merge(delta)
    assert expected == kept


async def test_relayed_tokens_are_counted():
    deltas = Deltas(1)
    deltas.put(Delta(0, "a", raw=[b"a"], relayed_tokens=1))
    deltas.put(Delta(0, "bc", raw=[b"bc"], relayed_tokens=2))
    assert deltas.tokens == 3


async def test_correction_never_makes_the_token_count_negative():
    deltas = Deltas(1)
    deltas.put(Delta(0, "a", raw=[b"a"], relayed_tokens=1))
    deltas.put(Delta(0, relayed_tokens=-999))
    assert deltas.tokens == 0
