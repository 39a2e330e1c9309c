"""The tests that document 003 lists, and one for each of its faults, on `FairQueue`.

The list: basic operations, cancellation, batch selection, threads, edge cases. Races between threads on
the queue are in `cext/test_fair_queue_threads.py`.
"""

import json
import threading

import pytest

from fairlead._cext.fairqueue import FairQueue
from fairlead.base.config import demonstration_model
from fairlead.base.messages import WorkerSpec
from fairlead.engine.loading import load_runner


@pytest.fixture
def queue() -> FairQueue:
    return FairQueue(capacity=100)


# Basic operations ----------------------------------------------------------------------------------


def test_pushed_entry_is_popped(queue):
    handle = queue.push("A")
    assert (len(queue), handle in queue) == (1, True)
    assert handle == queue.pop()
    assert (len(queue), handle in queue) == (0, False)


def test_entries_leave_by_priority(queue):
    handles = {queue.push("A", priority=priority): priority for priority in (2, 0, 1)}
    assert [handles[queue.pop()] for _ in range(3)] == [0, 1, 2]


def test_count_and_emptiness_describe_the_waiting_entries(queue):
    assert len(queue) == 0
    handles = [queue.push("A") for _ in range(3)]
    queue.discard(handles[1])
    assert len(queue) == 2


# Cancellation --------------------------------------------------------------------------------------


def test_cancelled_entry_never_comes_out(queue):
    first, cancelled, last = (queue.push("A") for _ in range(3))
    assert queue.discard(cancelled)
    assert [first, last] == [queue.pop(), queue.pop()]


def test_cancelling_lets_go_of_everything(queue):
    queue.discard(queue.push("A"))
    assert (len(queue), queue.waiting("A")) == (0, 0)
    with pytest.raises(IndexError):
        queue.pop()


# Batch selection -----------------------------------------------------------------------------------


def test_batch_has_at_most_max_count_entries(queue):
    handles = [queue.push("A", size=1) for _ in range(5)]
    assert handles[:3] == queue.pop_many(3, 100)
    assert len(queue) == 2


def test_batch_fits_its_memory(queue):
    handles = [queue.push("A", size=40) for _ in range(4)]
    assert handles[:2] == queue.pop_many(10, 100)


def test_batch_is_in_the_order_of_priority(queue):
    low, high = queue.push("A", priority=2, size=1), queue.push("A", priority=0, size=1)
    assert [high, low] == queue.pop_many(2, 10)


# Edge cases ----------------------------------------------------------------------------------------


def test_empty_queue_returns_at_once(queue):
    with pytest.raises(IndexError):
        queue.pop()
    assert queue.pop_many(1, 1) == []


def test_removing_an_unknown_entry_returns_false(queue):
    assert not queue.discard(12345)


def test_cleared_queue_is_empty(queue):
    for tenant in "ABC":
        queue.push(tenant)
    queue.clear()
    assert len(queue) == 0


def test_threads_that_push_and_pop_lose_nothing(queue):
    popped: list[int] = []
    pushed: list[int] = []

    def push(tenant: int) -> None:
        pushed.extend(queue.push(tenant, retried=True) for _ in range(500))

    def pop() -> None:
        while len(popped) < 2000:
            try:
                popped.append(queue.pop())
            except IndexError:
                if not any(thread.is_alive() for thread in pushers) and not len(queue):
                    return

    pushers = [threading.Thread(target=push, args=(number,)) for number in range(4)]
    poppers = [threading.Thread(target=pop) for _ in range(2)]
    for thread in (*pushers, *poppers):
        thread.start()
    for thread in (*pushers, *poppers):
        thread.join(60)
    assert sorted(pushed) == sorted(popped)


# Faults of document 003 ----------------------------------------------------------------------------


def test_fault_entries_of_equal_priority_leave_in_order_of_arrival(queue):
    handles = [queue.push("A", priority=1) for _ in range(20)]
    assert handles == [queue.pop() for _ in handles]


def test_fault_a_removed_entry_does_not_come_out_of_a_batch_either(queue):
    first, removed = queue.push("A", size=1), queue.push("A", size=1)
    queue.discard(removed)
    assert [first] == queue.pop_many(10, 100)


def test_fault_the_count_does_not_drift_when_entries_are_removed(queue):
    for _ in range(1000):
        queue.discard(queue.push("A"))
    queue.push("A")
    assert len(queue) == 1
    queue.pop()
    with pytest.raises(IndexError):
        queue.pop()


def test_fault_an_entry_too_large_for_the_budget_does_not_block_those_behind_it_at_once(queue):
    large, small = queue.push("A", size=1000), queue.push("B", size=1)
    assert [small] == queue.pop_many(10, 100)
    assert large in queue


def test_fault_the_memory_of_a_token_counts_layers_heads_and_their_size():
    config = json.loads((demonstration_model() / "config.json").read_text())
    layers, heads = config["num_hidden_layers"], config["num_key_value_heads"]
    model = load_runner(WorkerSpec(path=str(demonstration_model()), dtype="float32"), lambda *_: None)
    per_token = 2 * layers * heads * config["head_dim"] * 4
    assert per_token * sum(model.blocks_total) * model.block_size == model.kv_cache_bytes
