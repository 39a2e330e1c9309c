"""Tells the scheduler which sequences have run for a quantum: a time, or a number of tokens.

And which seats have been idle for a quantum.
"""

from collections import deque
from math import inf
from typing import NamedTuple

import trio

from fairlead.base.config import QueueConfig
from fairlead.router.dispatch.scheduling import JobScheduler
from fairlead.router.dispatch.ticket import Run, RunState
from fairlead.router.dispatch.timer import Alarm, Timer
from fairlead.router.dispatch.waiter import Waiter

LOOKS, HURRIED_LOOKS = 16, 128
"""The number of looks at the sequences in a quantum: while no job waits, and while one does."""


class _Growing(NamedTuple):
    """A sequence that began or went on at `since_s`, as the run with this `number`.

    `tokens`: those of its job then.
    """

    waiter: Waiter
    run: Run
    number: int
    since_s: float
    tokens: int


class Ripening:
    """The sequences that have not run for a quantum yet, the oldest first.

    scheduler: gets `ripened`.
    timer: the dispatcher's.
    queue: the settings.

    Tokens are those of the job, divided by its sequences that run. A front is asked for them while jobs wait.
    """

    def __init__(self, scheduler: JobScheduler, timer: Timer, queue: QueueConfig) -> None:
        self._scheduler = scheduler
        self._timer = timer
        self._queue = queue
        self._growing: deque[_Growing] = deque()
        self._alarm: Alarm | None = None
        self._looked_s, self._looks_again_s = -inf, inf

    def add(self, waiter: Waiter, run: Run) -> None:
        """Record that a sequence has begun, or goes on."""
        if not self._queue.suspension or run.is_whole:
            return
        now = trio.current_time()
        self._growing.append(_Growing(waiter, run, run.number, now, waiter.generated()))
        if self._alarm is None or self._alarm.dropped:
            self._look_again()

    def hurry(self) -> None:
        """Look at the sequences now that a job waits, but not more often than `HURRIED_LOOKS` says."""
        soon_s = self._looked_s + self._queue.quantum_s / HURRIED_LOOKS
        if self._growing and self._looks_again_s > soon_s:
            if self._alarm is not None:
                self._alarm.drop()
            if soon_s > trio.current_time():
                self._look_at(soon_s)
            else:
                self._look()

    def _look_again(self) -> None:
        looks = HURRIED_LOOKS if self._scheduler.waiting() else LOOKS
        self._look_at(trio.current_time() + self._queue.quantum_s / looks)

    def _look_at(self, time_s: float) -> None:
        self._looks_again_s = time_s
        self._alarm = self._timer.at(time_s, self._look)

    def _look(self) -> None:
        """Report the sequences that are ripe. While nothing waits, those of the right age are enough."""
        self._looked_s = trio.current_time()
        last_s = self._looked_s - self._queue.quantum_s
        ripe = []
        while self._growing and self._growing[0].since_s <= last_s:
            ripe.append(self._growing.popleft())
        if self._scheduler.waiting():
            for each in self._growing:
                each.waiter.update_generated()
            enough = [each for each in self._growing if self._tokens_of(each) >= self._queue.quantum_tokens]
            ripe += enough
            if enough:
                self._growing = deque(each for each in self._growing if each not in enough)
        if self._growing:
            self._look_again()
        for each in reversed(ripe):  # the first of them may pause at once, and the rule is: the newest
            if _is_current(each):
                self._scheduler.ripened(each.waiter.ticket, each.run.index)

    def _tokens_of(self, growing: _Growing) -> int:
        running = len(growing.waiter.ticket.runs) or 1
        return (growing.waiter.generated() - growing.tokens) // running


def _is_current(growing: _Growing) -> bool:
    run = growing.run
    return (
        run.ticket.runs.get(run.index) is run
        and run.state is RunState.RUNNING
        and run.number == growing.number
    )


class Resting:
    """The seats that were left less than a quantum ago, the oldest first, with one alarm for all.

    scheduler: gets `seats_rested`.
    timer: the dispatcher's.
    queue: the settings.
    """

    def __init__(self, scheduler: JobScheduler, timer: Timer, queue: QueueConfig) -> None:
        self._scheduler = scheduler
        self._timer = timer
        self._queue = queue
        self._left: deque[tuple[float, str, int]] = deque()  # when, the node's id, and the number
        self.alarm: Alarm | None = None

    def add(self, node_id: str, number: int) -> None:
        """Record that seats of a node were left now."""
        self._left.append((trio.current_time(), node_id, number))
        if self.alarm is None or self.alarm.dropped:
            self._look_again()

    def _look_again(self) -> None:
        self.alarm = self._timer.at(self._left[0][0] + self._queue.quantum_s, self._look)

    def _look(self) -> None:
        last_s = trio.current_time() - self._queue.quantum_s
        rested = []
        while self._left and self._left[0][0] <= last_s + 1e-9:
            rested.append(self._left.popleft())
        if self._left:
            self._look_again()
        for _, node_id, number in rested:
            self._scheduler.seats_rested(node_id, number)
