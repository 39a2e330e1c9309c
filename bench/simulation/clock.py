"""Time that passes only from one event to the next."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count


class Clock:
    """Calls what was asked for in the order of time, and of asking where the times are the same."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Call `action` then; now, after what is going on, if that has passed."""
        heappush(self._events, (max(time_s, self.now_s), next(self._numbers), action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` so much later."""
        self.at(self.now_s + delay_s, action)

    def every(self, period_s: float, action: Callable[[], None]) -> None:
        """Call `action` again and again, for the first time after one period."""

        def again() -> None:
            action()
            self.after(period_s, again)

        self.after(period_s, again)

    def run(self, until_s: float) -> None:
        """Let time pass until then."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, action = heappop(self._events)
            action()
        self.now_s = until_s
