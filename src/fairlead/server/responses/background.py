"""Responses that are generated in the background: without their clients, which may come back for them.

A run has a caller of its own, whose nursery is not that of the HTTP request. All work for it happens there,
by the same functions as for other requests. Clients read only what the store has, so a slow one holds no
memory, and one that leaves changes nothing.
"""

from collections.abc import Awaitable, Callable

import msgspec
import trio

from fairlead.base.errors import Cancelled, Draining, FairleadError, NotStarted
from fairlead.base.formats.server_sent_events import split_events
from fairlead.base.job import Job
from fairlead.base.requester import Requester
from fairlead.base.supervision import FailureBoundary, hide_bug, keep_running, log_failure
from fairlead.dialects.dialect import AnswerContext, WaitingComments
from fairlead.dialects.openai.common import encode
from fairlead.dialects.responses.events import ResponseEvents, response_object
from fairlead.generation.caller import Caller
from fairlead.generation.event_stream import CutStream, is_large
from fairlead.generation.job_service import JobService
from fairlead.generation.offload import Offload
from fairlead.generation.pending import PendingAnswer
from fairlead.router.dispatch.estimates import WaitEstimate
from fairlead.server.responses.archive import ResponseArchive
from fairlead.server.responses.keeping import document_of
from fairlead.server.responses.store import ResponseStore, StoredResponse

EXPIRE_INTERVAL_S = 10.0
# That a reader gets in one piece. A larger event is a piece of its own, which all readers share.
EVENTS_AT_ONCE = 64
EVENT_BYTES_AT_ONCE = 16 * 1024

_comments = WaitingComments()


