import pytest

from fairlead.engine.slots import Slot, SlotPool


def test_each_id_is_taken_once():
    pool = SlotPool(3)
    assert {0, 1, 2} == {pool.take().row for _ in range(3)}
    assert pool.free == 0


def test_an_id_comes_back_with_the_next_generation():
    pool = SlotPool(1)
    first = pool.take()
    pool.release(first)
    assert Slot(first.row, first.generation + 1) == pool.take()


def test_an_earlier_owner_no_longer_holds_the_id():
    pool = SlotPool(1)
    first = pool.take()
    assert pool.holds(first)
    pool.release(first)
    assert not pool.holds(first)
    second = pool.take()
    assert not pool.holds(first)
    assert pool.holds(second)


def test_a_late_release_raises_and_leaves_the_id_to_its_new_owner():
    pool = SlotPool(1)
    first = pool.take()
    pool.release(first)
    second = pool.take()
    with pytest.raises(AssertionError, match="not held"):
        pool.release(first)
    assert pool.holds(second)
    assert pool.free == 0


def test_an_id_released_twice_raises():
    pool = SlotPool(2)
    slot = pool.take()
    pool.release(slot)
    with pytest.raises(AssertionError, match="not held"):
        pool.release(slot)
    assert pool.free == 2


def test_taking_from_an_empty_pool_raises():
    pool = SlotPool(1)
    pool.take()
    with pytest.raises(AssertionError, match="no slot is free"):
        pool.take()
