"""The requests, people and times of a server, as its views read them: `RequestBoard` in one process.

The process with the queue has the board: it knows the jobs that wait and run, and is told those that end.
"""

import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import trio

from fairlead.generation.metrics.activity import Activity, WindowTimings
from fairlead.generation.metrics.people import People, Person
from fairlead.generation.metrics.requests import (
    EndedRequest,
    RequestHistory,
    RequestQuery,
    Requests,
    RequestScope,
    ended_request_of,
    select,
)
from fairlead.generation.timeline import RequestTimeline
from fairlead.router.dispatch.open_jobs import OpenJob

REUSED_FOR_S = 0.25
"""How long a list of open jobs is used: it takes some time to make, and many dashboards may ask for it."""


class BoardAccess(Protocol):
    """What the views read, and what is told of requests that become no jobs."""

    def refuse(self, code: str) -> None:
        """Count a request that was refused with an error before it became a job."""

    async def requests(self, scope: RequestScope, query: RequestQuery) -> Requests:
        """Return the wanted requests that a caller may see. Raises `NoNode` if no dispatcher answers."""
        ...

    async def people(self, scope: RequestScope) -> list[Person]:
        """Return the people that a caller may see. Raises as `requests` does."""
        ...

    async def timings(self, scope: RequestScope, window: str) -> WindowTimings:
        """Return how long requests took in a window. Raises as `requests` does.

        A caller that sees one tenant gets the times of this tenant's requests that are kept.
        """
        ...


class RequestBoard:
    """The board where the queue is.

    open_jobs: returns the jobs that wait or run.
    now: returns the seconds since 1970.
    """

    def __init__(
        self, open_jobs: Callable[[], list[OpenJob]], *, now: Callable[[], float] = time.time
    ) -> None:
        self._make_open_jobs = open_jobs
        self._now = now
        self._history = RequestHistory()
        self._activity = Activity()
        self._people = People()
        self._open: list[OpenJob] = []
        self._made_at = -float("inf")

    def record(self, timeline: RequestTimeline) -> None:
        """Add a job of this process that has ended."""
        self.add(ended_request_of(timeline, self._now()))

    def add(self, request: EndedRequest) -> None:
        """Add a request that has ended. Another machine's clock may be ahead of this one's."""
        request = msgspec.structs.replace(request, ended_at=min(request.ended_at, self._now()))
        self._history.add(request)
        self._activity.add(request)
        self._people.note(request)
        self._open = [job for job in self._open if job.request_id != request.request_id]

    def refuse(self, code: str, count: int = 1) -> None:
        """Count requests that were refused with an error before they became jobs."""
        self._activity.refuse(code, count, self._now())

    def find_requests(self, scope: RequestScope, query: RequestQuery) -> Requests:
        """Return the wanted requests that a caller may see."""
        return select(self._open_jobs(), self._history, scope, query)

    def find_people(self, scope: RequestScope) -> list[Person]:
        """Return the people that a caller may see."""
        return self._people.find(self._activity, self._open_jobs(), self._now(), scope)

    def find_timings(self, window: str, models: frozenset[str] | None) -> WindowTimings:
        """Return how long the requests of all tenants took in a window, with rows of these models."""
        return self._activity.timings(window, self._now(), models)

    async def requests(self, scope: RequestScope, query: RequestQuery) -> Requests:
        """See `BoardAccess`."""
        return self.find_requests(scope, query)

    async def people(self, scope: RequestScope) -> list[Person]:
        """See `BoardAccess`."""
        return self.find_people(scope)

    async def timings(self, scope: RequestScope, window: str) -> WindowTimings:
        """See `BoardAccess`."""
        if scope.tenant is None:
            return self.find_timings(window, scope.models)
        ended = self.find_requests(scope, RequestQuery(state="ended")).ended
        return own_timings(ended, window, self._now())

    def _open_jobs(self) -> list[OpenJob]:
        now = trio.current_time()
        if now - self._made_at >= REUSED_FOR_S:
            self._open, self._made_at = self._make_open_jobs(), now
        return self._open


def own_timings(ended: tuple[EndedRequest, ...], window: str, now: float) -> WindowTimings:
    """Return how long some requests, the latest first, took in a window."""
    return Activity(reversed(ended)).timings(window, now)
