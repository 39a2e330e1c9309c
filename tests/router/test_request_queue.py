"""`RequestQueue`: basic operations, cancellation, batches, threads, waiting and closing."""

import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
import trio
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from trio.testing import wait_all_tasks_blocked

from fairlead.router.queue import HIGH, LOW, NORMAL, QueueClosedError, QueueFullError, RequestQueue


@pytest.fixture
def queue() -> RequestQueue[str]:
    return RequestQueue(capacity=100)


# Basic operations ----------------------------------------------------------------------------------


def test_enqueue_and_dequeue_single_request(queue):
    queue.enqueue(1, "request")
    assert queue.dequeue(timeout_s=0) == "request"


def test_enqueue_multiple_requests_verify_priority_ordering(queue):
    for priority in (LOW, HIGH, NORMAL):
        queue.enqueue(priority, f"class {priority}", priority=priority)
    assert [queue.try_dequeue() for _ in range(3)] == ["class 0", "class 1", "class 2"]


def test_equal_priorities_leave_first_in_first_out(queue):
    for number in range(5):
        queue.enqueue(number, str(number))
    assert [queue.try_dequeue() for _ in range(5)] == ["0", "1", "2", "3", "4"]


def test_tenants_take_turns(queue):
    for number, tenant in enumerate("AAAAABB"):
        queue.enqueue(number, tenant, tenant=tenant)
    assert "".join(queue.get_requests(7, 0)) == "ABABAAA"


def test_verify_count_and_is_empty_properties(queue):
    assert (len(queue), queue.is_empty) == (0, True)
    queue.enqueue(1, "request")
    assert (len(queue), queue.is_empty) == (1, False)
    queue.dequeue()
    assert (len(queue), queue.is_empty) == (0, True)


def test_full_queue_refuses_and_changes_nothing():
    queue = RequestQueue[str](capacity=1)
    queue.enqueue(1, "first")
    with pytest.raises(QueueFullError):
        queue.enqueue(2, "second")
    assert (len(queue), 2 in queue) == (1, False)
    assert queue.try_dequeue() == "first"


def test_request_that_waits_already_is_refused(queue):
    queue.enqueue(1, "first")
    with pytest.raises(ValueError, match="1 waits already"):
        queue.enqueue(1, "second")
    assert queue.try_dequeue() == "first"
    queue.enqueue(1, "second")  # its id is free again
    assert queue.try_dequeue() == "second"


@pytest.mark.parametrize("wrong", [{"priority": 8}, {"cost": -1.0}, {"cost": float("nan")}, {"size": -1}])
def test_impossible_values_are_refused_and_change_nothing(queue, wrong):
    with pytest.raises(ValueError, match="must be"):
        queue.enqueue(1, "request", **wrong)
    assert (len(queue), 1 in queue) == (0, False)


# Cancellation --------------------------------------------------------------------------------------


def test_cancel_request_before_dequeue_verify_skipped(queue):
    for number in range(3):
        queue.enqueue(number, str(number))
    assert queue.remove(1)
    assert [queue.try_dequeue() for _ in range(3)] == ["0", "2", None]


def test_cancel_request_after_enqueue_verify_proper_cleanup(queue):
    queue.enqueue(1, "request")
    assert queue.remove(1)
    assert (len(queue), queue.is_empty, 1 in queue) == (0, True, False)
    assert queue.statistics().tenants == 0
    assert not queue.remove(1)


# Batch selection -----------------------------------------------------------------------------------


def test_get_requests_respects_max_count(queue):
    for number in range(5):
        queue.enqueue(number, str(number))
    assert queue.get_requests(3, 1000) == ["0", "1", "2"]
    assert len(queue) == 2


def test_get_requests_respects_memory_budget(queue):
    for number in range(5):
        queue.enqueue(number, str(number), size=10)
    assert queue.get_requests(5, 35) == ["0", "1", "2"]


def test_priority_order_maintained_in_selection(queue):
    for number, priority in enumerate((LOW, HIGH, NORMAL, HIGH)):
        queue.enqueue(number, str(number), priority=priority)
    assert queue.get_requests(4, 0) == ["1", "3", "2", "0"]


