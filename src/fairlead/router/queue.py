"""A fair, bounded, thread-safe queue of requests, for use without the server.

`RequestQueue` is a thin class over the kernel that the server itself schedules with (`FairQueue`). It adds
what a library needs: it stores the items, finds them by id, and lets threads and Trio tasks wait for them.

    queue = RequestQueue(capacity=100)
    queue.enqueue("a1", request, tenant="ana", size=request.kv_bytes)
    request = queue.dequeue(timeout_s=5)            # in a thread
    request = await queue.receive()                 # in a Trio task
    batch = queue.get_requests(8, free_bytes)       # several at once, within a memory budget

Order: classes of `priority` first (0 before 1 …), within a class the tenants take turns, within a tenant
first in, first out. Every method may be called from any thread; only `dequeue` and `receive` block.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, Literal, NamedTuple, TypeVar

import trio

from fairlead._cext.fairqueue import FairQueue, QueueFullError

__all__ = [
    "HIGH",
    "LOW",
    "NORMAL",
    "QueueClosedError",
    "QueueFullError",
    "QueueStatistics",
    "RequestQueue",
]

HIGH, NORMAL, LOW = range(3)

Item = TypeVar("Item")


class QueueStatistics(NamedTuple):
    """What is queued now, and what happened since the beginning.

    Every item that was added is still queued, was removed in its turn, or was discarded.
    """

    length: int
    capacity: int
    tenants: int
    pushed: int
    popped: int
    discarded: int
    refused: int


class QueueClosedError(Exception):
    """The queue was closed: it accepts no items, and those that it held are gone."""


class RequestQueue(Generic[Item]):
    """A queue of at most `capacity` items.

    `fairness`, `min_share` and `bypass` are those of `FairQueue`: what tenants share (turns, or tokens by
    VTC), the fraction of turns that a waiting lower class is guaranteed, and how often `get_requests` may
    skip an item that does not fit the budget before those behind it wait for it.
    """

    def __init__(
        self,
        capacity: int = 100,
        *,
        fairness: Literal["roundRobin", "tokens"] = "roundRobin",
        min_share: float = 0.0,
        bypass: int = 8,
    ) -> None:
        self._line = FairQueue(capacity=capacity, fairness=fairness, min_share=min_share, bypass=bypass)
        self._lock = threading.Lock()
        self._items: dict[int, tuple[Hashable, Item]] = {}  # by the kernel's handle
        self._handles: dict[Hashable, int] = {}
        self._waiting: deque[Callable[[], None]] = deque()  # wakes each thread and task that waits
        self._is_closed = False

    # Adding and removing -----------------------------------------------------------------------------

    def enqueue(
        self,
        request_id: Hashable,
        item: Item,
        *,
        tenant: str = "",
        priority: int = NORMAL,
        cost: float = 1.0,
        size: int = 0,
    ) -> None:
        """Add an item at the end of its tenant's queue.

        `cost` is what its turn charges under token fairness, `size` what it takes of a memory budget, in any
        unit. Raises `QueueFullError`, `QueueClosedError`, and `ValueError` for an id that is queued already,
        a priority outside 0…7, or a negative cost or size.
        """
        with self._lock:
            self._check_open()
            if request_id in self._handles:
                raise ValueError(f"the request {request_id!r} waits already")
            handle = self._line.push(tenant, cost, priority=priority, size=size)
            self._handles[request_id] = handle
            self._items[handle] = (request_id, item)
            self._wake_next()

    def try_dequeue(self) -> Item | None:
        """Remove and return the next item; None if there is none. Raises `QueueClosedError`."""
        with self._lock:
            self._check_open()
            return self._take() if self._items else None

    def dequeue(self, timeout_s: float | None = None) -> Item:
        """Remove and return the next item; wait for one in this thread.

        Raises `TimeoutError` after `timeout_s` seconds, and `QueueClosedError`. Must not be called in a Trio
        task: it would block the event loop.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            woken = threading.Event()
            with self._lock:
                self._check_open()
                if self._items:
                    return self._take()
                self._waiting.append(woken.set)
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            in_time = False
            try:
                in_time = woken.wait(left_s)
            finally:  # also when a signal interrupts the wait
                if not in_time:
                    with self._lock:
                        self._stop_waiting(woken.set)
            if not in_time:
                raise TimeoutError(f"no request arrived within {timeout_s:g} s")

    async def receive(self) -> Item:
        """Remove and return the next item; wait for one in this Trio task.

        Raises `QueueClosedError`. Cancelling loses no item: the next waiting thread or task is woken for it.
        """
        await trio.lowlevel.checkpoint()
        token = trio.lowlevel.current_trio_token()
        while True:
            woken = trio.Event()

            def wake(event: trio.Event = woken) -> None:
                token.run_sync_soon(event.set)

            with self._lock:
                self._check_open()
                if self._items:
                    return self._take()
                self._waiting.append(wake)
            try:
                await woken.wait()
            except trio.Cancelled:
                with self._lock:
                    self._stop_waiting(wake)
                raise

    def get_requests(self, max_count: int, memory_budget: int) -> list[Item]:
        """Remove and return up to `max_count` items in order, of at most `memory_budget` in total size.

        An item that does not fit is skipped, but only `bypass` times. After that, those behind it wait until
        it fits a call's budget. Raises `QueueClosedError`.
        """
        with self._lock:
            self._check_open()
            return [self._forget(handle) for handle in self._line.pop_many(max_count, memory_budget)]

    def remove(self, request_id: Hashable) -> bool:
        """Remove an item from any position, in constant time. Return whether it was queued.

        Call this for a cancelled request: no entry stays behind to be skipped later.
        """
        with self._lock:
            handle = self._handles.get(request_id)
            if handle is None:
                return False
            self._line.discard(handle)
            self._forget(handle)
            return True

    def clear(self) -> None:
        """Remove all items, and forget which tenants were served."""
        with self._lock:
            self._empty()

    def close(self) -> None:
        """Remove all items and end every wait with `QueueClosedError`. Closing twice is harmless."""
        with self._lock:
            self._is_closed = True
            self._empty()
            while self._waiting:
                self._wake_next()

    # Queries -----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._items)

    def __contains__(self, request_id: Hashable) -> bool:
        """Return whether the request is queued."""
        return request_id in self._handles

    @property
    def is_empty(self) -> bool:
        """Whether nothing is queued."""
        return not self._items

    def position(self, request_id: Hashable) -> int:
        """Return how many items are served before this one if none is added or removed. Raises `KeyError`."""
        with self._lock:
            return len(self._line.ahead(self._handles[request_id]))

    def statistics(self) -> QueueStatistics:
        """Return counts: of what is queued now, and of what happened since the beginning."""
        with self._lock:
            line = self._line
            pushed = len(line) + line.popped + line.discarded
            counts = (pushed, line.popped, line.discarded, line.refused)
            return QueueStatistics(len(line), line.capacity, line.tenants, *counts)

    # With the lock held ------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise QueueClosedError("the queue is closed")

    def _take(self) -> Item:
        return self._forget(self._line.pop())

    def _forget(self, handle: int) -> Item:
        """Forget an entry that the kernel has removed; return its item."""
        request_id, item = self._items.pop(handle)
        del self._handles[request_id]
        return item

    def _empty(self) -> None:
        self._line.clear()
        self._items.clear()
        self._handles.clear()

    def _wake_next(self) -> None:
        """Wake the thread or task that has waited longest; it looks for an item itself."""
        while self._waiting:
            wake = self._waiting.popleft()
            try:
                wake()
            except trio.RunFinishedError:  # its event loop has ended
                continue
            return

    def _stop_waiting(self, wake: Callable[[], None]) -> None:
        """End a wait. If it was woken meanwhile, the next waiting thread or task gets the item."""
        if wake in self._waiting:
            self._waiting.remove(wake)
        elif self._items:
            self._wake_next()
