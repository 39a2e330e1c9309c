"""When the supervisor starts a dispatcher or a front again, and with which configuration.

Nobody is served while these processes are away, so their pauses are short: unlike a model, which may take
minutes and all memory to load, one of them costs a second of CPU time to start. Independent of processes.
"""

from collections import deque

import trio

# A process that has run for this long is sound: what it did before does not count any more.
STEADY_S = 5.0
# Ends within this time are counted, and so are the pauses: nothing, 0.1 s, 0.2 s …
WINDOW_S = 10.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 1.0
# The least time between two starts of a process whose pause ends early.
SPACING_S = 0.25
# A configuration is given up when so many processes in a row have ended before they were ready with it.
MOST_UNREADY = 3


class CrashPauses:
    """The pauses of one process, by the rate of its crashes."""

    def __init__(self) -> None:
        self._ended_at: deque[float] = deque()

    def after(self, ran_s: float) -> float:
        """Return the pause after a run of this duration, which has just ended."""
        now = trio.current_time()
        if ran_s >= STEADY_S:
            self._ended_at.clear()
            return 0.0
        while self._ended_at and self._ended_at[0] < now - WINDOW_S:
            self._ended_at.popleft()
        earlier = len(self._ended_at)
        self._ended_at.append(now)
        return min(FIRST_PAUSE_S * 2 ** (earlier - 1), LONGEST_PAUSE_S) if earlier else 0.0


class SharedPauses:
    """The pauses of `count` processes of which one at least is to run: they are never all in a pause."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._waiting: dict[trio.CancelScope, None] = {}  # the longest first

    async def wait(self, pause_s: float, ran_s: float) -> None:
        """Wait for the pause, or until all others are in one as well. `ran_s`: how long the run was."""
        if pause_s <= 0:
            return
        with trio.CancelScope() as scope:
            self._waiting[scope] = None
            if len(self._waiting) == self._count:
                next(iter(self._waiting)).cancel()
            try:
                await trio.sleep(pause_s)
            finally:
                del self._waiting[scope]
        if scope.cancelled_caught:
            await trio.sleep(SPACING_S - min(ran_s, SPACING_S))


class TrustedConfig:
    """The configuration for the next process of a role: the latest, unless no process gets ready with it.

    What has ended a process is not given to its successors for ever: they get the last configuration with
    which one was ready, until there is another one.
    """

    def __init__(self, config: bytes) -> None:
        self.latest = config
        self._proven: bytes | None = None
        self._unready = 0  # processes that have ended in a row before they were ready with the latest

    def change(self, config: bytes) -> None:
        """Use another configuration for the next process."""
        self.latest, self._unready = config, 0

    def next(self) -> bytes:
        """Return the configuration for the next process."""
        if self._proven is not None and self._unready >= MOST_UNREADY:
            return self._proven
        return self.latest

    def became_ready(self, config: bytes) -> None:
        """Record that a process is ready with this configuration."""
        self._proven = config
        if config == self.latest:
            self._unready = 0

    def was_not_ready(self, config: bytes) -> None:
        """Count a process that has ended before it was ready."""
        if config == self.latest and config != self._proven:
            self._unready += 1
