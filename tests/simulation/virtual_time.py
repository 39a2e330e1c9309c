"""Runs a Trio program in virtual time, with a schedule that follows from a seed."""

from collections.abc import Awaitable, Callable
from typing import TypeVar
from unittest.mock import patch

import trio
import trio._core._run as trio_run
from trio.testing import MockClock

from simulation import entropy

T = TypeVar("T")


IDLE_TURNS = 1_000_000  # of the event loop without a deadline, several seconds: a real thread may work


def virtual_clock(longest_s: float = float("inf")) -> MockClock:
    """Return Trio's mock clock, reduced to jumps between deadlines, which makes it twice as fast.

    It ends a program that runs longer than `longest_s`, and one that waits for what will never happen, which
    a shielded task would keep running.
    """
    clock = MockClock(autojump_threshold=0)
    idle_turns = 0

    def jump_to_deadline() -> None:
        nonlocal idle_turns
        deadline = trio_run.GLOBAL_RUN_CONTEXT.runner.deadlines.next_deadline()
        idle_turns = idle_turns + 1 if deadline == float("inf") else 0
        if idle_turns > IDLE_TURNS or longest_s < deadline < float("inf"):
            raise TimeoutError(f"the program has not ended at {clock._virtual_base:g} s")
        if clock._virtual_base < deadline < float("inf"):
            clock._virtual_base = deadline

    clock._autojump = jump_to_deadline
    clock.current_time = lambda: clock._virtual_base
    return clock


def run(main: Callable[[MockClock], Awaitable[T]], seed: int, longest_s: float = float("inf")) -> T:
    """Run a Trio program, for `longest_s` of virtual time at most.

    Equal seeds give equal runs in a process that `entropy` has prepared.
    """
    trio_run._r.seed(seed)
    clock = virtual_clock(longest_s)
    with patch.object(trio_run, "_ALLOW_DETERMINISTIC_SCHEDULING", new=True):
        try:
            return trio.run(main, clock, clock=clock)
        finally:
            entropy.use(None)
