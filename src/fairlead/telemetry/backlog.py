"""Defers logs and traces of finished jobs until their responses are sent.

A log line costs more than sending a short answer. So it is written in a later turn of the event loop, after
the job's task has sent what it had. Each timeline (`RequestTimeline`) is reported once and in order, the
last ones when `run` ends. An error in reporting ends nothing else. Knows no log format.
"""

from collections import deque
from collections.abc import Callable

import structlog
import trio

from fairlead.request_timeline import RequestTimeline

logger = structlog.get_logger("fairlead.telemetry")


class Backlog:
    """Collects the timelines of finished jobs, synchronously; `run` reports them.

    All that arrived in one turn is reported in the next one, so nothing piles up.
    """

    def __init__(self, tell: Callable[[RequestTimeline], None]) -> None:
        self._tell = tell
        self._untold: deque[RequestTimeline] = deque()
        self._news = trio.Event()

    def add(self, journey: RequestTimeline) -> None:
        """Report a timeline soon; the gateway's `tell` callback."""
        self._untold.append(journey)
        self._news.set()

    async def run(self) -> None:
        """Report timelines until cancelled, then those that are left."""
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
