"""The scheduler on Trio: jobs that wait for a seat, and the timer that measures their waits.

A job is a task of this process (`seat`), or a `Waiter` that its owner submits and ends. It stays registered
until its owner ends it, a task in its own synchronous `finally`. So a grant to a task that was just cancelled
is never lost: the queue entry or seat that the task holds is released.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from math import ceil, inf
from random import Random
from typing import Any

import structlog
import trio
from msgspec.structs import asdict

from fairlead.base.config import QueueConfig
from fairlead.base.errors import (
    Cancelled,
    Displaced,
    FairleadError,
    ModelLoading,
    NodesFull,
    QueueFull,
    QueueTimeout,
)
from fairlead.base.grant import Grant
from fairlead.base.requester import Requester, who
from fairlead.base.sequence_seats import SequenceSeats
from fairlead.base.supervision import contain
from fairlead.router.dispatch.effects import PausedModel, SchedulerStatistics
from fairlead.router.dispatch.estimates import WaitEstimate
from fairlead.router.dispatch.held_sequences import HeldSequences
from fairlead.router.dispatch.idle_jobs import IdleJobs
from fairlead.router.dispatch.job_spec import JobSpec
from fairlead.router.dispatch.model_lifecycle import ModelLifecycle
from fairlead.router.dispatch.node_state import NodeState
from fairlead.router.dispatch.open_jobs import OpenJob, open_job_of
from fairlead.router.dispatch.ripening import Resting, Ripening
from fairlead.router.dispatch.schedulers import SCHEDULERS
from fairlead.router.dispatch.scheduling import SchedulingOptions
from fairlead.router.dispatch.swaps import STARVATION_SHARE
from fairlead.router.dispatch.ticket import Ticket, TicketState
from fairlead.router.dispatch.timer import Alarm, Timer
from fairlead.router.dispatch.wait_estimator import WaitEstimator
from fairlead.router.dispatch.waiter import HeldSeat, SeatLoss, Waiter, WaitingTask

CHARGE_INTERVAL_S = 1.0
# How long a node is the last to get jobs after one has failed there, unless another one begins.
FAILED_FOR_S = 10.0
# Of so many waiting jobs, the oldest ones, the list of open jobs has places and estimates.
POSITIONS_AT_MOST = 32

logger = structlog.get_logger("fairlead.dispatcher")


class DispatchStatistics(SchedulerStatistics, frozen=True):
    """The body of `GET /queue`: totals only."""

    mean_wait_s: float
    mean_service_s: float
    oldest_wait_s: float = 0.0


class Seat:
    """The right to run one job on the node `node_id`; after a failure, on another node.

    For a task of this process.
    """

    __slots__ = ("_dispatcher", "_waiter", "node_id")

    def __init__(self, dispatcher: "Dispatcher", waiter: WaitingTask, node_id: str) -> None:
        self.node_id = node_id
        self._dispatcher = dispatcher
        self._waiter = waiter

    @property
    def grant(self) -> Grant | None:
        """Its number, which engines require."""
        return self._waiter.grant

    @property
    def waited_s(self) -> float:
        """How long the job waited for its first seat."""
        return self._waiter.waited_s or 0.0

    @property
    def estimate(self) -> WaitEstimate | None:
        """The estimate of its wait, made when it arrived; None if it did not wait."""
        return self._waiter.estimate

    @property
    def sequences(self) -> SequenceSeats:
        """The seats of its sequences at its node."""
        return self._waiter.seats

    def begin(self, generated: Callable[[], int]) -> None:
        """Report the first delta. `generated` returns the number of tokens so far, which are charged."""
        self._waiter.count_generated = generated
        self._dispatcher.begun(self._waiter)

    def fail(self) -> None:
        """Report that the node has failed, and that the job will not be queued again."""
        self._dispatcher.node_failed(self._waiter)

    async def requeue(self, loss: SeatLoss) -> None:
        """Release the seat, because its node failed or is full after all, and wait for another.

        The job is queued before all others of its class, is charged for one attempt, and keeps its first
        deadline until it has begun. Raises what `Dispatcher.seat` raises while waiting, and `NoOtherNode`;
        the block must end then.
        """
        self._waiter.wait_again()
        self._dispatcher.requeue(self._waiter, loss)
        self.node_id = await self._waiter.wait()


class Dispatcher:
    """Assigns seats to jobs: the `Effects` of its scheduler. `run` runs its timer.

    queue: the settings.
    random: spreads load and retries; None: random numbers.
    rejects_loading: a job for a model that is not loaded is refused, but the model is loaded all the same.
    scheduler: a name in `SCHEDULERS`. Raises `ConfigError` if it is unknown.
    epoch: part of every grant; `next_grant` is the grant that will be given next.

    Nodes and models report their events to the attribute `scheduler`. `models` keeps load requests, and
    `estimator` estimates waits.
    """

    def __init__(
        self,
        queue: QueueConfig,
        *,
        random: Random | None = None,
        rejects_loading: bool = False,
        scheduler: str = "default",
        epoch: int = 0,
    ) -> None:
        self._queue = queue
        random = random or Random()  # noqa: S311  # spreads load and retries, not for secrets
        make_scheduler = SCHEDULERS.find(scheduler, "scheduler")
        self.scheduler = make_scheduler(self, SchedulingOptions(queue, random, rejects_loading))
        self._timer = Timer()
        # Must be below the queue timeout, or jobs expire before they count as starving.
        self._starvation_s = STARVATION_SHARE * min(queue.starvation_bound_s, queue.timeout_s)
        self.models = ModelLifecycle(self.scheduler, self._timer, starvation_s=self._starvation_s)
        self.estimator = WaitEstimator(self.scheduler, queue, random, paused_s=self._paused_s)
        self._ripening = Ripening(self.scheduler, self._timer, queue)
        self._resting = Resting(self.scheduler, self._timer, queue)
        self.next_grant = Grant(epoch, 1)
        self._waiters: dict[Ticket, Waiter] = {}
        self._by_id: dict[str, Waiter] = {}
        self._idle = IdleJobs(self.scheduler)
        self._pauses: dict[PausedModel, tuple[float, Alarm]] = {}  # of models that are full: their ends
        self._failed: dict[str, Alarm] = {}  # nodes that failed lately, each with the alarm that ends this
        self._closing: dict[str, trio.Event] = {}  # closed nodes that still have jobs

    def raise_epoch(self, epoch: int) -> None:
        """Use a higher epoch for the next grants."""
        self.next_grant = Grant(max(epoch, self.next_grant.epoch), self.next_grant.number)

    async def run(self) -> None:
        """Run the timer and charge for generated tokens, until cancelled. A failing alarm stops no other."""
        self._timer.at(trio.current_time() + CHARGE_INTERVAL_S, self._charge_regularly)
        while True:
            await contain("deadlines", self._timer.run)

    @asynccontextmanager
    async def seat(self, job: JobSpec) -> AsyncIterator[Seat]:
        """Wait for a seat, hold it during the block, and release it however the block ends.

        Raises at once: `QueueFull`, `NoQueue`, `ModelLoading`, `ContextLengthExceeded`, `Draining`. Raises
        while waiting: `Displaced`, `LoadFailed`, `ContextLengthExceeded`, `Draining`, and what `unload` or
        `remove_model` was given. Raises `QueueTimeout` while waiting, and for a stream until `Seat.begin`.
        Raises what `cancel` was given at any time.
        """
        waiter = WaitingTask(self.new_ticket(job), self.sequence_ended)
        with waiter.scope:
            try:
                self.submit(waiter)
                yield Seat(self, waiter, await waiter.wait())
            finally:
                self.end(waiter)
                waiter.seats.close()
        if waiter.error is not None:
            raise waiter.error

    def new_ticket(self, job: JobSpec) -> Ticket:
        """Return a ticket for a job, with its expected cost."""
        return self.estimator.new_ticket(job)

    def submit(self, waiter: Waiter, *, age_s: float = 0.0) -> None:
        """Submit a job that arrived `age_s` seconds ago. Its result may be there before this returns."""
        self._add(waiter, age_s)
        job, ticket = waiter.ticket.job, waiter.ticket
        if job.when_idle:
            self._idle.add(waiter)
            self._fill_idle_seats()
            return
        self.scheduler.submit(ticket, too_long=self._too_long(job))
        if ticket.state is TicketState.QUEUED:
            waiter.estimate = self.estimator.for_ticket(ticket, is_arriving=True)
            self._ripening.hurry()
        self._set_alarm(waiter, waiter.arrived_at + self._starvation_s)
        if waiter.error is not None:
            self._load_if_refused(waiter)
        self._make_way(ticket)

    def restore(self, waiter: Waiter, seat: HeldSeat, *, age_s: float) -> None:
        """Give a job of an earlier dispatcher the seat that it holds, without a grant."""
        self._add(waiter, age_s)
        waiter.waited_s, waiter.grant = seat.waited_s, seat.grant
        if seat.has_begun:
            self.scheduler.first_delta(waiter.ticket)
        held = seat.sequences
        if held.begun is None and seat.grant is not None:
            held = HeldSequences(seat.grant.seats)
        charged = self.estimator.cost(waiter)
        self.scheduler.restore(waiter.ticket, seat.node_id, held, charged=charged)
        self.estimator.granted(waiter)
        for run in waiter.ticket.runs.values():
            self._ripening.add(waiter, run)
        if waiter.ticket.job.when_idle:
            self._idle.restore(waiter)
        self._set_alarm(waiter, waiter.arrived_at + self._starvation_s)

    def begun(self, waiter: Waiter) -> None:
        """Record that the first delta of a job's answer has come."""
        if waiter.begun_at is None:
            waiter.begun_at = trio.current_time()
        self.scheduler.first_delta(waiter.ticket)

    def node_failed(self, waiter: Waiter) -> None:
        """Record that a job has failed at its node; see `Seat.fail`."""
        self._expect_recovery(waiter.ticket)
        self.scheduler.node_failed(waiter.ticket)

    def requeue(self, waiter: Waiter, loss: SeatLoss) -> None:
        """Release the job's seat, and submit it again; see `Seat.requeue`."""
        ticket = waiter.ticket
        self.estimator.requeued(waiter)
        match loss.cause:
            case "full":
                self.scheduler.rejected_by_node(ticket, loss.full_for_s, is_limit=loss.is_limit)
            case "unsuited":
                self._expect_recovery(ticket)
                self.scheduler.unsuited(ticket)
            case "stale":
                self.scheduler.stale(ticket)
            case "failed":
                self._expect_recovery(ticket)
                self.scheduler.requeued(ticket)
        self._set_alarm(waiter, trio.current_time() + self._starvation_s)
        self._make_way(ticket)

    def end(self, waiter: Waiter) -> None:
        """Release all that an ended job holds. Synchronous, so that no other task runs in between."""
        if waiter.alarm is not None:
            waiter.alarm.drop()
        ticket = waiter.ticket
        del self._waiters[ticket]
        if self._by_id.get(ticket.job.request_id) is waiter:
            del self._by_id[ticket.job.request_id]
        self.estimator.ended(waiter)
        self._idle.discard(waiter)
        self.scheduler.finished(ticket, cost=self.estimator.cost(waiter))
        self._fill_idle_seats()

    def suspend(self, ticket: Ticket, index: int) -> None:
        """Have a sequence pause."""
        self.estimator.suspended(ticket.runs[index])
        self._waiters[ticket].paused(index, is_paused=True)

    def resume(self, ticket: Ticket, index: int) -> None:
        """Have a suspended sequence go on."""
        waiter = self._waiters[ticket]
        self.estimator.granted(waiter)
        self._ripening.add(waiter, ticket.runs[index])
        waiter.paused(index, is_paused=False)

    def sequence_ended(self, waiter: Waiter, index: int) -> None:
        """Give the seat of a sequence to another one, because it has ended before its job."""
        self.estimator.sequence_ended(waiter, index)
        self.scheduler.sequence_ended(waiter.ticket, index)

    def charge_running(self) -> None:
        """Charge the running jobs for what they have generated so far."""
        for waiter in self.estimator.running():
            self.scheduler.charge(waiter.ticket, self.estimator.cost(waiter))

    async def estimate(self, model: str, tenant: str, priority: int, team: str = "") -> dict[str, Any]:
        """Return the fields of the `WaitEstimate` for a new job."""
        return asdict(self.estimator.for_newcomer(model, tenant, priority, team=team))

    async def waiting(self, request_id: str) -> WaitEstimate | None:
        """Return the current estimate of a waiting job; None if it does not wait (any more)."""
        return self.estimate_of(request_id)

    async def cancel(
        self, request_id: str, by: Requester, *, others: frozenset[str] | None = frozenset()
    ) -> bool:
        """End this waiting or running job with `Cancelled`. Return False if there is none that `by` may end.

        A job of the same owner may be ended, and those of others for the models in `others`; None: for all.
        """
        return self.stop_job(request_id, by, others=others)

    def estimate_of(self, request_id: str) -> WaitEstimate | None:
        """See `waiting`; for callers that are not tasks."""
        waiter = self._by_id.get(request_id)
        if waiter is None or waiter.ticket.state is not TicketState.QUEUED:
            return None
        return self.estimator.for_ticket(waiter.ticket)

    def stop_job(
        self, request_id: str, by: Requester, *, others: frozenset[str] | None = frozenset()
    ) -> bool:
        """See `cancel`; for callers that are not tasks."""
        waiter = self._by_id.get(request_id)
        if waiter is None:
            return False
        job = waiter.ticket.job
        if job.owner != by.owner and others is not None and job.model not in others:
            return False
        logger.info("request cancelled", cancelled=request_id, model=job.model, **who(by))
        self.stop(waiter.ticket, Cancelled("the request was cancelled"))
        return True

    def unload(
        self,
        model: str,
        error: FairleadError | None = None,
        *,
        waiting: FairleadError | None = None,
        by: Requester | None = None,
    ) -> None:
        """Stop a local model once its running jobs have finished.

        model: its name.
        error: ends the running jobs at once; None: they finish first.
        waiting: ends the jobs and load requests that wait for it; None: they wait for its next load.
        by: who has requested it.
        """
        self.models.unload_is_requested(model, by)
        if error is not None:
            for ticket in self._waiters:
                node = ticket.node
                if node is not None and node.limits.evictable and model in node.models:
                    self.stop(ticket, error)
        self.scheduler.unload(model, waiting)

    def close_node(self, node_id: str) -> trio.Event:
        """Give a remote node no more jobs; return an event that is set when it has none."""
        event = self._closing.setdefault(node_id, trio.Event())
        self.scheduler.close_node(node_id)
        return event

    def statistics(self) -> DispatchStatistics:
        """Return the totals now."""
        return DispatchStatistics(
            **asdict(self.scheduler.statistics()),
            mean_wait_s=self.estimator.mean.mean_wait_s,
            mean_service_s=self.estimator.mean.mean_service_s,
            oldest_wait_s=round(self._oldest_wait_s(), 3),
        )

    def open_jobs(self) -> list[OpenJob]:
        """Return the jobs that wait or run, in the order in which they arrived."""
        now, positions = trio.current_time(), 0
        found = []
        for waiter in self._waiters.values():
            estimate = None
            if waiter.ticket.state is TicketState.QUEUED and positions < POSITIONS_AT_MOST:
                positions += not waiter.ticket.job.when_idle
                estimate = self.estimator.for_ticket(waiter.ticket)
            found.append(open_job_of(waiter, now, estimate))
        return found

    def _oldest_wait_s(self) -> float:
        """Return how long the job waits that waits longest; 0 if none does. Jobs are in order of arrival."""
        for waiter in self._waiters.values():
            if waiter.ticket.state is TicketState.QUEUED and not waiter.ticket.job.when_idle:
                return trio.current_time() - waiter.arrived_at
        return 0.0

    # Effects of the scheduler ------------------------------------------------------------------------

    def grant(self, ticket: Ticket) -> None:
        """Give the job its seats, with a number of its own."""
        waiter = self._waiters[ticket]
        now = self.estimator.granted(waiter)
        if waiter.waited_s is None:
            waiter.waited_s = now - waiter.arrived_at
            self.estimator.waited(ticket, waiter.waited_s)
        self._ripening.add(waiter, ticket.runs[0])
        grant, seats = self._new_grant(), ticket.seats
        waiter.grant = grant if seats == 1 else Grant(grant.epoch, grant.number, seats)
        waiter.granted()

    def start(self, ticket: Ticket, index: int) -> None:
        """Give the job a seat for another sequence, with a grant of its own."""
        waiter = self._waiters[ticket]
        self.estimator.granted(waiter)
        self._ripening.add(waiter, ticket.runs[index])
        waiter.started(index, self._new_grant())

    def _new_grant(self) -> Grant:
        grant = self.next_grant
        self.next_grant = Grant(grant.epoch, grant.number + 1)
        return grant

    def refuse(self, ticket: Ticket, error: FairleadError) -> None:
        """Give the job its error, with a retry time if a retry may avoid it."""
        waiter = self._waiters[ticket]
        waiter.refused(self._note(waiter, error))

    def stop(self, ticket: Ticket, error: FairleadError) -> None:
        """End the job with this error, wherever it is."""
        waiter = self._waiters[ticket]
        waiter.stopped(self._note(waiter, error))

    def seats_freed(self, node_id: str, number: int) -> None:
        """Report after a quantum that seats which are idle since now have been idle for as long."""
        self._resting.add(node_id, number)

    def pause(self, pause: PausedModel, pause_s: float) -> None:
        """End a pause of a full model after this time."""
        if (earlier := self._pauses.pop(pause, None)) is not None:
            earlier[1].drop()

        def end() -> None:
            del self._pauses[pause]
            self.scheduler.resume(pause)

        ends_at = trio.current_time() + pause_s
        self._pauses[pause] = ends_at, self._timer.at(ends_at, end)

    def node_closed(self, node_id: str) -> None:
        """Wake the tasks that wait until the node has no jobs."""
        if (event := self._closing.pop(node_id, None)) is not None:
            event.set()

    # Jobs for idle seats -----------------------------------------------------------------------------

    def _fill_idle_seats(self) -> None:
        """Submit the jobs that wait for idle seats, one for each such seat."""
        while (waiter := self._idle.next()) is not None:
            waiter.arrived_at = trio.current_time()
            self.scheduler.submit(waiter.ticket)
            self._load_if_refused(waiter)

    def _make_way(self, ticket: Ticket) -> None:
        """Stop jobs in idle seats for a job that waits."""
        if self._idle and ticket.state is TicketState.QUEUED and not ticket.job.when_idle:
            for waiter in self._idle.displace(ticket.job):
                self.stop(waiter.ticket, Displaced("another request needs the seat"))

    # Clocks and costs --------------------------------------------------------------------------------

    def _too_long(self, job: JobSpec) -> QueueFull | None:
        """Return an error if the estimate of the job's wait exceeds its limit or `queue.maxEstimatedWait`.

        A 429 now is better than a 504 in a minute. The estimate follows the tenant's turn: a tenant that
        floods the queue is refused, while other tenants still get in.
        """
        most_s = min(self._queue.max_estimated_wait_s or inf, job.wait_limit_s or inf)
        if most_s == inf:
            return None
        estimate = self.estimator.for_newcomer(job.model, job.tenant, job.priority, job.seats, team=job.team)
        wait_s = estimate.estimated_wait_s
        if wait_s is None or wait_s <= most_s:
            return None
        message = f"the wait would be about {wait_s} s, and the request may wait no longer than {most_s:g} s"
        return QueueFull(message, estimated_wait_s=wait_s, queue_position=estimate.position)

    def _add(self, waiter: Waiter, age_s: float) -> None:
        waiter.arrived_at = trio.current_time() - age_s
        # A job for idle seats waits until its owner ends it.
        is_limited = not waiter.ticket.job.when_idle
        waiter.deadline = waiter.arrived_at + self._timeout_s(waiter.ticket) if is_limited else inf
        self._waiters[waiter.ticket] = self._by_id[waiter.ticket.job.request_id] = waiter

    def _set_alarm(self, waiter: Waiter, starves_at: float = inf) -> None:
        """Set the alarm for what comes next: a queued job starves, or the deadline of its wait passes."""
        state = waiter.ticket.state
        if state is TicketState.DONE or waiter.ticket.job.when_idle:
            return
        if waiter.alarm is not None:
            waiter.alarm.drop()
        if state is TicketState.QUEUED and starves_at < waiter.deadline:
            waiter.alarm = self._timer.at(starves_at, partial(self._starve, waiter))
        else:
            waiter.alarm = self._timer.at(waiter.deadline, partial(self._end_wait, waiter))

    def _starve(self, waiter: Waiter) -> None:
        self._set_alarm(waiter)
        self.scheduler.starved(waiter.ticket)

    def _end_wait(self, waiter: Waiter) -> None:
        waiter.deadline = inf
        message = f"the request waited longer than {self._timeout_s(waiter.ticket):g} s"
        model = waiter.ticket.job.model
        if not self.scheduler.is_served(model):
            message += f": no server of the model {model} is up"
        late: FairleadError = QueueTimeout(message)
        if waiter.ticket.state is TicketState.QUEUED:
            late = self.scheduler.full_error(waiter.ticket.job) or late
        self.scheduler.deadline(waiter.ticket, late)

    def _timeout_s(self, ticket: Ticket) -> float:
        return min(self._queue.timeout_s, ticket.job.wait_limit_s or inf)

    def _note(self, waiter: Waiter, error: FairleadError) -> FairleadError:
        """Return the error with a retry time, if a retry may avoid it; the job keeps its first error."""
        job = waiter.ticket.job
        if isinstance(error, NodesFull):
            error.retry_after_s = max(1, ceil(self._paused_s(job.model, job.tenant)))
        else:
            error = self.estimator.add_retry_time(error, job.model)
        waiter.error = waiter.error or error
        return error

    def _load_if_refused(self, waiter: Waiter) -> None:
        """Start the load although the job is refused; without a queue nothing would ever load."""
        cannot_wait = isinstance(waiter.error, ModelLoading)
        cannot_wait |= isinstance(waiter.error, QueueFull) and not self._queue.capacity
        job = waiter.ticket.job
        if cannot_wait and self.scheduler.must_load(job):
            self.models.request(job.model)

    def _expect_recovery(self, ticket: Ticket) -> None:
        """Count the job's node as failed for a while; another failure restarts the time."""
        assert ticket.node is not None
        node_id = ticket.node.id
        if (earlier := self._failed.pop(node_id, None)) is not None:
            earlier.drop()

        def end() -> None:
            del self._failed[node_id]
            self.scheduler.recovered(node_id)

        self._failed[node_id] = self._timer.at(trio.current_time() + FAILED_FOR_S, end)

    def _paused_s(self, model: str, tenant: str) -> float:
        """Return the time until a job of the tenant may try one of the model's nodes; 0 if it may now."""
        if not self._pauses:
            return 0.0
        nodes = [node for node in self.scheduler.nodes() if model in node.models and not node.is_closed]
        ends = [max(self._pause_ends(node, model, tenant), default=-inf) for node in nodes]
        return max(0.0, min(ends, default=0.0) - trio.current_time())

    def _pause_ends(self, node: NodeState, model: str, tenant: str) -> Iterator[float]:
        full = node.full.get(model)
        for whose in full.waits_for(tenant) if full is not None else ():
            pause = self._pauses.get(PausedModel(node.id, model, whose))
            if pause is not None:
                yield pause[0]

    def _charge_regularly(self) -> None:
        self._timer.at(trio.current_time() + CHARGE_INTERVAL_S, self._charge_regularly)
        self.charge_running()
        if self._idle:
            # Nodes may have come up, and jobs that wait may lack cache memory rather than a seat.
            waiting = (ticket for ticket in self._waiters if ticket.state is TicketState.QUEUED)
            for ticket in {
                ticket.job.model: ticket for ticket in waiting if not ticket.job.when_idle
            }.values():
                self._make_way(ticket)
            self._fill_idle_seats()
