"""A virtual clock that advances from event to event."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count


class Clock:
    """Calls actions in the order of their times; actions of the same time in the order of their requests."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Call `action` at a time; a time in the past means now, after the current action."""
        heappush(self._events, (max(time_s, self.now_s), next(self._numbers), action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` after a delay."""
        self.at(self.now_s + delay_s, action)

    def every(self, period_s: float, action: Callable[[], None]) -> None:
        """Call `action` periodically, for the first time after one period."""

        def repeat() -> None:
            action()
            self.after(period_s, repeat)

        self.after(period_s, repeat)

    def run(self, until_s: float) -> None:
        """Run all actions up to a time."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, action = heappop(self._events)
            action()
        self.now_s = until_s
