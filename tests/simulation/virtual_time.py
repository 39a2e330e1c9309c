"""A Trio program in virtual time, whose tasks take turns in an order that follows from a seed."""

from collections.abc import Awaitable, Callable
from typing import TypeVar
from unittest.mock import patch

import trio
import trio._core._run as trio_run
from trio.testing import MockClock

from simulation import entropy

T = TypeVar("T")


def virtual_clock() -> MockClock:
    """Return Trio's mock clock, without what it does for a clock that also runs by itself."""
    clock = MockClock(autojump_threshold=0)

    def jump_to_deadline() -> None:
        deadline = trio_run.GLOBAL_RUN_CONTEXT.runner.deadlines.next_deadline()
        if clock._virtual_base < deadline < float("inf"):
            clock._virtual_base = deadline

    clock._autojump = jump_to_deadline
    clock.current_time = lambda: clock._virtual_base
    return clock


def run(main: Callable[[MockClock], Awaitable[T]], seed: int) -> T:
    """Run a Trio program: the same in each run with the same seed, in a process of `entropy`'s."""
    trio_run._r.seed(seed)
    clock = virtual_clock()
    with patch.object(trio_run, "_ALLOW_DETERMINISTIC_SCHEDULING", new=True):
        try:
            return trio.run(main, clock, clock=clock)
        finally:
            entropy.use(None)
