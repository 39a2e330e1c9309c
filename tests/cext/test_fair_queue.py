"""The contract of the queue, on the kernel and its oracle; then what only the kernel has."""

import copy
import inspect
import pickle
import sys
import tracemalloc
from collections import Counter
from random import Random

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
def test_returning_tenant_joins_at_the_back_of_the_ring(new_queue):
    queue = new_queue(capacity=9)
    names = push_all(queue, "ABBCC")
    assert names[queue.pop()] == "A"
    names |= push_all(queue, "A")
    assert pop_all(queue, names) == "BCABC"


@both
def test_tenant_served_before_the_queue_emptied_goes_after_a_new_one(new_queue):
    queue = new_queue(capacity=10)
    names = push_all(queue, "A")
    served = names[queue.pop()]
    names |= push_all(queue, "AAAABB")
    assert served + pop_all(queue, names) == "ABABAAA"


@both
def test_discarding_and_pushing_again_gains_no_turn(new_queue):
    queue = new_queue(capacity=10)
    names = push_all(queue, "AAB")
    queue.pop()
    queue.discard(list(names)[1])
    names |= push_all(queue, "A")
    assert pop_all(queue, names) == "BA"


@pytest.mark.parametrize("fairness", ["roundRobin", "tokens"])
def test_number_of_remembered_idle_tenants_is_bounded(fairness):
    tracemalloc.start()
    queue = FairQueue(capacity=10, fairness=fairness)
    queue.push("waiting", priority=7)
    before, _ = tracemalloc.get_traced_memory()
    for tenant in range(20_000):
        queue.push(f"tenant {tenant}")
        queue.pop()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 2_500_000  # 2048 tenants, and as many free rows again


@both
def test_discarding_an_entry_does_not_cost_the_tenant_its_turn(new_queue):
    queue = new_queue(capacity=9)
    names = push_all(queue, "AABB")
    assert queue.discard(next(iter(names)))
    assert pop_all(queue, names) == "ABB"


@both
def test_lower_class_waits_until_the_higher_ones_are_empty(new_queue):
    queue = new_queue(capacity=9)
    names = push_all(queue, "zZ", priority=7) | push_all(queue, "nn") | push_all(queue, "AAB", priority=0)
    assert pop_all(queue, names) == "ABAnnzZ"


@both
def test_tenant_has_one_line_in_each_class(new_queue):
    queue = new_queue(capacity=9)
    low = queue.push("A", priority=2)
    high = queue.push("A", priority=0)
    assert (queue.waiting("A"), queue.tenants) == (2, 1)
    assert [high, low] == [queue.pop(), queue.pop()]


@both
@given(arrival=st.text("ABCDE", min_size=1, max_size=60))
def test_tenants_with_a_backlog_are_never_two_turns_apart(new_queue, arrival):
    queue = new_queue(capacity=len(arrival))
    names = push_all(queue, arrival)
    served = Counter(dict.fromkeys(arrival, 0))
    while len(queue):
        served[names[queue.pop()]] += 1
        backlogged = [served[tenant] for tenant in served if queue.waiting(tenant)]
        assert not backlogged or max(backlogged) - min(backlogged) <= 1


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
def test_queue_of_capacity_zero_accepts_only_retries(new_queue):
    queue = new_queue(capacity=0)
    with pytest.raises(QueueFullError):
        queue.push("A")
    retry = queue.push("A", retried=True)
    assert retry == queue.pop()


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
    number = queue.push(1, 12.5, priority=3, size=7, kind=2)
    text = queue.push("1", retried=True)
    assert [queue.entry(handle) for handle in (number, text)] == [
        (1, 12.5, 3, 7, 2, False),
        ("1", 1.0, 1, 0, 0, True),
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
def test_clearing_discards_everything_and_leaves_a_queue_that_works(new_queue):
    queue = new_queue(capacity=100)
    for priority in range(8):
        push_all(queue, "ABCA", priority=priority)
    queue.clear()
    assert (len(queue), queue.tenants, queue.discarded) == (0, 0, 32)
    assert pop_all(queue, push_all(queue, "AAB")) == "ABA"


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


# What only the kernel has --------------------------------------------------------------------------


def test_cost_too_large_for_a_float_is_refused():
    with pytest.raises(OverflowError):
        FairQueue(capacity=1).push("A", 10**400)


def test_str_subclass_as_tenant_raises():
    class Chameleon(str):
        __slots__ = ()

    with pytest.raises(TypeError, match="Chameleon"):
        FairQueue(capacity=1).push(Chameleon("A"))


def test_cost_whose_conversion_pushes_for_the_same_tenant_is_pushed_after_it():
    queue = FairQueue(capacity=2)
    pushed_first = []

    class PushingCost:
        def __float__(self):
            pushed_first.append(queue.push("A"))
            return 2.0

    last = queue.push("A", PushingCost())
    assert (queue.waiting("A"), queue.tenants) == (2, 1)
    assert [*pushed_first, last] == [queue.pop(), queue.pop()]


def test_queue_keeps_the_name_of_a_waiting_tenant_alive():
    queue = FairQueue(capacity=2)
    queue.push(repr(2**100))  # a string without other references
    handle = queue.push(repr(2**100))
    queue.pop()
    assert repr(2**100) == queue.entry(handle).tenant


def test_tenant_names_are_released_when_their_entries_leave():
    name = repr(2**100)
    references = sys.getrefcount(name)
    queue = FairQueue(capacity=4)
    handles = [queue.push(name, priority=priority) for priority in (0, 1, 2, 3)]
    assert references < sys.getrefcount(name)
    queue.pop()
    queue.discard(handles[2])
    queue.clear()
    assert references == sys.getrefcount(name)


def test_memory_grows_with_waiting_entries_only():
    queue = FairQueue(capacity=40)
    keep = [queue.push(number) for number in range(39)]

    def churn():
        for number in range(100_000):
            queue.discard(queue.push(number, priority=number % 8))

    tracemalloc.start()
    try:
        churn()
        traced = bytes_allocated_here()
        churn()
        grown = bytes_allocated_here() - traced
    finally:
        tracemalloc.stop()
    assert grown < 10_000
    assert all(handle in queue for handle in keep)


def bytes_allocated_here():
    """Return the bytes allocated by this file. Other threads may allocate meanwhile."""
    snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, __file__)])
    return sum(entry.size for entry in snapshot.statistics("filename"))


