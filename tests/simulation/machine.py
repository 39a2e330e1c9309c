"""The simulated machine: descriptors, events in virtual time, injected faults, and a trace of everything.

Each system call of the server goes through `Machine.call`, where a fault may be injected. This module does
not depend on sockets or processes.
"""

import errno
import heapq
import os
from collections import Counter, deque
from collections.abc import Callable
from hashlib import blake2b
from itertools import count
from random import Random
from typing import Protocol

import outcome
import trio

# Above the descriptors of the real process.
FIRST_DESCRIPTOR = 1_000_000
DEFAULT_LIMIT = 1024
TRACE_LENGTH = 100_000


class Strike(Protocol):
    """An injected fault: returns what a call of this kind raises now, or None."""

    def __call__(self, call: str) -> BaseException | None: ...


class Pollable:
    """Something that a task can wait for. As in Trio, at most one task waits to read, and one to write.

    `refs` counts the descriptors, of any process, that refer to it.
    """

    refs = 1

    def __init__(self) -> None:
        self._waiting: dict[str, trio.lowlevel.Task] = {}

    def is_ready(self, what: str) -> bool:
        """Return whether waiting for `what` ("read" or "write") would return at once."""
        raise NotImplementedError

    def release(self) -> None:
        """Clean up after the last reference is dropped."""

    def drop(self) -> None:
        """Remove one reference."""
        self.refs -= 1
        if not self.refs:
            self.release()

    async def wait(self, what: str) -> None:
        """Wait until it is ready; always a checkpoint."""
        if self.is_ready(what):
            await trio.lowlevel.checkpoint()
            return
        if what in self._waiting:
            raise trio.BusyResourceError(f"another task waits to {what} it")
        self._waiting[what] = trio.lowlevel.current_task()

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            del self._waiting[what]
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def wake(self, what: str) -> None:
        """Wake the task that waits for `what`, if it is ready now."""
        if what in self._waiting and self.is_ready(what):
            trio.lowlevel.reschedule(self._waiting.pop(what))

    def closing(self) -> None:
        """Wake all waiting tasks with `ClosedResourceError`: the descriptor is about to be closed."""
        while self._waiting:
            _, task = self._waiting.popitem()
            error = trio.ClosedResourceError("another task closed this descriptor")
            trio.lowlevel.reschedule(task, outcome.Error(error))

    @property
    def has_waiters(self) -> bool:
        """Whether a task waits."""
        return bool(self._waiting)


class Machine:
    """One machine, for one simulation.

    `limit`: how many descriptors the server may have. `strikes`: the faults in force. `misuses`: misuses
    that a real system would not report. `calls` counts the calls by kind.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(f"machine {seed}")
        self.limit = DEFAULT_LIMIT
        self.strikes: list[Strike] = []
        self.has_failed_call = False
        self.misuses: list[str] = []
        self.calls: Counter[str] = Counter()
        self.recent: deque[str] = deque(maxlen=TRACE_LENGTH)
        self.keeps_trace = False
        self.nursery: trio.Nursery
        self._digest = blake2b()
        self._table: dict[int, Pollable] = {}
        self._freed: list[int] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._sleep = trio.CancelScope()

    # Time --------------------------------------------------------------------------------------------

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Call `action` when the virtual clock reaches `time_s`."""
        heapq.heappush(self._events, (time_s, next(self._numbers), action))
        if self._events[0][0] == time_s:
            self._sleep.deadline = min(self._sleep.deadline, time_s)

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` after `delay_s`."""
        self.at(trio.current_time() + delay_s, action)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run events, processes and servers until cancelled."""
        async with trio.open_nursery() as self.nursery:
            task_status.started()
            while True:
                next_event_s = self._events[0][0] if self._events else float("inf")
                with trio.CancelScope(deadline=next_event_s) as self._sleep:
                    await trio.sleep_forever()
                while self._events and self._events[0][0] <= trio.current_time():
                    heapq.heappop(self._events)[2]()

    # Calls and descriptors ---------------------------------------------------------------------------

    def call(self, kind: str) -> None:
        """Count a call of this kind. Raises the error of a fault, if one strikes."""
        self.calls[kind] += 1
        for strike in self.strikes:
            if (error := strike(kind)) is not None:
                self.has_failed_call = True
                self.note("fault", kind, type(error).__name__, str(error))
                raise error

    def open(self, opened: Pollable, kind: str = "descriptor") -> int:
        """Return the lowest free descriptor, now referring to it. Raises `OSError`: EMFILE at the limit."""
        self.call(kind)
        if len(self._table) >= self.limit:
            self.has_failed_call = True
            self.note("fault", kind, "EMFILE")
            raise os_error(errno.EMFILE)
        number = heapq.heappop(self._freed) if self._freed else FIRST_DESCRIPTOR + len(self._table)
        self._table[number] = opened
        return number

    def opened(self, number: int) -> Pollable:
        """Return what a descriptor refers to. Raises `OSError` (EBADF)."""
        if (found := self._table.get(number)) is None:
            raise os_error(errno.EBADF)
        return found

    def replace(self, number: int, opened: Pollable) -> None:
        """Make a descriptor refer to something else, as when a socket connects."""
        self.opened(number)
        self._table[number] = opened

    def close(self, number: int) -> None:
        """Close a descriptor. Raises `OSError` (EBADF)."""
        opened = self.opened(number)
        del self._table[number]
        heapq.heappush(self._freed, number)
        if opened.has_waiters and opened.refs == 1:
            self.misuses.append(f"{opened} was closed while a task was waiting for it")
        opened.drop()

    @property
    def descriptors(self) -> dict[int, Pollable]:
        """The server's descriptors."""
        return dict(self._table)

    # The trace ---------------------------------------------------------------------------------------

    def note(self, *what: object) -> None:
        """Add an event to the trace."""
        line = f"{trio.current_time():.6f} {' '.join(map(str, what))}"
        self._digest.update(line.encode(errors="replace"))
        if self.keeps_trace:
            self.recent.append(line)

    @property
    def trace(self) -> str:
        """A digest of the whole trace: equal for equal runs."""
        return self._digest.hexdigest()[:32]


def os_error(number: int) -> OSError:
    """Return the `OSError` of this number."""
    return OSError(number, os.strerror(number))
