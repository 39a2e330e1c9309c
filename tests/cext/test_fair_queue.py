"""The contract of the queue, on the kernel and its oracle: turns, capacity, handles and arguments."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cext.fair_queue_oracle import FairQueueOracle, counts, pushed
from fairlead._cext.fairqueue import FairQueue, QueueFullError

both = pytest.mark.parametrize("new_queue", [FairQueue, FairQueueOracle], ids=["kernel", "oracle"])


def push_all(queue, names, **options):
    return {queue.push(name, **options): name for name in names}


def pop_all(queue, names):
    return "".join(names[queue.pop()] for _ in range(len(queue)))


# Turns ---------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("arrival", ["AAAAABB", "ABABAAA", "ABBAAAA", "AABAAAB"])
def test_tenants_take_turns_however_their_entries_arrived(new_queue, arrival):
    queue = new_queue(capacity=7)
    assert pop_all(queue, push_all(queue, arrival)) == "ABABAAA"


@both
def test_lower_class_waits_until_the_higher_ones_are_empty(new_queue):
    queue = new_queue(capacity=9)
    names = push_all(queue, "zZ", priority=7) | push_all(queue, "nn") | push_all(queue, "AAB", priority=0)
    assert pop_all(queue, names) == "ABAnnzZ"


@both
@given(arrivals=st.lists(st.tuples(st.sampled_from("ABCD"), st.integers(0, 2)), max_size=30))
def test_positions_predict_the_pop_order(new_queue, arrivals):
    queue = new_queue(capacity=30)
    handles = [queue.push(tenant, priority=priority) for tenant, priority in arrivals]
    handle_at = {len(queue.ahead(handle)): handle for handle in handles}
    assert [handle_at.get(place) for place in range(len(handles))] == [queue.pop() for _ in handles]


# Capacity and handles ------------------------------------------------------------------------------


@both
def test_full_queue_refuses_and_counts_it(new_queue):
    queue = new_queue(capacity=2)
    push_all(queue, "AB")
    with pytest.raises(QueueFullError):
        queue.push("C")
    assert (len(queue), pushed(queue), queue.refused) == (2, 2, 1)


@both
def test_empty_queue_has_nothing_to_pop(new_queue):
    queue = new_queue(capacity=1)
    with pytest.raises(IndexError):
        queue.pop()
    with pytest.raises(IndexError):
        queue.pop(lambda _handle: True)
    assert queue.pop_many(1, 1) == []


@both
@pytest.mark.parametrize("leave", ["pop", "discard", "clear"])
def test_handle_is_stale_once_its_entry_left(new_queue, leave):
    queue = new_queue(capacity=1)
    stale = queue.push("A", 2.5)
    getattr(queue, leave)(*[stale] if leave == "discard" else [])
    fresh = queue.push("B")
    assert not queue.discard(stale)
    assert (stale in queue, fresh in queue) == (False, True)
    for query in (queue.ahead, queue.entry):
        with pytest.raises(KeyError):
            query(stale)


@both
def test_pushed_values_can_be_read_back(new_queue):
    queue = new_queue(capacity=2)
    number = queue.push(1, 12.5, priority=3, size=7, kind=2, count=4, begun=True)
    text = queue.push("1", retried=True)
    assert [queue.entry(handle) for handle in (number, text)] == [
        (1, 12.5, 3, 7, 2, False, 4, True, 12.5),
        ("1", 1.0, 1, 0, 0, True, 1, False, 1.0),
    ]
    assert (queue.waiting(1), queue.waiting("1"), queue.waiting("nobody")) == (1, 1, 0)


@both
def test_forged_handles_are_not_in_the_queue(new_queue):
    queue = new_queue(capacity=1)
    handle = queue.push("A")
    beside = {
        handle + offset
        for sign in (1, -1)
        for offset in (sign, sign << 31, sign << 32, sign << 63, sign << 200)
    }
    beyond_the_arrays = {handle + row for row in range(1, 100)}
    for forged in beside | beyond_the_arrays | {-1, -handle - 1, "1", None}:
        assert not queue.discard(forged)
        assert forged not in queue
    assert handle == queue.pop()


@both
@pytest.mark.parametrize("retried", [False, True])
@pytest.mark.parametrize(
    ("error", "tenant", "cost", "priority"),
    [
        (TypeError, True, 1.0, 1),
        (TypeError, 1.5, 1.0, 1),
        (TypeError, None, 1.0, 1),
        (TypeError, "A", "1", 1),
        (TypeError, "A", 1.0, 1.5),
        (ValueError, "A", -0.5, 1),
        (ValueError, "A", float("nan"), 1),
        (ValueError, "A", float("inf"), 1),
        (ValueError, "A", 1.0, -1),
        (ValueError, "A", 1.0, 8),
        (ValueError, "A", 1.0, 1 << 70),
    ],
)
def test_wrong_argument_changes_nothing(new_queue, retried, error, tenant, cost, priority):
    queue = new_queue(capacity=9)
    names = push_all(queue, "AAB")
    before = counts(queue)
    with pytest.raises(error):
        queue.push(tenant, cost, priority=priority, retried=retried)
    assert before == counts(queue)
    assert pop_all(queue, names) == "ABA"


@both
@pytest.mark.parametrize(
    "options",
    [
        {"capacity": -1},
        {"fairness": "fifo"},
        {"min_share": -0.1},
        {"min_share": 1.0},
        {"min_share": float("nan")},
        {"bypass": -1},
        {"bypass": 256},
    ],
    ids=str,
)
def test_invalid_options_are_refused(new_queue, options):
    with pytest.raises(ValueError):
        new_queue(**{"capacity": 1} | options)
