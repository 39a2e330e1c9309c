"""What only the kernel has: memory, references, and handles of rows that are used again."""

import copy
import inspect
import pickle
import sys
import tracemalloc
from random import Random

import pytest

from cext.fair_queue_oracle import FairQueueOracle, counts
from fairlead._cext.fairqueue import FairQueue


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
    options = ["priority", "size", "kind", "count", "retried", "begun", "team_cost"]
    assert list(parameters) == ["self", "tenant", "cost", *options]
