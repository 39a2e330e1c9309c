"""One job from start to end: take a seat, generate, give the seat back. Read this first.

`serve` runs in the nursery of the job's HTTP exchange. It calls `started()` when the first delta is there, so
until then a refusal is a plain exception with a real status. After that the route reads the deltas at its
client's pace, while this task holds the seat for exactly as long as the node works. A slow client holds no
seat. When a client disconnects, the nursery is cancelled, which unwinds everything below.

A failed node is replaced without an error for the client if nothing of the answer was sent, or if exactly the
rest of it can be sent.

At its end a job is counted here, and passed to `on_finished` for logs and traces.
"""

import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec
import structlog
import trio

from fairlead.base.errors import (
    FairleadError,
    NodeFailed,
    NodeFull,
    NodeLimited,
    NodesFull,
    NodesLimited,
    NodeUnsuited,
    NoOtherNode,
    RequestTimeout,
    StaleGrant,
)
from fairlead.base.grant import Grant
from fairlead.base.job import Job, portions_of
from fairlead.base.requester import Requester
from fairlead.base.sequence_seats import SequenceSeats
from fairlead.generation.metrics.job_metrics import JobMetrics, JobStatistics
from fairlead.generation.timeline import LEFT, SUCCESS, RequestTimeline
from fairlead.nodes.node import GrammarNode, Node
from fairlead.nodes.streams.attempt import Attempt, reader_of, retry_sink
from fairlead.nodes.streams.deltas import Deltas
from fairlead.nodes.streams.sink import Sink
from fairlead.router.dispatch.estimates import WaitEstimate
from fairlead.router.dispatch.job_spec import JobSpec
from fairlead.router.dispatch.prefixes import prefix_hashes
from fairlead.router.dispatch.waiter import SeatLoss

# A node that rejects the job does not count as an attempt: it is full, its set-up does not serve the job, or
# the grant is stale.
ATTEMPTS = 2

PREPARATION_S = 30.0
"""How long a job waits for its grammar to be compiled before it is queued all the same."""

logger = structlog.get_logger("fairlead.generation.gateway")


class JobSeat(Protocol):
    """The right to run one job on a node; see `dispatch.dispatcher.Seat`."""

    @property
    def node_id(self) -> str:
        """The id of its node."""

    @property
    def grant(self) -> Grant | None:
        """Its number, which engines require."""

    @property
    def sequences(self) -> SequenceSeats:
        """The seats of its sequences at its node."""

    @property
    def waited_s(self) -> float:
        """How long the job waited for its first seat."""

    @property
    def estimate(self) -> WaitEstimate | None:
        """The estimate of its wait, made when it arrived; None if it did not wait."""

    def begin(self, generated: Callable[[], int]) -> None:
        """Report the first delta."""

    def fail(self) -> None:
        """Report that the node has failed, and that the job will not be queued again."""

    async def requeue(self, loss: SeatLoss, /) -> None:
        """Release the seat, because its node failed or is full after all, and wait for another."""


class SeatSource(Protocol):
    """The dispatcher: in this process, or the connection to it."""

    def seat(self, job: JobSpec, /) -> AbstractAsyncContextManager[JobSeat]:
        """Wait for a seat, and hold it during the block; see `Dispatcher.seat`."""

    async def waiting(self, request_id: str) -> WaitEstimate | None:
        """Return the current estimate of a waiting job; None if it does not wait (any more)."""

    async def cancel(
        self, request_id: str, by: Requester, *, others: frozenset[str] | None = frozenset()
    ) -> bool:
        """End this waiting or running job with `Cancelled`; see `Dispatcher.cancel`."""


class NodeSource(Protocol):
    """The nodes that are up."""

    def __len__(self) -> int:
        """Return their number."""

    def find(self, node_id: str) -> Node:
        """Return a node. Raises `NodeFailed` if it is not up."""

    def serving(self, model: str) -> Iterable[Node]:
        """Return the nodes that have the model."""


class Answer(msgspec.Struct, frozen=True):
    """What the route gets at the first delta.

    deltas: the answer.
    waited_s: how long the job has waited for its seat.
    estimated_wait_s: what was estimated when it was queued; None: it was not queued.
    estimated_wait_p90_s: the same with a probability of 90 %.
    queue_position: its place when it was queued; None: it was not.
    """

    deltas: Deltas
    waited_s: float
    estimated_wait_s: int | None = None
    estimated_wait_p90_s: int | None = None
    queue_position: int | None = None


