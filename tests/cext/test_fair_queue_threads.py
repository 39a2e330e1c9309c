"""Several threads on one queue, a `fits` that changes the queue, and faults of an earlier queue."""

import random
import sys
import threading
from contextlib import suppress

import pytest

from cext.fair_queue_oracle import pushed as pushed_into
from fairlead._cext.fairqueue import FairQueue, QueueFullError

fairly = pytest.mark.parametrize("fairness", ["roundRobin", "tokens"])


@pytest.fixture(autouse=True)
def threads_take_turns_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(*works):
    """Run each in its own thread, all at once, and raise what any of them raised."""
    failures = []
    gate = threading.Barrier(len(works))

    def run(work):
        gate.wait()
        try:
            work()
        except BaseException as error:  # noqa: BLE001  (the test raises it)
            failures.append(error)

    threads = [threading.Thread(target=run, args=[work]) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@fairly
def test_each_entry_that_four_threads_push_leaves_once(fairness):  # noqa: C901  (one branch a method)
    queue = FairQueue(capacity=300, fairness=fairness, min_share=0.1)
    pushed, popped, discarded = [], [], []

    def work(seed):
        chance = random.Random(seed)
        own = []
        for number in range(12_500):
            action = chance.random()
            if action < 0.5:
                with suppress(QueueFullError):
                    own.append(queue.push(chance.choice("ABCDEFG"), number % 5, priority=number % 3))
                    pushed.append(own[-1])
            elif action < 0.6:
                own.append(queue.push("R", priority=number % 3, retried=True))
                pushed.append(own[-1])
            elif action < 0.8:
                with suppress(IndexError):
                    popped.append(queue.pop())
            elif action < 0.85:
                with suppress(IndexError):
                    popped.append(queue.pop(lambda handle: (True, None, False)[hash(handle) % 3]))
            elif action < 0.9:
                popped.extend(queue.pop_many(3, 100))
            elif action < 0.97 and own:
                handle = chance.choice(own)
                if queue.discard(handle):
                    discarded.append(handle)
            elif (handle := queue.displace("Z", priority=0)) is not None:
                discarded.append(handle)

    together(*[lambda seed=seed: work(seed) for seed in range(4)])
    popped.extend(queue.pop_many(10**6, 10**6))
    assert len(queue) == 0
    assert sorted(pushed) == sorted(popped + discarded)
    assert (len(pushed), len(popped)) == (pushed_into(queue), queue.popped)


@fairly
def test_entries_are_conserved_while_another_thread_clears(fairness):
    queue = FairQueue(capacity=1000, fairness=fairness)
    popped = []
    pushed = 0

    def push():
        nonlocal pushed
        for number in range(10_000):
            with suppress(QueueFullError):
                queue.push(number % 50, number % 3, priority=number % 8)
                pushed += 1

    def pop():
        for _ in range(8_000):
            with suppress(IndexError):
                popped.append(queue.pop(lambda handle: handle % 7 != 0 or None))

    def clear():
        for _ in range(300):
            queue.clear()

    together(push, pop, pop, clear)
    assert (pushed, len(popped)) == (pushed_into(queue), queue.popped)
    assert len(set(popped)) == len(popped)
    assert queue.displaced == 0


def test_of_a_pop_and_a_cancel_of_the_same_entry_one_wins():
    queue = FairQueue(capacity=10_000)
    handles = [queue.push("A") for _ in range(10_000)]
    popped, discarded = [], []

    def pop():
        with suppress(IndexError):
            while True:
                popped.append(queue.pop())

    def discard():
        discarded.extend(handle for handle in handles if queue.discard(handle))

    together(pop, pop, discard)
    assert sorted(handles) == sorted(popped + discarded)


def test_full_queue_can_be_deleted_during_a_call_of_fits():
    name = repr(2**100)
    references = sys.getrefcount(name)
    queue = FairQueue(capacity=100)
    for _ in range(100):
        queue.push(name)

    def drop_it(_handle):
        nonlocal queue
        queue = None
        return True

    queue.pop(drop_it)
    assert references == sys.getrefcount(name)


# A `fits` that changes the queue -------------------------------------------------------------------


@fairly
def test_entry_discarded_by_fits_is_not_returned(fairness):
    queue = FairQueue(capacity=9, fairness=fairness)
    first, second = queue.push("A"), queue.push("A")
    assert second == queue.pop(lambda handle: queue.discard(first) or handle in queue)
    assert len(queue) == 0


@fairly
@pytest.mark.parametrize("change", ["clear", "pop", "push", "push retried", "displace", "discard", "charge"])
def test_fits_may_change_the_queue(fairness, change):
    queue = FairQueue(capacity=200, fairness=fairness)
    pushed = [queue.push(f"{number % 9}", priority=number % 8) for number in range(200)]
    chance = random.Random(change)
    others = []

    def fits(_handle):
        with suppress(QueueFullError, IndexError):
            if change.startswith("push"):
                others.append(queue.push("newcomer", retried=change == "push retried"))
            elif change in ("clear", "pop"):
                getattr(queue, change)()
            elif change == "charge":
                queue.charge(f"{chance.randrange(9)}", 1.0)
            else:
                getattr(queue, change)(*[chance.choice(pushed)] if change == "discard" else ["newcomer"])
        return chance.choice([True, False, None, None, None])

    for _ in range(200):
        with suppress(IndexError):
            assert queue.pop(fits) not in queue
    assert len(pushed) + len(others) == pushed_into(queue)
    assert len(queue) == len(queue.pop_many(10**6, 10**6))


def test_pop_ends_although_fits_always_changes_the_queue():
    queue = FairQueue(capacity=0)
    queue.push("A", retried=True)
    offered = []

    def fits(handle):
        offered.append(handle)
        queue.discard(queue.push("A", retried=True))

    with pytest.raises(IndexError):
        queue.pop(fits)
    assert len(offered) == 1


# Faults of an earlier queue ------------------------------------------------------------------------


@fairly
def test_entries_of_equal_priority_leave_in_order_of_arrival(fairness):
    """The earlier queue never compared sequence numbers, and a heap does not keep equal items in order."""
    queue = FairQueue(capacity=1000, fairness=fairness)
    handles = [queue.push("A") for _ in range(1000)]
    assert handles == [queue.pop() for _ in handles]


@fairly
def test_discarded_entries_are_never_popped(fairness):
    """The earlier queue removed an entry from its map and left it in the heap."""
    queue = FairQueue(capacity=100, fairness=fairness)
    handles = [queue.push("A") for _ in range(100)]
    assert all(queue.discard(handle) for handle in handles[::2])
    assert handles[1::2] == [queue.pop() for _ in range(len(queue))]


def test_length_is_exact_after_any_way_of_leaving():
    """The earlier queue counted with a semaphore, which neither removals nor batches decremented."""
    queue = FairQueue(capacity=100)
    handles = [queue.push("A") for _ in range(100)]
    lengths = []
    for leave in (queue.pop, lambda: queue.discard(handles[50]), lambda: queue.pop_many(10, 10), queue.clear):
        leave()
        lengths.append(len(queue))
    assert lengths == [99, 98, 88, 0]
    with pytest.raises(IndexError):
        queue.pop()


def test_batch_contains_no_discarded_entries():
    """The earlier queue did not check whether the entries of a batch were canceled."""
    queue = FairQueue(capacity=10)
    handles = [queue.push("A", size=1) for _ in range(10)]
    for handle in handles[:5]:
        queue.discard(handle)
    assert handles[5:] == queue.pop_many(10, 5)


def test_entry_that_is_too_large_does_not_end_a_batch():
    """The earlier queue ended this and every later batch at the first entry that did not fit."""
    queue = FairQueue(capacity=10)
    queue.push("A", size=100)
    small = [queue.push("A", size=1) for _ in range(8)]
    assert small == queue.pop_many(10, 8)
