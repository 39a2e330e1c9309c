"""Retries, displacement, `fits` and shares of the classes, on the kernel and its oracle."""

from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cext import fair_queue_oracle
from cext.fair_queue_oracle import FairQueueOracle
from fairlead._cext.fairqueue import FairQueue

both = pytest.mark.parametrize("new_queue", [FairQueue, FairQueueOracle], ids=["kernel", "oracle"])
fairly = pytest.mark.parametrize("fairness", ["roundRobin", "tokens"])


def push_all(queue, names, **options):
    return {queue.push(name, **options): name for name in names}


def pop_all(queue, names):
    return "".join(names[queue.pop()] for _ in range(len(queue)))


# Retries -------------------------------------------------------------------------------------------


@both
@fairly
def test_retry_goes_first_and_uses_no_turn(new_queue, fairness):
    queue = new_queue(capacity=4, fairness=fairness)
    names = push_all(queue, "AABB")
    first = queue.pop()
    names[queue.push("A", retried=True)] = "a"
    assert names[first] == "A"
    assert pop_all(queue, names) == "aBAB"


# Displacement --------------------------------------------------------------------------------------


@both
@fairly
def test_newcomer_displaces_the_newest_entry_of_the_longest_line(new_queue, fairness):
    queue = new_queue(capacity=5, fairness=fairness)
    handles = list(push_all(queue, "BAAAB"))
    assert handles[3] == queue.displace("C")
    assert (len(queue), queue.displaced) == (4, 1)


@both
@fairly
def test_light_tenants_are_admitted_while_another_floods_the_queue(new_queue, fairness):
    queue = new_queue(capacity=100, fairness=fairness)
    refused = Counter()
    for number in range(2000):
        tenant = "flood" if number % 20 else f"light {number % 7}"
        if len(queue) == 100 and queue.displace(tenant) is None:
            refused[tenant] += 1
        else:
            queue.push(tenant)
        if number % 10 == 0 and len(queue) == 100:
            queue.pop()
    assert set(refused) == {"flood"}


# Entries that fit ----------------------------------------------------------------------------------


@both
@fairly
def test_skipped_entry_blocks_no_other_and_keeps_its_position(new_queue, fairness):
    queue = new_queue(capacity=40, bypass=0, fairness=fairness)
    seatless = queue.push("A")
    others = [queue.push("B") for _ in range(30)]
    assert others == [queue.pop(lambda handle: None if handle == seatless else True) for _ in others]
    assert seatless == queue.pop(lambda _handle: True)


@both
@fairly
def test_head_that_does_not_fit_is_passed_eight_times_and_no_more(new_queue, fairness):
    queue = new_queue(capacity=40, fairness=fairness)
    large = queue.push("A", size=100)
    for tenant in "BCBCBCBCBCBC":
        queue.push(tenant, size=1)
    popped = []
    with suppress(IndexError):
        while True:
            popped.append(queue.pop(lambda handle: queue.entry(handle).size <= 10))
    assert len(popped) == 8
    assert large == queue.pop(lambda _handle: True)
    assert len(queue.pop_many(10, 10)) == 4


@both
def test_fits_that_raises_changes_nothing(new_queue):
    queue = new_queue(capacity=3)
    names = push_all(queue, "ABA")
    with pytest.raises(ZeroDivisionError):
        queue.pop(lambda _handle: 1 / 0)
    assert pop_all(queue, names) == "ABA"


@both
def test_batch_fills_the_budget_and_leaves_the_rest(new_queue):
    queue = new_queue(capacity=9)
    sizes = {queue.push("A", size=size): size for size in (4, 7, 3, 3, 1)}
    assert [sizes[handle] for handle in queue.pop_many(9, 10)] == [4, 3, 3]
    assert [sizes[handle] for handle in queue.pop_many(9, 8)] == [7, 1]


@both
@pytest.mark.parametrize(("count", "budget"), [(-1, 1), (1, -1), (-(2**70), 1)])
def test_negative_count_or_budget_raises(new_queue, count, budget):
    with pytest.raises(ValueError):
        new_queue(capacity=1).pop_many(count, budget)


# Shares --------------------------------------------------------------------------------------------


@both
@given(min_share=st.sampled_from([0.05, 0.1, 0.25, 0.33]), lengths=st.tuples(*[st.integers(1, 60)] * 3))
def test_each_lower_class_that_waits_gets_its_share(new_queue, min_share, lengths):
    queue = new_queue(capacity=200, min_share=min_share)
    for priority, length in enumerate(lengths):
        push_all(queue, "A" * length, priority=priority)
    left = list(lengths)
    popped = 0
    while all(left):
        left[queue.entry(next_to_leave(queue)).priority] -= 1
        queue.pop()
        popped += 1
        for priority in (1, 2):
            assert lengths[priority] - left[priority] >= popped * min_share - 2


def next_to_leave(queue):
    """Return the handle that the next pop would take. Nothing is taken when `fits` raises."""
    offered = []

    def note(handle):
        offered.append(handle)
        raise LookupError

    with pytest.raises(LookupError):
        queue.pop(note)
    return offered[0]


@both
def test_share_of_a_tenth_is_every_tenth_pop(new_queue):
    queue = new_queue(capacity=60, min_share=0.1)
    names = push_all(queue, "h" * 40, priority=0) | push_all(queue, "l" * 10, priority=2)
    assert "".join(names[queue.pop()] for _ in range(31)) == ("h" * 10 + "l" + ("h" * 9 + "l") * 2)


@both
def test_class_earns_no_credit_while_it_is_empty(new_queue):
    queue = new_queue(capacity=60, min_share=0.25)
    push_all(queue, "h" * 40, priority=0)
    low = queue.push("l", priority=1)
    for _ in range(3):
        queue.pop()
    queue.discard(low)
    low = queue.push("l", priority=1)
    assert len(queue.ahead(low)) == 4


@both
def test_class_that_could_not_leave_for_long_takes_at_most_four_pops_at_once(new_queue):
    queue = new_queue(capacity=200, min_share=0.1)
    names = push_all(queue, "h" * 120, priority=0) | push_all(queue, "l" * 20, priority=1, kind=1)
    for _ in range(100):
        queue.pop(kinds=1 << 0)
    assert "".join(names[queue.pop()] for _ in range(12)) == "llll" + "h" * 7 + "l"


def test_credit_that_grows_without_bound_is_detected(monkeypatch):
    monkeypatch.setattr(fair_queue_oracle, "CREDIT_AT_MOST", float("inf"))
    with pytest.raises(AssertionError):
        test_class_that_could_not_leave_for_long_takes_at_most_four_pops_at_once(FairQueueOracle)