def test_large_request_is_passed_a_bounded_number_of_times():
    queue = RequestQueue[str](bypass=2)
    queue.enqueue("large", "large", size=100)
    for number in range(3):
        queue.enqueue(number, str(number), size=1)
    assert queue.get_requests(4, 10) == ["0", "1"]
    assert queue.get_requests(4, 10) == []
    assert queue.get_requests(4, 101) == ["large", "2"]


# Thread safety -------------------------------------------------------------------------------------


def test_concurrent_enqueue_operations():
    queue = RequestQueue[int](capacity=4000)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: queue.enqueue(number, number), range(4000)))
    assert sorted(queue.get_requests(4000, 0)) == list(range(4000))


def test_concurrent_dequeue_operations():
    queue = RequestQueue[int](capacity=4000)
    for number in range(4000):
        queue.enqueue(number, number)
    with ThreadPoolExecutor(8) as threads:
        taken = list(threads.map(lambda _: queue.dequeue(timeout_s=30), range(4000)))
    assert sorted(taken) == list(range(4000))


def test_enqueue_dequeue_race_conditions():
    """Producers, waiting consumers, and removals: each item is dequeued once, or was removed."""
    queue = RequestQueue[int](capacity=10_000)
    taken: Counter[int] = Counter()
    removed: Counter[int] = Counter()

    def produce(first: int) -> None:
        random = Random(first)
        for number in range(first, first + 1000):
            queue.enqueue(number, number, tenant=str(first), priority=random.randrange(3))
            if random.random() < 0.2 and queue.remove(number):
                removed[number] += 1

    def consume() -> list[int]:
        mine = []
        while True:
            try:
                mine.append(queue.dequeue())
            except QueueClosedError:
                return mine

    with ThreadPoolExecutor(8) as threads:
        consumers = [threads.submit(consume) for _ in range(4)]
        for producer in [threads.submit(produce, first) for first in range(0, 4000, 1000)]:
            producer.result()
        while not queue.is_empty:
            threading.Event().wait(0.001)
        queue.close()
        for consumer in consumers:
            taken.update(consumer.result())
    assert taken + removed == Counter(range(4000))


# Edge cases ----------------------------------------------------------------------------------------


def test_dequeue_from_empty_queue_with_timeout(queue):
    with pytest.raises(TimeoutError, match=r"within 0.01 s"):
        queue.dequeue(timeout_s=0.01)
    queue.enqueue(1, "request")  # no waiter is woken for it
    assert queue.dequeue(timeout_s=0) == "request"


async def test_dequeue_with_cancelled_cancellation_token(queue):
    queue.enqueue(1, "request")
    with trio.CancelScope() as scope:
        scope.cancel()
        await queue.receive()
    assert scope.cancelled_caught
    assert queue.try_dequeue() == "request"


def test_remove_non_existent_request(queue):
    assert queue.remove("unknown") is False


def test_clear_and_verify_queue_is_empty(queue):
    for number in range(3):
        queue.enqueue(number, str(number))
    queue.clear()
    assert (len(queue), queue.is_empty, 0 in queue) == (0, True, False)
    assert queue.try_dequeue() is None
    queue.enqueue(0, "again")
    assert queue.try_dequeue() == "again"


# Waiting in Trio, and closing ----------------------------------------------------------------------


async def test_task_that_waits_is_given_the_next_item(queue):
    async with trio.open_nursery() as nursery:
        received: list[str] = []

        async def receive() -> None:
            received.append(await queue.receive())

        nursery.start_soon(receive)
        nursery.start_soon(receive)
        await wait_all_tasks_blocked()
        await trio.to_thread.run_sync(queue.enqueue, 1, "from a thread")
        queue.enqueue(2, "from the loop")
    assert sorted(received) == ["from a thread", "from the loop"]


async def test_item_for_a_cancelled_task_wakes_the_next_waiter(queue):
    received: list[str] = []

    async def receive(scope: trio.CancelScope) -> None:
        with scope:
            received.append(await queue.receive())

    leaving = trio.CancelScope()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive, leaving)
        await wait_all_tasks_blocked()
        nursery.start_soon(receive, trio.CancelScope())
        await wait_all_tasks_blocked()
        queue.enqueue(1, "request")  # wakes the first
        leaving.cancel()
    assert received == ["request"]
    assert queue.is_empty


