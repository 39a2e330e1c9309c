"""One timer for all deadlines of the dispatcher. An alarm that is not wanted any more is dropped for free."""

import heapq
import itertools
from collections.abc import Callable
from math import inf

import trio

FEW = 100  # dropped alarms are not worth a look


class Alarm:
    """Something to do at a time. `drop` it, and it will not be done."""

    __slots__ = ("_action", "_timer")

    def __init__(self, timer: "Timer", action: Callable[[], None]) -> None:
        self._timer = timer
        self._action: Callable[[], None] | None = action

    @property
    def dropped(self) -> bool:
        """Whether it has been dropped, or has gone off."""
        return self._action is None

    def drop(self) -> None:
        """Forget it, if it has not gone off."""
        if self._action is not None:
            self._action = None
            self._timer.note_dropped()

    def go_off(self) -> None:
        """Do it, once."""
        action, self._action = self._action, None
        if action is not None:
            action()


class Timer:
    """Alarms by time. `run` must run somewhere for them to go off.

    Dropped alarms lie in the heap until most of those there are dropped: few deadlines are ever met, and on a
    busy server each would lie there for a minute.
    """

    def __init__(self) -> None:
        self._alarms: list[tuple[float, int, Alarm]] = []
        self._numbers = itertools.count()
        self._dropped = 0
        self._sleep = trio.CancelScope()

    def at(self, time_s: float, action: Callable[[], None]) -> Alarm:
        """Have `action` called, synchronously and from the timer's task, when Trio's clock says `time_s`."""
        alarm = Alarm(self, action)
        heapq.heappush(self._alarms, (time_s, next(self._numbers), alarm))
        if self._alarms[0][2] is alarm:
            self._sleep.deadline = min(self._sleep.deadline, time_s)
        return alarm

    async def run(self) -> None:
        """Let alarms go off, until cancelled."""
        while True:
            with trio.CancelScope(deadline=self._next()) as self._sleep:
                await trio.sleep_forever()
            now = trio.current_time()
            while self._next() <= now:
                heapq.heappop(self._alarms)[2].go_off()

    def note_dropped(self) -> None:
        """One of the alarms has been dropped; tidy up when more than half of them are."""
        self._dropped += 1
        if self._dropped > FEW and 2 * self._dropped > len(self._alarms):
            self._alarms = [entry for entry in self._alarms if not entry[2].dropped]
            heapq.heapify(self._alarms)
            self._dropped = 0

    def __len__(self) -> int:
        """Alarms that have not gone off, and as many dropped ones at most, or a few."""
        return len(self._alarms)

    def _next(self) -> float:
        while self._alarms and self._alarms[0][2].dropped:
            heapq.heappop(self._alarms)
            self._dropped -= 1
        return self._alarms[0][0] if self._alarms else inf