class BackgroundRuns:
    """The runs in progress, while the application is served. At its end they are cancelled."""

    def __init__(self, jobs: JobService, store: ResponseStore, archive: ResponseArchive) -> None:
        self._jobs = jobs
        self._store = store
        self._archive = archive
        self._nursery: trio.Nursery | None = None
        self._scope = trio.CancelScope()
        self._runs: dict[StoredResponse, BackgroundRun] = {}

    def __len__(self) -> int:
        return len(self._runs)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run what is opened until `stop`. Meanwhile remove responses that have expired, and write others."""
        async with trio.open_nursery() as writing:
            writing.start_soon(keep_running, "kept responses", self._archive.run)
            try:
                with self._scope:
                    async with trio.open_nursery() as self._nursery:
                        task_status.started()
                        while True:
                            self._store.expire(trio.current_time())
                            await trio.sleep(EXPIRE_INTERVAL_S)
            finally:
                await self._archive.finish()  # shielded, with a limit of time
            writing.cancel_scope.cancel()

    def stop(self) -> None:
        """Cancel all runs."""
        self._scope.cancel()

    async def open(self, caller: Caller) -> Caller:
        """Return the caller of a new run: the same client, with a nursery that its leaving does not cancel.

        The run takes the answer as it comes, whatever the client reads. Who opens it begins it, or cancels
        its nursery. Raises `NotStarted`, and `Draining` where a response would end before it can be read.
        """
        if self._jobs.services.draining():
            raise Draining("background: the server is about to stop")
        if self._nursery is None or self._scope.cancel_called:
            raise NotStarted("background: the application's lifespan does not run")
        nursery: trio.Nursery = await self._nursery.start(_hold)
        return msgspec.structs.replace(caller, nursery=nursery, streams=True, unread=None)

    def begin(
        self,
        nursery: trio.Nursery,
        response: StoredResponse,
        context: AnswerContext,
        pending: PendingAnswer,
    ) -> None:
        """Begin a response; its job was started in the nursery."""
        run = BackgroundRun(self._store, nursery, response, context, self._jobs.offload)
        self._runs[response] = run
        run.begin()
        nursery.start_soon(self._follow, run, pending)

    async def cancel(self, response: StoredResponse, by: Requester) -> None:
        """End a response of the requester, if it is in progress; return when it has ended."""
        run = self._runs.get(response)
        if run is None:
            return
        if not await self._jobs.services.gateway.cancel(run.job.request_id, by):
            run.cancel()
        await run.ended.wait()

    def events(self, response: StoredResponse, first: int) -> "StoredEvents":
        """Return the events of a response from the index `first` on, until its end."""
        return StoredEvents(
            response,
            self._runs.get(response),
            first,
            waiting=self._jobs.services.gateway.waiting,
            settle=self._archive.settle,
        )

    async def _follow(self, run: "BackgroundRun", pending: PendingAnswer) -> None:
        try:
            await run.follow(pending)
        finally:
            del self._runs[run.response]
            run.leave()


class BackgroundRun:
    """One response in progress, from its job's deltas to the store.

    `ended` is set when it has ended. `changed` is replaced by a new event each time that it is set.

    store: Keeps the response and its events.
    nursery: Where all work for it runs.
    response: The response in the store.
    context: Of its answer.
    offload: Has the threads for large pieces.
    """

    def __init__(
        self,
        store: ResponseStore,
        nursery: trio.Nursery,
        response: StoredResponse,
        context: AnswerContext,
        offload: Offload,
    ) -> None:
        self.response = response
        self.ended = trio.Event()
        self.changed = trio.Event()
        self._store = store
        self._nursery = nursery
        self._context = context
        self._offload = offload
        self._writer = ResponseEvents(context)
        self._is_cancelled = False

    @property
    def job(self) -> Job:
        """The job that answers it."""
        return self._context.job

    def begin(self) -> None:
        """Make the response known, as queued."""
        self.response.on_removed = self.cancel
        self._store.set_document(self.response, encode(response_object(self._context, "queued")))
        self._add(self._writer.queue())

    def cancel(self) -> None:
        """End the run, and with it the response."""
        self._is_cancelled = True
        self._nursery.cancel_scope.cancel()

    async def follow(self, pending: PendingAnswer) -> None:
        """Write the answer to the store until it ends."""
        try:
            deltas = (await pending.get()).deltas
            self._store.set_document(self.response, encode(response_object(self._context, "in_progress")))
            while taken := await deltas.take():
                if is_large(taken):
                    write = self._offload.write_piece
                    tenant = self.job.tenant
                    # Not abandoned: `leave` uses the writer next.
                    self._add(await write(tenant, self._writer.write, taken, abandons=False))
                else:
                    self._add(self._writer.write(taken))
            self._end(self._writer.end())
        except Exception as error:  # noqa: BLE001  # even our own bugs must end the response
            self._fail(hide_bug(error))

    def leave(self) -> None:
        """End what `follow` did not, and all tasks of the run."""
        if not self.ended.is_set():
            kind = Cancelled if self._is_cancelled else FairleadError
            self._fail(kind("the response was cancelled"))
        self._nursery.cancel_scope.cancel()

    def _fail(self, error: FairleadError) -> None:
        self._end(self._writer.fail(error, "cancelled" if isinstance(error, Cancelled) else "failed"))

    def _end(self, events: bytes) -> None:
        self._add(events)
        self._store.end(self.response, document_of(events), trio.current_time())
        self.ended.set()
        self._wake()

    def _add(self, events: bytes) -> None:
        if self.response.keeps_events and events:
            self._store.append(self.response, split_events(events))
            self._wake()

    def _wake(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


class StoredEvents:
    """The body for one reader of a response's events. Holds no resources.

    It ends with the response; it is cut if the response is removed before.

    response: The response in the store.
    run: The response in progress; None: it has ended.
    first: The index of the first event.
    waiting: Returns the estimate of a job's wait, by its request id; None: it is not queued.
    settle: Waits until an ended response can be found everywhere.
    """

    def __init__(
        self,
        response: StoredResponse,
        run: BackgroundRun | None,
        first: int,
        *,
        waiting: Callable[[str], Awaitable[WaitEstimate | None]],
        settle: Callable[[StoredResponse], Awaitable[None]],
    ) -> None:
        self._response = response
        self._run = run
        self._next = first
        self._waiting = waiting
        self._settle = settle

    def __aiter__(self) -> "StoredEvents":
        return self

    async def __anext__(self) -> bytes:
        response = self._response
        while not self._is_gone():
            if events := self._next_events(response.events):
                self._next += len(events)
                if response.has_ended:
                    await self._settle(response)
                    if self._is_gone():  # the store has refused it
                        break
                return b"".join(events)  # of one event: that event itself
            if response.has_ended or self._run is None:
                raise StopAsyncIteration
            with trio.move_on_after(_comments.interval_s):
                await self._run.changed.wait()
                continue
            job = self._run.job
            return _comments.write(await self._waiting(job.request_id), job.model)
        raise CutStream

    def _is_gone(self) -> bool:
        return self._response.is_gone

    def _next_events(self, events: list[bytes]) -> list[bytes]:
        found: list[bytes] = []
        size = 0
        for event in events[self._next : self._next + EVENTS_AT_ONCE]:
            size += len(event)
            if found and size > EVENT_BYTES_AT_ONCE:
                break
            found.append(event)
        return found


async def _hold(task_status: trio.TaskStatus[trio.Nursery]) -> None:
    """Keep a nursery open until it is cancelled. A failure in it does not end other runs."""
    boundary = FailureBoundary()
    with boundary:
        async with trio.open_nursery() as nursery:
            task_status.started(nursery)
            await trio.sleep_forever()
    if boundary.failure is not None:
        log_failure("background response failed", boundary.failure)
