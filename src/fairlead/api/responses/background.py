"""Responses that are generated in the background: without their clients, which may come back for them.

A run has a nursery in place of its request's exchange. All work for the request happens there, in the same
tasks as for any other request. Clients only read what the store has, so a slow one holds no memory, and one
that leaves changes nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import trio

from fairlead.api.dialects.dialect import COMMENT_INTERVAL_S, AnswerContext
from fairlead.api.dialects.openai import encode
from fairlead.api.dialects.openai_responses_events import ResponseEvents, response_object
from fairlead.api.errors import public_error
from fairlead.api.job_service import JobService
from fairlead.api.pending import PendingAnswer
from fairlead.api.request import CutStream, Request
from fairlead.api.responses.keeping import document_of
from fairlead.api.responses.store import ResponseStore, StoredResponse
from fairlead.api.sse import is_large
from fairlead.errors import Cancelled, FairleadError, NotStarted
from fairlead.http.server_sent_events import encode_comment, split_events
from fairlead.job import Job
from fairlead.supervision import FailureBoundary, log_failure

EXPIRE_INTERVAL_S = 10.0
EVENTS_AT_ONCE = 64  # that a reader is sent in one piece


class BackgroundRuns:
    """The runs in progress, while the application is served. At its end they are cancelled."""

    def __init__(self, jobs: JobService, store: ResponseStore) -> None:
        self._jobs = jobs
        self._store = store
        self._nursery: trio.Nursery | None = None
        self._runs: dict[StoredResponse, BackgroundRun] = {}

    def __len__(self) -> int:
        return len(self._runs)

    async def run(self) -> None:
        """Run what is opened until `stop`, and remove expired responses, which nobody may ask for again."""
        async with trio.open_nursery() as self._nursery:
            while True:
                self._store.expire(trio.current_time())
                await trio.sleep(EXPIRE_INTERVAL_S)

    def stop(self) -> None:
        """Cancel all runs."""
        assert self._nursery is not None
        self._nursery.cancel_scope.cancel()

    async def open(self) -> "BackgroundRun":
        """Return a run, which ends with `BackgroundRun.cancel` if it does not begin. Raises `NotStarted`."""
        if self._nursery is None:
            raise NotStarted("background: the application's lifespan does not run")
        run = BackgroundRun(self._store)
        await self._nursery.start(self._hold, run)
        return run

    def begin(self, run: "BackgroundRun", response: StoredResponse, job: Job, pending: PendingAnswer) -> None:
        """Begin a response, whose job has been started in the run's nursery."""

    def of(self, response: StoredResponse) -> "BackgroundRun | None":
        """Return the run of a response in progress."""
        return self._runs.get(response)
