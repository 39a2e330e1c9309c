"""Detects that a child has stopped making progress. Independent of processes and frames.

A frame is due after each message to the child, and while it has sequences. Silence is counted in ticks during
which this program runs. So when this program is stopped, or the machine sleeps, that counts as one tick.
"""

import trio

TICKS = 10


class Watchdog:
    """A timeout of `bound_s` seconds for each frame, and of twice that until the first step is done.

    The first step after a load may include one-time work: warming up, compiling, capturing graphs.
    """

    def __init__(self, bound_s: float) -> None:
        self.bound_s = bound_s
        self._events = 0  # messages and frames that begin the timeout anew
        self._is_due = False
        self._has_stepped = False

    def message_sent(self) -> None:
        """Record that a message was sent, after which a frame is due."""
        if not self._is_due:
            self._is_due = True
            self._events += 1

    def frame_received(self, *, more: bool, stepped: bool = True) -> None:
        """Record that a frame was received; with `more`, the next one is due already.

        `stepped`: the child has run a step since its load.
        """
        self._events += 1
        self._is_due = more
        self._has_stepped |= stepped

    async def stuck(self) -> float:
        """Wait until a frame is overdue; return the timeout in seconds."""
        seen, silent_ticks, allowed_ticks = self._events, 0, TICKS
        while silent_ticks < allowed_ticks:
            await trio.sleep(self.bound_s / TICKS)
            if self._is_due and self._events == seen:
                silent_ticks += 1
            else:
                seen, silent_ticks = self._events, 0
            allowed_ticks = TICKS if self._has_stepped else 2 * TICKS
        return allowed_ticks * self.bound_s / TICKS
