"""Threads of low priority that work for several owners in turn."""

import contextlib
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

from fairlead.language.structured.filling import large_stack

NICENESS = 10  # of the threads: steps come first
Result = TypeVar("Result")
_Task = tuple[Future[Any], Callable[[], Any]]


class TurnPool:
    """`threads` threads. Each owner has at most one of them at a time, so that none waits for another.

    A future may be cancelled until its function begins.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._name = name
        self._started = 0
        self._lines: OrderedDict[Hashable, deque[_Task]] = OrderedDict()
        self._busy: set[Hashable] = set()
        self._is_closed = False
        self._changed = threading.Condition()

    def submit(self, owner: Hashable, function: Callable[[], Result]) -> Future[Result]:
        """Call a function in turn with those of other owners, after the earlier ones of this owner."""
        future: Future[Result] = Future()
        with self._changed:
            self._lines.setdefault(owner, deque()).append((future, function))
            self._changed.notify()
        if self._started < self._threads:
            self._started += 1
            with large_stack():
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def close(self) -> None:
        """End each thread after its current call, and cancel the calls that wait."""
        with self._changed:
            self._is_closed = True
            for line in self._lines.values():
                for future, _ in line:
                    future.cancel()
            self._changed.notify_all()

    def _work(self) -> None:
        _step_back()
        while (task := self._take()) is not None:
            owner, (future, function) = task
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001  raised where the result is read
                future.set_exception(error)
            del task, future, function
            with self._changed:
                self._busy.discard(owner)
                if owner in self._lines:
                    self._lines.move_to_end(owner)
                self._changed.notify()

    def _take(self) -> tuple[Hashable, _Task] | None:
        """Return the next thing to do, after waiting for one; None when the pool is closed."""
        with self._changed:
            while not self._is_closed:
                waiting = [owner for owner in self._lines if owner not in self._busy]
                if not waiting:
                    self._changed.wait()
                    continue
                owner = waiting[0]
                line = self._lines[owner]
                task = line.popleft()
                if not line:
                    del self._lines[owner]
                if task[0].set_running_or_notify_cancel():
                    self._busy.add(owner)
                    return owner, task
        return None


def _step_back() -> None:
    """Give this thread a low priority, on systems where threads have one."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
