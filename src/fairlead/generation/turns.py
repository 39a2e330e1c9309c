"""Worker threads that tenants use in turn. `Turns` decides and is pure; `Threads` runs functions.

Encoding a long prompt takes seconds of CPU time. A tenant has one thread at a time, so that another one stays
free for other tenants. Its further calls are queued behind the first ones of others. A cancelled call is
removed from the queue. A thread cannot be cancelled: its turn lasts until it ends.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal, TypeVar, cast

import trio

from fairlead.base.errors import FairleadError, QueueFull, QueueTimeout
from fairlead.generation.shares import Holding, Shares

MAX_WAITING = 1000
RETRY_S = 5

Result = TypeVar("Result")


class Turn:
    """One call. `decided` is called when it stops waiting."""

    __slots__ = ("decided", "holding", "state", "tenant")

    def __init__(self, tenant: str, decided: Callable[[], None]) -> None:
        self.tenant = tenant
        self.decided = decided
        self.state: Literal["waiting", "running", "refused", "over"] = "waiting"
        self.holding: Holding | None = None


class Turns:
    """A round robin of tenants: at most `threads` turns run, `each` per tenant, and `most_waiting` wait.

    When more would wait, the tenant with the most waiting turns loses its newest one.
    """

    def __init__(self, threads: int, *, each: int = 1, most_waiting: int = MAX_WAITING) -> None:
        self._free = threads
        self._each = each
        self._running: dict[str, int] = {}
        # By tenant, in round-robin order. After its turn a tenant moves to the end.
        self._lines: dict[str, dict[Turn, None]] = {}
        self._shares = Shares(most_waiting)

    @property
    def waiting(self) -> int:
        """The number of waiting turns."""
        return self._shares.taken

    @property
    def running(self) -> int:
        """The number of running turns."""
        return sum(self._running.values())

    def enter(self, tenant: str, decided: Callable[[], None] = lambda: None) -> Turn:
        """Return a new turn: running, waiting or refused. It ends with `leave`."""
        turn = Turn(tenant, decided)
        if self._may_run(tenant):  # no waiting turn may run, or it would be running
            self._run(turn)
            return turn
        self._lines.setdefault(tenant, {})[turn] = None
        turn.holding = self._shares.enter(tenant, turn)
        for holding in self._shares.grow(turn.holding, 1):
            self._remove(holding.owner)
            holding.owner.state = "refused"
            holding.owner.decided()
        return turn

    def leave(self, turn: Turn) -> None:
        """End a turn in any state. Others may start."""
        if turn.state == "waiting":
            assert turn.holding is not None
            self._shares.leave(turn.holding)
            self._remove(turn)
        elif turn.state == "running":
            self._free += 1
            self._running[turn.tenant] -= 1
            if not self._running[turn.tenant]:
                del self._running[turn.tenant]
            if line := self._lines.pop(turn.tenant, None):
                self._lines[turn.tenant] = line
        turn.state = "over"
        self._begin()

    def _may_run(self, tenant: str) -> bool:
        return self._free > 0 and self._running.get(tenant, 0) < self._each

    def _begin(self) -> None:
        while (tenant := next(filter(self._may_run, self._lines), None)) is not None:
            turn = next(iter(self._lines[tenant]))
            assert turn.holding is not None
            self._shares.leave(turn.holding)
            self._remove(turn)
            self._run(turn)
            turn.decided()

    def _run(self, turn: Turn) -> None:
        self._free -= 1
        self._running[turn.tenant] = self._running.get(turn.tenant, 0) + 1
        turn.state = "running"

    def _remove(self, turn: Turn) -> None:
        line = self._lines[turn.tenant]
        del line[turn]
        if not line:
            del self._lines[turn.tenant]


class Threads:
    """Threads that run functions in tenants' turns. No call waits longer than `timeout_s` for its turn."""

    def __init__(self, threads: int, *, timeout_s: float, most_waiting: int = MAX_WAITING) -> None:
        self.turns = Turns(threads, most_waiting=most_waiting)
        self._timeout_s = timeout_s

    async def run(
        self, tenant: str, call: Callable[..., Result], *arguments: Any, abandons: bool = True
    ) -> Result:
        """Return the function's result. When cancelled, do not wait for the thread to end if it `abandons`.

        Raises what the function raises, `QueueFull` and `QueueTimeout`.
        """
        limiter = cast(trio.CapacityLimiter, _Limiter(self.turns, tenant, self._timeout_s))
        result, error = await trio.to_thread.run_sync(
            _attempt, partial(call, *arguments), abandon_on_cancel=abandons, limiter=limiter
        )
        if error is None:
            return cast(Result, result)
        try:
            raise error
        finally:
            del error  # which refers to this frame


@asynccontextmanager
async def in_turn(turns: Turns, tenant: str, *, timeout_s: float) -> AsyncIterator[None]:
    """Wait for a turn of a tenant, at most `timeout_s`, and have it during the block.

    Raises `QueueFull` and `QueueTimeout`.
    """
    limiter = _Limiter(turns, tenant, timeout_s)
    await limiter.acquire_on_behalf_of(None)
    try:
        yield
    finally:
        limiter.release_on_behalf_of(None)


def _attempt(call: Callable[[], Result]) -> tuple[Result | None, FairleadError | None]:
    """Return the call's result, or the error it raised.

    Trio's own way of raising a thread's error in the caller makes a reference cycle: the traceback refers to
    frames that refer to the error. These frames hold the request's body, which would stay in memory until the
    cycle collector runs. So the error is returned, without its traceback; errors that are not for clients
    keep theirs.
    """
    try:
        return call(), None
    except FairleadError as error:
        error.__context__ = None
        return None, error.with_traceback(None)


class _Limiter:
    """A turn with the interface of `CapacityLimiter`. Trio releases it when the thread has ended."""

    def __init__(self, turns: Turns, tenant: str, timeout_s: float) -> None:
        self._turns = turns
        self._tenant = tenant
        self._timeout_s = timeout_s
        self._turn: Turn

    async def acquire_on_behalf_of(self, _borrower: object) -> None:
        decision = trio.Event()
        turn = self._turn = self._turns.enter(self._tenant, decision.set)
        try:
            with trio.move_on_after(self._timeout_s):
                if turn.state == "waiting":
                    await decision.wait()
                else:
                    await trio.lowlevel.checkpoint()
            if turn.state == "refused":
                raise QueueFull("too many long requests wait to be encoded", retry_after_s=RETRY_S)
            if turn.state == "waiting":
                raise QueueTimeout(f"the request waited longer than {self._timeout_s:g} s to be encoded")
        except BaseException:
            self._turns.leave(turn)
            raise

    def release_on_behalf_of(self, _borrower: object) -> None:
        self._turns.leave(self._turn)
