import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.engine.blocks import BlockPool, OutOfBlocksError


def test_all_blocks_are_free_at_first():
    assert BlockPool(5, block_size=16).free == 5


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_a_block_begun_counts_as_one(tokens, blocks):
    assert blocks == BlockPool(9, block_size=16).blocks_for(tokens)


def test_too_large_an_allocation_raises_and_changes_nothing():
    pool = BlockPool(3, block_size=16)
    held = pool.allocate(2)
    with pytest.raises(OutOfBlocksError, match="2 blocks were asked for, 1 are free"):
        pool.allocate(2)
    assert pool.free == 1
    assert {0, 1, 2} == {*held, *pool.allocate(1)}


def test_allocating_nothing_takes_nothing():
    pool = BlockPool(3, block_size=16)
    assert pool.allocate(0) == []
    assert pool.free == 3


def test_a_block_released_twice_raises():
    pool = BlockPool(3, block_size=16)
    held = pool.allocate(2)
    pool.release(held)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(held[:1])


def test_a_block_given_twice_in_one_release_raises():
    pool = BlockPool(3, block_size=16)
    (block,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([block, block])


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=60))
def test_no_block_ever_has_two_holders(actions):
    pool = BlockPool(10, block_size=4)
    held: list[list[int]] = []
    for take, number in actions:
        if take and number <= pool.free:
            held.append(pool.allocate(number))
            assert len(held[-1]) == number
        elif not take and held:
            pool.release(held.pop(number % len(held)))
        taken = [block for blocks in held for block in blocks]
        assert len(taken) == len(set(taken))
        assert len(taken) + pool.free == 10
        assert set(taken) <= set(range(10))
