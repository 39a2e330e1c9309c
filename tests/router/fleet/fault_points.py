"""Raise one exception at one step in the lifecycle of a model or node, and check what is left.

The steps are not listed by hand. The functions at the boundaries of a lifecycle (those of the system, Trio
and codecs, and the listeners' callbacks) are wrapped. A run without a fault shows in which phases each of
them is called. Each pair of a phase and a function is a step.
"""

import errno
import gc
import inspect
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import msgspec
import trio
from trio.testing import MockClock

from fairlead.base.config import QueueConfig
from fairlead.base.supervision import FailureBoundary
from router.fleet.running_fleet import RunningFleet

Step = tuple[str, str]

# A job for a node that does not come back waits until this timeout.
QUEUE = QueueConfig(timeout_s=20.0)


class Panic(BaseException):
    """Stands for what a Rust library raises when it panics, which is not an `Exception`."""


def _system(number: int) -> Callable[[], BaseException]:
    return lambda: OSError(number, f"struck: {errno.errorcode[number]}")


EXCEPTIONS: dict[str, Callable[[], BaseException]] = {
    **{
        errno.errorcode[number]: _system(number)
        for number in (
            *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EPIPE, errno.ECONNRESET),
            *(errno.EAGAIN, errno.EIO, errno.EACCES, errno.ESRCH),
        )
    },
    "TimeoutError": lambda: TimeoutError("struck"),
    "EOFError": lambda: EOFError("struck"),
    "MemoryError": MemoryError,
    "RecursionError": lambda: RecursionError("struck"),
    "AssertionError": lambda: AssertionError("struck"),
    "ValueError": lambda: ValueError("struck"),
    "KeyError": lambda: KeyError("struck"),
    "TypeError": lambda: TypeError("struck"),
    "RuntimeError": lambda: RuntimeError("struck"),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "struck"),
    "msgspec.DecodeError": lambda: msgspec.DecodeError("struck"),
    "msgspec.ValidationError": lambda: msgspec.ValidationError("struck"),
    "trio.BrokenResourceError": lambda: trio.BrokenResourceError("struck"),
    "trio.ClosedResourceError": lambda: trio.ClosedResourceError("struck"),
    "trio.BusyResourceError": lambda: trio.BusyResourceError("struck"),
    "trio.TooSlowError": lambda: trio.TooSlowError("struck"),
    "ExceptionGroup": lambda: ExceptionGroup("struck", [ValueError("one"), OSError(errno.EMFILE, "two")]),
    "a panic": lambda: Panic("struck"),
}


