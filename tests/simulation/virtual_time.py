"""Runs a Trio program in virtual time, with a schedule that follows from a seed."""

from collections.abc import Awaitable, Callable
from typing import TypeVar
from unittest.mock import patch

import trio
import trio._core._run as trio_run
from trio.testing import MockClock

from simulation import entropy

T = TypeVar("T")


def virtual_clock() -> MockClock:
    """Return Trio's mock clock, reduced to jumps between deadlines, which makes it twice as fast."""
    clock = MockClock(autojump_threshold=0)

    def jump_to_deadline() -> None:
        deadline = trio_run.GLOBAL_RUN_CONTEXT.runner.deadlines.next_deadline()
        if clock._virtual_base < deadline < float("inf"):
            clock._virtual_base = deadline

    clock._autojump = jump_to_deadline
    clock.current_time = lambda: clock._virtual_base
    return clock


def run(main: Callable[[MockClock], Awaitable[T]], seed: int) -> T:
    """Run a Trio program. Equal seeds give equal runs in a process that `entropy` has prepared."""
    trio_run._r.seed(seed)
    clock = virtual_clock()
    with patch.object(trio_run, "_ALLOW_DETERMINISTIC_SCHEDULING", new=True):
        try:
            return trio.run(main, clock, clock=clock)
        finally:
            entropy.use(None)