async def test_closing_ends_every_wait(queue):
    ended: list[str] = []

    async def receive() -> None:
        with pytest.raises(QueueClosedError):
            await queue.receive()
        ended.append("task")

    def dequeue() -> None:
        with pytest.raises(QueueClosedError):
            queue.dequeue()
        ended.append("thread")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        nursery.start_soon(trio.to_thread.run_sync, dequeue)
        await wait_all_tasks_blocked(0.01)
        queue.close()
    assert sorted(ended) == ["task", "thread"]


def test_closed_queue_refuses_everything_that_moves_items(queue):
    queue.enqueue(1, "request")
    queue.close()
    queue.close()
    assert queue.is_empty
    for move in (
        lambda: queue.enqueue(2, "request"),
        queue.try_dequeue,
        queue.dequeue,
        lambda: queue.get_requests(1, 1),
    ):
        with pytest.raises(QueueClosedError):
            move()


def test_task_of_an_ended_event_loop_does_not_consume_a_wake_up(queue):
    """An event loop that ended may leave a waiter behind; the next waiter is woken instead."""

    async def wait_forever() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(queue.receive)
            await wait_all_tasks_blocked()
            abandoned.extend(queue._waiting)
            nursery.cancel_scope.cancel()

    abandoned: list[object] = []
    trio.run(wait_forever)
    assert not queue._waiting
    queue._waiting.extend(abandoned)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(queue.dequeue, 30)
        while len(queue._waiting) < 2:
            threading.Event().wait(0.001)
        queue.enqueue(1, "request")
        assert waiting.result() == "request"


# Documentation --------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "queue.md").read_text(encoding="utf-8")


def test_example_of_the_documentation_runs():
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(example, {})  # the example has assertions


def test_every_public_method_is_documented():
    public = [name for name in vars(RequestQueue) if not name.startswith("_")]
    assert [name for name in public if not re.search(rf"`[^`]*\b{name}\b[^`]*`", PAGE)] == []


# Compared with a model of the rules ----------------------------------------------------------------


class QueueMachine(RuleBasedStateMachine):
    """Compares a queue of one tenant and three classes with one list for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = RequestQueue[int](capacity=5)
        self.lines: list[list[tuple[int, int]]] = [[], [], []]
        self.next_id = 0

    @rule(priority=st.sampled_from((HIGH, NORMAL, LOW)), size=st.integers(0, 3))
    def enqueue(self, priority, size):
        request_id, self.next_id = self.next_id, self.next_id + 1
        if sum(map(len, self.lines)) == 5:
            with pytest.raises(QueueFullError):
                self.queue.enqueue(request_id, request_id, priority=priority, size=size)
        else:
            self.queue.enqueue(request_id, request_id, priority=priority, size=size)
            self.lines[priority].append((request_id, size))

    @rule()
    def try_dequeue(self):
        line = next(filter(None, self.lines), None)
        assert self.queue.try_dequeue() == (line.pop(0)[0] if line else None)

    @rule(count=st.integers(0, 6))
    def get_requests_with_room_for_all(self, count):
        expected = []
        while len(expected) < count and any(self.lines):
            expected.append(next(filter(None, self.lines)).pop(0)[0])
        assert self.queue.get_requests(count, 15) == expected

    @precondition(lambda machine: machine.next_id)
    @rule(data=st.data())
    def remove(self, data):
        request_id = data.draw(st.integers(0, self.next_id - 1))
        line = next((line for line in self.lines if request_id in dict(line)), None)
        assert self.queue.remove(request_id) is (line is not None)
        if line is not None:
            line[:] = [entry for entry in line if entry[0] != request_id]

    @rule()
    def clear(self):
        self.queue.clear()
        self.lines = [[], [], []]

    @invariant()
    def counts_agree(self):
        waiting = [request_id for line in self.lines for request_id, _ in line]
        assert len(self.queue) == len(waiting)
        assert all(request_id in self.queue for request_id in waiting)
        assert [self.queue.position(request_id) for request_id in waiting] == list(range(len(waiting)))


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=30)
