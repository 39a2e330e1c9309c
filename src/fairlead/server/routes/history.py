"""The totals of the last ten minutes, so that a dashboard can show them as soon as it is opened.

Owns a ring of rows, one each `INTERVAL_S`, and takes a snapshot for each; its memory does not grow. A row has
totals only: no model, no node and no user.
"""

from collections import deque
from collections.abc import Callable

import msgspec
import structlog
import trio

from fairlead.generation.metrics.snapshot import Snapshot

logger = structlog.get_logger("fairlead.server.routes")

INTERVAL_S = 2.0
DURATION_S = 600.0


class Totals(msgspec.Struct, frozen=True):
    """A row.

    at_s: Its time, in seconds since 1970.
    waiting: Jobs in the queue.
    running: Jobs with a seat.
    oldest_wait_s: How long the job waited that waited longest, in seconds.
    rejected: Jobs that were refused since the start.
    tokens_per_s: Tokens that were generated in a second.
    cache_usage: The used part of all KV caches, 0…1; None: there is none.
    """

    at_s: float
    waiting: int
    running: int
    oldest_wait_s: float
    rejected: int
    tokens_per_s: float
    cache_usage: float | None


class History:
    """The ring of rows. `take` returns the server's current snapshot."""

    def __init__(self, take: Callable[[], Snapshot]) -> None:
        self._take = take
        self._rows: deque[Totals] = deque(maxlen=round(DURATION_S / INTERVAL_S) + 1)

    async def run(self) -> None:
        """Add a row every `INTERVAL_S`, forever. A snapshot that fails is logged and skipped."""
        while True:
            try:
                self._rows.append(totals_of(self._take()))
            except Exception:
                logger.exception("snapshot failed")  # our own bug must not end the server
            await trio.sleep(INTERVAL_S)

    def columns(self) -> dict[str, list[float | None]]:
        """Return the rows, oldest first, as one list per name: plots are drawn by column."""
        names = Totals.__struct_fields__
        return {name: [getattr(row, name) for row in self._rows] for name in names}


def totals_of(snapshot: Snapshot) -> Totals:
    """Return the row for a snapshot."""
    return Totals(
        at_s=round(snapshot.at_s, 3),
        waiting=snapshot.queue.waiting,
        running=snapshot.queue.running,
        oldest_wait_s=round(snapshot.queue.oldest_wait_s, 3),
        rejected=sum(snapshot.rejected.values()),
        tokens_per_s=snapshot.tokens.generated_per_s,
        cache_usage=snapshot.cache_usage,
    )