def test_growing_arrays_keep_their_contents():
    queue = FairQueue(capacity=5000)
    names = {queue.push(number % 1000, number): number for number in range(5000)}
    assert all(names[handle] == queue.entry(handle).cost for handle in names)
    assert list(range(5000)) == [names[queue.pop()] for _ in range(5000)]


def test_push_without_memory_changes_nothing():
    testcapi = pytest.importorskip("_testcapi", reason="only CPython's own test module can take memory away")
    queue = FairQueue(capacity=1000)
    names = {queue.push(f"{number}"): number for number in range(32)}  # the next push must grow both arrays
    before = counts(queue)
    failures = 0
    for allocations in range(50):
        handle = None
        testcapi.set_nomemory(allocations, allocations + 1)
        try:
            handle = queue.push("one more")
        except MemoryError:
            failures += 1
        finally:
            testcapi.remove_mem_hooks()
        if handle is not None:
            break
        assert before == counts(queue)
        assert queue.waiting("one more") == 0
    assert failures >= 2
    names[handle] = 32
    assert list(range(33)) == [names[queue.pop()] for _ in range(33)]


def test_queue_cannot_be_copied_or_pickled():
    queue = FairQueue(capacity=1)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot pickle"):
            copied(queue)


@pytest.mark.parametrize("fairness", ["roundRobin", "tokens"])
def test_any_number_of_discards_in_a_row_leaves_the_others_in_their_order(fairness):
    queue, oracle = (new(capacity=1000, fairness=fairness) for new in (FairQueue, FairQueueOracle))
    oracle_handles = {queue.push(tenant): oracle.push(tenant) for tenant in "AABBBCAD" * 50}
    chosen = Random(0).sample(list(oracle_handles), k=300)
    for count, handle in enumerate(chosen, 1):
        assert queue.discard(handle)
        assert oracle.discard(oracle_handles[handle])
        assert handle not in queue
        assert len(oracle) == len(queue) == len(oracle_handles) - count
    assert queue.discarded == 300
    assert [oracle.pop() for _ in range(100)] == [oracle_handles[queue.pop()] for _ in range(100)]


def test_waiting_entries_keep_their_handles_while_other_rows_are_reused():
    queue = FairQueue(capacity=200)
    waiting_handles = [queue.push(f"{number}") for number in range(150)]
    stale, churned = [], queue.push("busy")
    for _ in range(1000):
        assert queue.discard(churned)
        stale.append(churned)
        churned = queue.push("busy")
    assert all(handle in queue for handle in [*waiting_handles, churned])
    assert not any(handle in queue for handle in stale)
    assert all(queue.discard(handle) for handle in waiting_handles[::2])

    reused = [queue.push("late") for _ in waiting_handles[::2]]  # in rows beside those that waited longest
    assert not any(queue.discard(handle) for handle in waiting_handles[::2])
    assert all(handle in queue for handle in [*waiting_handles[1::2], *reused])
    assert (
        len({*stale, *waiting_handles, *reused, churned})
        == len(stale) + len(waiting_handles) + len(reused) + 1
    )
    assert waiting_handles[1::2] == [
        handle for handle in queue.pop_many(200, 0) if handle in set(waiting_handles)
    ]


def test_signatures_can_be_read_at_run_time():
    parameters = inspect.signature(FairQueue.push).parameters
    assert list(parameters) == ["self", "tenant", "cost", "priority", "size", "kind", "retried"]
