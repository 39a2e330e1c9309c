"""One timer for all deadlines of the dispatcher. Cancelling an alarm takes no search."""

import heapq
import itertools
from collections.abc import Callable
from math import inf

import trio

KEPT_DROPPED = 100  # the number of dropped alarms that are never worth a cleanup


class Alarm:
    """An action at a time. After `drop` it will not run."""

    __slots__ = ("_action", "_timer")

    def __init__(self, timer: "Timer", action: Callable[[], None]) -> None:
        self._timer = timer
        self._action: Callable[[], None] | None = action

    @property
    def dropped(self) -> bool:
        """Whether it was dropped, or has gone off."""
        return self._action is None

    def drop(self) -> None:
        """Cancel it, if it has not gone off."""
        if self._action is not None:
            self._action = None
            self._timer.note_dropped()

    def go_off(self) -> None:
        """Run the action, once."""
        action, self._action = self._action, None
        if action is not None:
            action()


class Timer:
    """Alarms by time. They go off only while `run` runs.

    Dropped alarms are removed from the heap together, once they are the majority. Few deadlines are ever
    reached, and on a busy server each would otherwise stay there for a minute.
    """

    def __init__(self) -> None:
        self._alarms: list[tuple[float, int, Alarm]] = []
        self._numbers = itertools.count()
        self._dropped = 0
        self._sleep = trio.CancelScope()

    def at(self, time_s: float, action: Callable[[], None]) -> Alarm:
        """Call `action`, synchronously and in the timer's task, when Trio's clock reaches `time_s`."""
        alarm = Alarm(self, action)
        heapq.heappush(self._alarms, (time_s, next(self._numbers), alarm))
        if self._alarms[0][2] is alarm:
            self._sleep.deadline = min(self._sleep.deadline, time_s)
        return alarm

    async def run(self) -> None:
        """Run the alarms that are due, until cancelled."""
        while True:
            with trio.CancelScope(deadline=self._next()) as self._sleep:
                await trio.sleep_forever()
            now = trio.current_time()
            while self._next() <= now:
                heapq.heappop(self._alarms)[2].go_off()

    def note_dropped(self) -> None:
        """Count a dropped alarm; clean up when more than half of them are dropped."""
        self._dropped += 1
        if self._dropped > KEPT_DROPPED and 2 * self._dropped > len(self._alarms):
            self._alarms = [entry for entry in self._alarms if not entry[2].dropped]
            heapq.heapify(self._alarms)
            self._dropped = 0

    def __len__(self) -> int:
        """Return how many alarms are held: pending ones, and at most as many dropped ones, or a few."""
        return len(self._alarms)

    def _next(self) -> float:
        while self._alarms and self._alarms[0][2].dropped:
            heapq.heappop(self._alarms)
            self._dropped -= 1
        return self._alarms[0][0] if self._alarms else inf
