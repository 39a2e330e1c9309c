"""Which sequence gets the next slot: tenants take turns within a class."""

from itertools import count

import pytest

from fairlead.engine.sequence import Sequence
from fairlead.engine.sequence_queue import SequenceQueue


class FakeTokens:
    prompt_length = max_tokens = 1

    def __init__(self, key: int) -> None:
        self.key = key


@pytest.fixture
def sequence():
    keys = count()
    return lambda tenant, priority=1: Sequence(FakeTokens(next(keys)), tenant=tenant, priority=priority)


def leave(queue: SequenceQueue) -> list[int]:
    """Return the tenants of all that waits, in the order in which it leaves."""
    tenants = []
    while (head := queue.head()) is not None:
        tenants.append(head.tenant)
        queue.pop_head()
    return tenants


def test_tenants_take_turns(sequence):
    queue = SequenceQueue()
    for tenant in (1, 1, 1, 1, 2, 2, 3):
        queue.append(sequence(tenant))
    assert leave(queue) == [1, 2, 3, 1, 2, 1, 1]


def test_higher_class_goes_first(sequence):
    queue = SequenceQueue()
    for tenant, priority in ((1, 2), (1, 1), (2, 1), (3, 0)):
        queue.append(sequence(tenant, priority))
    assert leave(queue) == [3, 1, 2, 1]


def test_preempted_sequence_goes_before_all_of_its_class(sequence):
    queue = SequenceQueue()
    queue.append(sequence(1))
    queue.append(sequence(3, priority=0))
    queue.prepend(sequence(2))
    assert leave(queue) == [3, 2, 1]


def test_suspended_sequence_goes_on_in_its_tenants_turn_before_new_ones(sequence):
    queue = SequenceQueue()
    new, other, suspended = sequence(1), sequence(2), sequence(1)
    queue.append(new)
    queue.append(other)
    queue.append(suspended, returns=True)
    order = []
    while (head := queue.head()) is not None:
        order.append(head)
        queue.pop_head()
    assert order == [suspended, other, new]


def test_head_stays_the_head_when_others_arrive(sequence):
    queue = SequenceQueue()
    queue.append(large := sequence(1))
    for tenant in (2, 3, 1):
        queue.append(sequence(tenant))
        assert queue.head() is large


def test_removed_sequence_takes_no_turn(sequence):
    queue = SequenceQueue()
    removed = sequence(1)
    queue.append(removed)
    for tenant in (1, 2):
        queue.append(sequence(tenant))
    queue.remove(removed)
    assert (len(queue), leave(queue)) == (2, [1, 2])
    with pytest.raises(KeyError):
        queue.remove(removed)