class Gateway:
    """Serves jobs.

    dispatcher: grants seats.
    nodes: has the nodes of the seats.
    request_timeout_s: how long a job may take from its first seat on; the queue limits the wait before that.
    on_finished: called with each job's timeline when it is over. It must not raise.
    """

    def __init__(
        self,
        dispatcher: SeatSource,
        nodes: NodeSource,
        *,
        request_timeout_s: float,
        on_finished: Callable[[RequestTimeline], None] = lambda _timeline: None,
    ) -> None:
        self._dispatcher = dispatcher
        self._nodes = nodes
        self._request_timeout_s = request_timeout_s
        self._on_finished = on_finished
        self._metrics = JobMetrics()
        self._running: set[_RunningJob] = set()

    async def serve(
        self,
        job: Job,
        *,
        seated: Callable[[], Awaitable[None]] | None = None,
        task_status: trio.TaskStatus[Answer] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Run the job; report its `Answer` at the first delta.

        `seated` is called when the job has its seat, and may still refuse it by a `FairleadError`.

        Raises a `FairleadError` before that, never after: later failures go through the deltas.
        """
        running = _RunningJob(job, self._nodes, task_status)
        self._running.add(running)
        try:
            if job.sampling.grammar is not None:
                await self._prepare(job)
            # One node needs no hashes: there is no choice.
            spec = spec_of(job, with_prefixes=len(self._nodes) > 1)
            async with self._dispatcher.seat(spec) as seat:
                running.timeline.granted_s = trio.current_time()
                if seated is not None:
                    await seated()
                with trio.move_on_after(self._request_timeout_s) as clock:
                    await running.run(seat)
                if clock.cancelled_caught:
                    raise RequestTimeout(f"the request ran longer than {self._request_timeout_s:g} s")
            running.timeline.outcome = SUCCESS
        except FairleadError as error:
            running.timeline.outcome, running.timeline.problem = error.code, error.message
            if not running.has_begun:
                raise
            running.deltas.fail(error)
        except Exception:
            running.timeline.outcome = FairleadError.code  # our own bug; the client gets no details
            raise
        finally:
            self._running.discard(running)
            timeline = running.end()
            self._metrics.add(timeline)
            self._on_finished(timeline)

    async def _prepare(self, job: Job) -> None:
        """Have the job's grammar compiled where it may run, so that it holds no seat meanwhile.

        A node that comes up later, or that is down now, compiles it when the job has its seat.
        """
        with trio.move_on_after(PREPARATION_S):
            for node in self._nodes.serving(job.model):
                if isinstance(node, GrammarNode):
                    with contextlib.suppress(NodeFailed):
                        await node.prepare(job)

    def statistics(self) -> JobStatistics:
        """Return the totals of all jobs, with what running jobs have generated so far."""
        return self._metrics.statistics(job.current_timeline() for job in self._running)

    async def waiting(self, request_id: str) -> WaitEstimate | None:
        """Return the position and estimate of a queued job; None if it is not queued."""
        return await self._dispatcher.waiting(request_id)

    async def cancel(
        self, request_id: str, by: Requester, *, others: frozenset[str] | None = frozenset()
    ) -> bool:
        """End a queued or running job with an error. Return False if there is none that `by` may end.

        `others`: the models for which it may end jobs of other keys; None: all.
        """
        return await self._dispatcher.cancel(request_id, by, others=others)


class _RunningJob:
    """One job in progress: its timeline, and its channel, which outlives the attempts that write to it."""

    def __init__(self, job: Job, nodes: NodeSource, task_status: trio.TaskStatus[Answer]) -> None:
        self.deltas = Deltas(job.sequences, keeps=job.stream and _is_repeatable(job))
        self.timeline = RequestTimeline(job, arrived_s=trio.current_time(), began_at_ns=time.time_ns())
        self.has_begun = False
        self._job = job
        self._nodes = nodes
        self._task_status = task_status

    async def run(self, seat: JobSeat) -> None:
        """Attempt the job until its answer is over.

        Raises the error of the last attempt; if all nodes have refused it because of their own set-up, the
        answer of the first one.
        """
        into: Sink = self.deltas
        failures = 0
        full: NodeFull | None = None
        unsuited: FairleadError | None = None  # the first such answer
        while (error := await self._attempt(seat, into)) is not None:
            if not isinstance(error, NodeFailed):
                raise error
            loss = _loss(error)
            failures += loss.cause == "failed"
            attempts = ATTEMPTS if self._job.may_be_repeated else 1
            another = retry_sink(self.deltas, reader_of(self._job)) if failures < attempts else None
            # A node that rejects a job has not failed, and may do this many times.
            log = logger.debug if loss.cause in ("full", "stale") else logger.warning
            log("attempt failed", node=seat.node_id, reason=error.message, retries=another is not None)
            if isinstance(error, NodeFull):
                full = error
            elif isinstance(error, NodeUnsuited):
                unsuited = unsuited or error.answer
            if another is None:
                if loss.cause in ("failed", "unsuited"):
                    seat.fail()
                raise unsuited if isinstance(error, NodeUnsuited) and unsuited is not None else error
            into = another
            try:
                await seat.requeue(loss)
            except NoOtherNode:
                raise (unsuited or error) from None
            except NodesFull as late:
                raise late if full is None else _as_told(late, full) from None

    def current_timeline(self) -> RequestTimeline:
        """Return the timeline as it is now."""
        self.timeline.tokens = self.deltas.tokens
        return self.timeline

    def end(self) -> RequestTimeline:
        """Close and return the timeline. A disconnect after the whole answer counts as a success."""
        if self.timeline.outcome == LEFT and len(self.deltas.finish_reasons) == self._job.sequences:
            self.timeline.outcome = SUCCESS
        self.timeline.ended_s = trio.current_time()
        self.timeline.finish_reasons = tuple(self.deltas.finish_reasons)
        self.timeline.cached_tokens = self.deltas.prompt_cached_tokens(self._job.n)
        return self.current_timeline()

    async def _attempt(self, seat: JobSeat, into: Sink) -> FairleadError | None:
        """Run one attempt on the seat's node; return the error that ended it, None if the answer is over."""
        attempt = Attempt(into)
        self.timeline.attempts += 1
        self.timeline.node = seat.node_id
        try:
            node = self._nodes.find(seat.node_id)
            async with node.generate(self._job, attempt, grant=seat.grant, seats=seat.sequences):
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

    def _begin(self, seat: JobSeat) -> None:
        self.has_begun = True
        self.timeline.first_delta_s = trio.current_time()
        seat.begin(lambda: self.deltas.tokens)
        self._task_status.started(_answer(self.deltas, seat))


def _loss(error: NodeFailed) -> SeatLoss:
    """Return why the attempt's seat is given back."""
    match error:
        case NodeFull():
            return SeatLoss("full", error.retry_after_s, isinstance(error, NodeLimited))
        case NodeUnsuited():
            return SeatLoss("unsuited")
        case StaleGrant():
            return SeatLoss("stale")
    return SeatLoss()


def _as_told(late: NodesFull, full: NodeFull) -> NodesFull:
    """Return the error of a wait that is over, with what the full node has answered to this job itself."""
    kind = NodesLimited if isinstance(full, NodeLimited) else NodesFull
    return kind(full.message, retry_after_s=late.retry_after_s)


def _is_repeatable(job: Job) -> bool:
    """Return whether the job, run again, gives the same answer."""
    return job.sampling.temperature == 0 or job.sampling.seed is not None


def _answer(deltas: Deltas, seat: JobSeat) -> Answer:
    wait = seat.estimate
    if wait is None:
        return Answer(deltas, seat.waited_s)
    return Answer(deltas, seat.waited_s, wait.estimated_wait_s, wait.estimated_wait_p90_s, wait.position)


def spec_of(job: Job, *, with_prefixes: bool = False) -> JobSpec:
    """Return what the scheduler needs of a job; `with_prefixes`: also the hashes of its prompt."""
    relay = job.relay
    prompt = job.prompts[0] if job.prompts else b"" if relay is None else relay.body
    return JobSpec(
        request_id=job.request_id,
        tenant=job.tenant,
        model=job.model,
        owner=job.owner,
        priority=job.priority,
        no_queue=job.no_queue,
        wait_limit_s=job.wait_limit_s,
        stream=job.stream,
        prompt_tokens=job.prompt_tokens,
        longest_prompt=max(map(len, job.prompts), default=0),
        prompt_cache_tokens=job.prompt_tokens_at_once,
        sequences=job.sequences,
        max_tokens=job.sampling.max_tokens,
        is_embedding=job.embed,
        portions=len(portions_of(job.prompts)) if job.embed else 1,
        prefixes=prefix_hashes(prompt, job.cache_owner) if with_prefixes else (),
        body_bytes=None if relay is None else relay.size,
        must_be_relayed=relay is not None and not job.prompts,
        needs_own_node=job.needs_own_node,
        has_no_tokens=job.has_no_tokens,
        when_idle=job.when_idle,
        team=job.team,
        team_weight=job.team_weight,
    )
