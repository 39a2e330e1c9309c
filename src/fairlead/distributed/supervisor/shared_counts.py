"""What all fronts have counted, added up by the dispatcher, so that any front can report the totals.

Each front reports its counts every second, and before it answers with totals. A total never falls: the counts
of fronts that have ended stay, and a front gives them back to a new dispatcher. A front that seemed to have
ended, and returns to another dispatcher, is counted twice.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from fairlead.base.errors import NoNode
from fairlead.distributed.frontends.client import DispatchClient
from fairlead.distributed.frontends.questions import Questions
from fairlead.generation.metrics.job_metrics import FrontCounts, JobStatistics, merged

MAX_ABSENT = 100
"""Number of fronts without a connection whose counts are kept apart, in case they connect again."""


class FrontTotals(msgspec.Struct, frozen=True):
    """The counts of all fronts, and of those that have ended."""

    all: FrontCounts = FrontCounts()
    ended: FrontCounts = FrontCounts()


class SharedCounts:
    """The dispatcher's side. `questions` are for `FrontServer`, which adds the front's name."""

    def __init__(self) -> None:
        self.questions: Questions = {"counts": self.report, "restore_counts": self.restore}
        self._counts: dict[str, FrontCounts] = {}
        self._before = FrontCounts()  # of fronts that had ended before this dispatcher began
        self._absent: dict[str, FrontCounts] = {}  # of fronts that have ended, or seem to
        self._ended = FrontCounts()

    def report(self, front: str, counts: Any) -> FrontTotals:
        """Record a front's counts; return the totals."""
        self._absent.pop(front, None)
        self._counts[front] = msgspec.convert(counts, FrontCounts)
        ended = merged((self._before, self._ended, *self._absent.values()))
        return FrontTotals(merged((ended, *self._counts.values())), ended)

    def restore(self, _front: str, ended: Any) -> None:
        """Record the counts of fronts that had ended before this dispatcher began; the highest apply."""
        given = msgspec.convert(ended, FrontCounts)
        if sum(given.jobs.outcomes.values()) > sum(self._before.jobs.outcomes.values()):
            self._before = given

    def end_front(self, front: str) -> None:
        """Keep the counts of a front that has ended. Its jobs are over."""
        counts = self._counts.pop(front, None)
        if counts is None:
            return
        models = {
            name: msgspec.structs.replace(model, waiting=0, running=0)
            for name, model in counts.jobs.models.items()
        }
        tenants = {
            name: msgspec.structs.replace(tenant, waiting=0, running=0)
            for name, tenant in counts.jobs.tenants.items()
        }
        self._absent[front] = msgspec.structs.replace(
            counts,
            jobs=JobStatistics(models, tenants),
            usage=msgspec.structs.replace(counts.usage, waiting=0),
        )
        while len(self._absent) > MAX_ABSENT:
            oldest = self._absent.pop(next(iter(self._absent)))
            self._ended = merged((self._ended, oldest))


class CountsView:
    """A front's side. `own` returns what this front has counted, `totals` the last totals of all."""

    def __init__(self, client: DispatchClient) -> None:
        self.own: Callable[[], FrontCounts] = FrontCounts
        self._client = client
        self._totals = FrontTotals()
        self._run_id = ""  # of the dispatcher that has sent them
        client.on_connect.append(self._restore)

    def totals(self) -> FrontCounts:
        """Return the last totals."""
        return self._totals.all

    async def refresh(self) -> None:
        """Report this front's counts and get the totals; without an answer, the last ones stay."""
        try:
            answer = await self._client.ask("counts", self.own())
        except NoNode:
            return
        self._totals = msgspec.convert(answer, FrontTotals)
        self._run_id = self._client.run_id

    def _restore(self) -> None:
        """Send the counts to a new dispatcher, unless they came from it."""
        if self._client.run_id != self._run_id:
            self._client.tell("restore_counts", self._totals.ended)
