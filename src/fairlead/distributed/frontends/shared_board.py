"""The requests, people and times of all fronts: the dispatcher has the board.

A front sends the requests that have ended at it, and keeps the last ones: a dispatcher that begins gets them
again. Each has a number, so that none is counted twice.
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import msgspec
import trio

from fairlead.base.errors import NoNode
from fairlead.distributed.frontends.client import DispatchClient
from fairlead.distributed.frontends.questions import Questions
from fairlead.generation.metrics.activity import WINDOWS, WindowTimings
from fairlead.generation.metrics.board import RequestBoard, own_timings
from fairlead.generation.metrics.people import Person
from fairlead.generation.metrics.requests import (
    KEPT,
    Count,
    EndedRequest,
    RequestQuery,
    Requests,
    RequestScope,
    ended_request_of,
)
from fairlead.generation.timeline import RequestTimeline

SEND_INTERVAL_S = 0.25
RETRY_S = 1.0


class SharedBoard:
    """The dispatcher's side. `questions` are for `FrontServer`, which adds the front's name."""

    def __init__(self, board: RequestBoard) -> None:
        self._board = board
        self._seen: dict[str, int] = {}
        self.questions: Questions = {
            "requests_ended": self.add,
            "requests": self._requests,
            "people": self._people,
            "timings": self._timings,
        }

    def add(self, front: str, ended: Any, refusals: Any) -> None:
        """Add the requests of a front that were not added before, and what it has refused since it asked."""
        for code, count in msgspec.convert(refusals, dict[str, Count]).items():
            self._board.refuse(code, count)
        for request in msgspec.convert(ended, list[EndedRequest]):
            if request.number > self._seen.get(front, -1):
                self._seen[front] = request.number
                self._board.add(request)

    def end_front(self, front: str) -> None:
        """Forget a front that has ended. Its numbers go on if it returns."""
        self._seen.pop(front, None)

    def _requests(self, _front: str, scope: Any, query: Any) -> Requests:
        return self._board.find_requests(
            msgspec.convert(scope, RequestScope), msgspec.convert(query, RequestQuery)
        )

    def _people(self, _front: str, scope: Any) -> list[Person]:
        return self._board.find_people(msgspec.convert(scope, RequestScope))

    def _timings(self, _front: str, window: str, models: Any) -> WindowTimings:
        if window not in WINDOWS:
            raise msgspec.ValidationError(f"there is no window {window!r}")
        return self._board.find_timings(window, msgspec.convert(models, frozenset[str] | None))


class RemoteBoard:
    """A front's side. Implements `BoardAccess`.

    client: the connection to the dispatcher.
    now: returns the seconds since 1970.
    """

    def __init__(self, client: DispatchClient, *, now: Callable[[], float] = time.time) -> None:
        self._client = client
        self._now = now
        self._kept: deque[EndedRequest] = deque(maxlen=KEPT)
        # Higher than all numbers of an earlier run of a front with this name.
        self._number = int(now() * 1000)
        self._sent = -1
        self._run_id = ""  # of the dispatcher that has got them
        self._refusals: Counter[str] = Counter()  # that no dispatcher has got
        self._added = trio.Event()

    def record(self, timeline: RequestTimeline) -> None:
        """Add a job of this front that has ended."""
        self._number += 1
        self._kept.append(ended_request_of(timeline, self._now(), self._number))
        self._added.set()

    def refuse(self, code: str) -> None:
        """Count a request that was refused with an error before it became a job."""
        self._refusals[code] += 1
        self._added.set()

    async def run(self) -> None:
        """Send the requests that end until cancelled, and all kept ones to a dispatcher that begins."""
        self._client.on_connect.append(self._wake)
        while True:
            await self._added.wait()
            self._added = trio.Event()
            if not await self._send():
                self._wake()
                await trio.sleep(RETRY_S)
            await trio.sleep(SEND_INTERVAL_S)

    async def requests(self, scope: RequestScope, query: RequestQuery) -> Requests:
        """See `BoardAccess`. Requests that have ended at other fronts may be missing for a moment."""
        await self._send()
        return msgspec.convert(await self._client.ask("requests", scope, query), Requests)

    async def people(self, scope: RequestScope) -> list[Person]:
        """See `BoardAccess`."""
        await self._send()
        return msgspec.convert(await self._client.ask("people", scope), list[Person])

    async def timings(self, scope: RequestScope, window: str) -> WindowTimings:
        """See `BoardAccess`."""
        if scope.tenant is not None:
            found = await self.requests(scope, RequestQuery(state="ended"))
            return own_timings(found.ended, window, self._now())
        await self._send()
        models = None if scope.models is None else sorted(scope.models)
        return msgspec.convert(await self._client.ask("timings", window, models), WindowTimings)

    def _wake(self) -> None:
        self._added.set()

    async def _send(self) -> bool:
        """Send what the dispatcher does not have; return whether it has answered."""
        run_id = self._client.run_id
        after = self._sent if run_id == self._run_id else -1
        ended = [request for request in self._kept if request.number > after]
        refusals, self._refusals = self._refusals, Counter()
        if not ended and not refusals:
            return True
        try:
            await self._client.ask("requests_ended", ended, dict(refusals))
        except NoNode:
            self._refusals.update(refusals)
            return False
        if not ended:
            return True
        if run_id == self._client.run_id:
            is_same = run_id == self._run_id
            self._sent = max(self._sent, ended[-1].number) if is_same else ended[-1].number
            self._run_id = run_id
        return True