class FaultPoints:
    """Wraps functions. `seen` holds the steps reached so far; the step `strike` raises, once."""

    def __init__(self, strike: Step | None = None, make: Callable[[], BaseException] = Panic) -> None:
        self.seen: dict[Step, None] = {}
        self.has_struck = False
        self._phase: str | None = None
        self._strike = strike
        self._make = make
        self._undo: list[Callable[[], None]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record wrapped calls in this block as steps of the phase; ignore others, and those in `aside`."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Ignore wrapped calls in this synchronous block: they do not belong to the model under test."""
        before, self._phase = self._phase, None
        try:
            yield
        finally:
            self._phase = before

    def reach(self, name: str) -> None:
        """Record the step; raise if it is the one to fail."""
        if self._phase is None:
            return
        step = (self._phase, name)
        self.seen[step] = None
        if step == self._strike and not self.has_struck:
            self.has_struck = True
            raise self._make()

    def wrap(
        self, owner: Any, attribute: str, name: str, when: Callable[..., bool] = lambda *_arguments: True
    ) -> None:
        """Make a function a fault point of this name, for calls with arguments that satisfy `when`."""
        original = getattr(owner, attribute)

        def point(*arguments: Any, **options: Any) -> Any:
            if when(*arguments):
                self.reach(name)
            return original(*arguments, **options)

        async def async_point(*arguments: Any, **options: Any) -> Any:
            if when(*arguments):
                self.reach(name)
            return await original(*arguments, **options)

        self.replace(owner, attribute, async_point if inspect.iscoroutinefunction(original) else point)

    def replace(self, owner: Any, attribute: str, value: Any) -> None:
        """Set an attribute until `restore`."""
        before = getattr(owner, attribute)
        self._undo.append(lambda: setattr(owner, attribute, before))
        setattr(owner, attribute, value)

    def restore(self) -> None:
        """Undo all wrapping and replacing, in reverse order."""
        while self._undo:
            self._undo.pop()()


Scenario = Callable[[FaultPoints, list[str]], Awaitable[None]]


def run_once(scenario: Scenario, points: FaultPoints) -> list[str]:
    """Run the scenario, which appends to a list of problems; return that list."""
    problems: list[str] = []
    gc.collect()  # garbage of an earlier run must not count in this one

    async def main() -> None:
        points.replace(trio.to_thread, "run_sync", _run_sync)
        with trio.move_on_after(10_000) as clock:
            await scenario(points, problems)
        if clock.cancelled_caught:
            problems.append("it never ends")

    try:
        trio.run(main, clock=MockClock(autojump_threshold=0), strict_exception_groups=True)
    except BaseException as error:  # noqa: BLE001  # the server has ended
        problems.append(f"the server ends: {error!r}")
    finally:
        points.restore()
    return problems


def strikes(scenario: Scenario, names: list[str], each: int) -> Iterator[str]:
    """Fail every step with the next `each` exceptions of a cycle over `names`; yield the problems."""
    dry = FaultPoints()
    yield from run_once(scenario, dry)
    following = cycle(names)
    for step in dry.seen:
        for name in (next(following) for _ in range(each)):
            points = FaultPoints(step, EXCEPTIONS[name])
            problems = run_once(scenario, points)
            if not points.has_struck:
                problems.append("it was not reached")
            yield from (f"{name} at {step}: {problem}" for problem in problems)


async def ends(run: Callable[..., Awaitable[object]], *arguments: object) -> BaseException | None:
    """Run a client's request, which may fail but must end. Return its error, or None."""
    with trio.move_on_after(2 * QUEUE.timeout_s), FailureBoundary() as boundary:
        await run(*arguments)
        return None
    if boundary.failure is None:
        raise AssertionError("a client was left without an answer")
    return boundary.failure


@contextmanager
def noting(problems: list[str], what: str) -> Iterator[None]:
    """Append a failure of the block to the problems."""
    with FailureBoundary() as boundary, trio.fail_after(60):
        yield
    if boundary.failure is not None:
        problems.append(f"{what}: {boundary.failure!r}")


def resource_counts(opened: RunningFleet) -> dict[str, int]:
    """Return the counts that must return to their earlier values."""
    counts = opened.dispatcher.statistics()
    return {
        "waiting": counts.waiting,
        "running": counts.running,
        "seats": counts.seats,
        "tasks": len(opened.fleet._nursery.child_tasks),
        "loads": len(opened.dispatcher.models._loads),
        "waiters": len(opened.dispatcher._waiters),
        "loading": len(opened.dispatcher.scheduler._swaps._loading),
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208  # the entries are not files
    }


async def assert_no_more(opened: RunningFleet, before: dict[str, int]) -> None:
    """Wait for these counts: tasks end late, and a failed close needs garbage collection."""
    with trio.move_on_after(30):
        while resource_counts(opened) != before:
            await trio.sleep(5)
            gc.collect()
    more = {
        name: count - before[name] for name, count in resource_counts(opened).items() if count != before[name]
    }
    assert more == {}, str(more)


def is_struck(node_id: str) -> bool:
    """Return whether this is the model's node, or the remote node, under test."""
    return node_id in ("engine:m", "command:m", "far")


async def _run_sync(function: Callable[..., Any], *arguments: Any, **_options: Any) -> Any:
    """Run the function in this thread, as virtual time does not wait for another one."""
    await trio.lowlevel.checkpoint()
    return function(*arguments)
