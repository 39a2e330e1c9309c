"""One job from start to end: take a seat, generate, give the seat back. Read this first.

`serve` runs in the nursery of the job's HTTP exchange. It calls `started()` when the first delta is there, so
until then a refusal is a plain exception with a real status. After that the route reads the deltas at its
client's pace, while this task holds the seat for exactly as long as the node works. A slow client holds no
seat. When a client disconnects, the nursery is cancelled, which unwinds everything below.

A node that fails is replaced without the client noticing, as long as the client has nothing of the answer, or
can get exactly what follows on what it has.

At its end a job is counted here, and passed to `on_finished` for logs and traces.
"""

import time
from collections.abc import Callable

import msgspec
import structlog
import trio

from fairlead.answer.attempt import Attempt, retry_sink
from fairlead.answer.deltas import Deltas
from fairlead.answer.sink import Sink
from fairlead.dispatch.dispatcher import Dispatcher
from fairlead.dispatch.forecast import Forecast
from fairlead.dispatch.seat import Seat
from fairlead.errors import Cancelled, FairleadError, NodeFailed, NodeFull, RequestTimeout
from fairlead.job import Job
from fairlead.job_metrics import JobMetrics, JobStatistics
from fairlead.request_timeline import LEFT, SUCCESS, RequestTimeline

# A node that turns out to be full does not count as an attempt.
ATTEMPTS = 2

logger = structlog.get_logger("fairlead.gateway")


class Answer(msgspec.Struct, frozen=True):
    """What the route gets at the first delta. A job that was not queued has no estimate and no position."""

    deltas: Deltas
    waited_s: float
    estimated_wait_s: int | None = None
    estimated_wait_p90_s: int | None = None
    queue_position: int | None = None


class Gateway:
    """Serves jobs. `request_timeout_s` runs from a job's first seat; the queue limits the wait before that.

    `on_finished` is called with each job's timeline when it is over. It must not raise.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        request_timeout_s: float,
        on_finished: Callable[[RequestTimeline], None] = lambda _journey: None,
    ) -> None:
        self._dispatcher = dispatcher
        self._request_timeout_s = request_timeout_s
        self._on_finished = on_finished
        self._tally = JobMetrics()
        self._under_way: set[_Service] = set()

    async def serve(
        self, job: Job, *, task_status: trio.TaskStatus[Answer] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run the job; report its `Answer` at the first delta.

        Raises a `FairleadError` before that, never after: later failures go through the deltas.
        """
        service = _Service(job, task_status)
        self._under_way.add(service)
        try:
            async with self._dispatcher.seat(job) as seat:
                service.journey.granted_s = trio.current_time()
                with trio.move_on_after(self._request_timeout_s) as clock:
                    await service.run(seat)
                if clock.cancelled_caught:
                    raise RequestTimeout(f"the request ran longer than {self._request_timeout_s:g} s")
            service.journey.outcome = SUCCESS
        except FairleadError as error:
            service.journey.outcome = error.code
            if not service.has_begun:
                raise
            service.deltas.fail(error)
        except Exception:
            service.journey.outcome = FairleadError.code  # our own bug; the client gets no details
            raise
        finally:
            self._under_way.discard(service)
            journey = service.end()
            self._tally.add(journey)
            self._on_finished(journey)

    def statistics(self) -> JobStatistics:
        """Return the totals of all jobs, with what running jobs have generated so far."""
        return self._tally.statistics(service.look() for service in self._under_way)

    def waiting(self, request_id: str) -> Forecast | None:
        """Return the position and estimate of a queued job; None if it is not queued."""
        return self._dispatcher.waiting(request_id)

    def cancel(self, request_id: str, owner: str) -> bool:
        """End a queued or running job of this owner with an error. Return False if there is none."""
        return self._dispatcher.cancel(request_id, owner, Cancelled("the request was cancelled"))


class _Service:
    """One job under way: its timeline, and its channel, which outlives the attempts that write to it."""

    def __init__(self, job: Job, task_status: trio.TaskStatus[Answer]) -> None:
        self.deltas = Deltas(job.sequences, keeps=job.stream and _is_repeatable(job))
        self.journey = RequestTimeline(job, arrived_s=trio.current_time(), began_at_ns=time.time_ns())
        self.has_begun = False
        self._job = job
        self._task_status = task_status

    async def run(self, seat: Seat) -> None:
        """Attempt the job until its answer is over. Raises the error if it fails for good."""
        into: Sink = self.deltas
        failures = 0
        while (error := await self._attempt(seat, into)) is not None:
            if not isinstance(error, NodeFailed):
                raise error
            is_full = isinstance(error, NodeFull)
            failures += not is_full
            attempts = ATTEMPTS if self._job.may_be_repeated else 1
            another = retry_sink(self.deltas) if failures < attempts else None
            # A node that turns out to be full has not failed, and may report this many times.
            say = logger.debug if is_full else logger.warning
            say("attempt failed", node=seat.node.id, reason=error.message, goes_on=another is not None)
            if another is None:
                raise error
            into = another
            await seat.another(is_full=is_full, full_for_s=error.retry_after_s)

    def look(self) -> RequestTimeline:
        """Return the timeline as it is now."""
        self.journey.tokens = self.deltas.tokens
        return self.journey

    def end(self) -> RequestTimeline:
        """Close and return the timeline. A disconnect after the whole answer counts as a success."""
        if self.journey.outcome == LEFT and len(self.deltas.finish_reasons) == self._job.sequences:
            self.journey.outcome = SUCCESS
        self.journey.ended_s = trio.current_time()
        self.journey.finish_reasons = tuple(self.deltas.finish_reasons)
        return self.look()

    async def _attempt(self, seat: Seat, into: Sink) -> FairleadError | None:
        """Run one attempt on the seat's node; return the error that ended it, None if the answer is over."""
        attempt = Attempt(into)
        self.journey.attempts += 1
        self.journey.node = seat.node.id
        try:
            async with seat.node.generate(self._job, attempt):
                with attempt.scope:
                    if not self.has_begun:
                        await self.deltas.started()
                        self._begin(seat)
                    await self.deltas.ended()
        except FairleadError as error:
            attempt.fail(error)
        finally:
            attempt.close()
        return None if self.deltas.is_over else attempt.error

    def _begin(self, seat: Seat) -> None:
        self.has_begun = True
        self.journey.first_delta_s = trio.current_time()
        seat.begin(lambda: self.deltas.tokens)
        self._task_status.started(_answer(self.deltas, seat))


def _is_repeatable(job: Job) -> bool:
    """Return whether the job, run again, gives the same answer."""
    return job.sampling.temperature == 0 or job.sampling.seed is not None


def _answer(deltas: Deltas, seat: Seat) -> Answer:
    told = seat.forecast
    if told is None:
        return Answer(deltas, seat.waited_s)
    return Answer(deltas, seat.waited_s, told.estimated_wait_s, told.estimated_wait_p90_s, told.position)
