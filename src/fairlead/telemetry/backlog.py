"""Journeys that are over and not written down yet: who waits for an answer need not wait for its log line.

A line costs more than sending a short answer does. So it is written in a turn of its own, when the task
whose job ended has sent what it had. Promises: each journey is told of once, in order, the last ones when
`run` ends; and what goes wrong in the telling ends nothing else. Knows no line.
"""

from collections import deque
from collections.abc import Callable

import structlog
import trio

from fairlead.journey import Journey

logger = structlog.get_logger("fairlead.telemetry")


class Backlog:
    """Takes journeys, synchronously, and has `run` tell of them.

    What came in one turn is told of in the next, all of it, so nothing piles up.
    """

    def __init__(self, tell: Callable[[Journey], None]) -> None:
        self._tell = tell
        self._untold: deque[Journey] = deque()
        self._news = trio.Event()

    def add(self, journey: Journey) -> None:
        """Have it told of soon; to be the gateway's `tell`."""
        self._untold.append(journey)
        self._news.set()

    async def run(self) -> None:
        """Tell, until cancelled; then of what is left."""
        try:
            while True:
                await self._news.wait()
                self._news = trio.Event()
                self._tell_all()
        finally:
            self._tell_all()

    def _tell_all(self) -> None:
        while self._untold:
            journey = self._untold.popleft()
            try:
                self._tell(journey)
            except Exception:
                logger.exception("a request was not told of", request_id=journey.job.request_id)
