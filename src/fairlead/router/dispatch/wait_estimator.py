"""Estimates of waits: for waiting, possible and refused jobs, learned from past waits.

Calls the pure estimates (`estimates.py`) with the state of the queue, the seats and the time.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http import HTTPStatus
from random import Random
from typing import NamedTuple

import trio

from fairlead.base.config import QueueConfig
from fairlead.base.errors import FairleadError, QueueFull, QueueTimeout
from fairlead.router.dispatch.awaited_seats import AwaitedSeats
from fairlead.router.dispatch.estimates import (
    JobSize,
    MeanEstimate,
    QuantileEstimate,
    QuantilePrediction,
    RunningJob,
    WaitEstimate,
    retry_after_s,
)
from fairlead.router.dispatch.job_spec import REQUEST_TOKENS, JobSpec, line_of
from fairlead.router.dispatch.lengths import LengthPredictor, TokenWeights
from fairlead.router.dispatch.scheduling import SchedulerQueries
from fairlead.router.dispatch.ticket import Run, RunState, Ticket
from fairlead.router.dispatch.wait_survey import ModelWaits, SurveyedJob, SurveyedSeat, WaitSurvey, sampled
from fairlead.router.dispatch.waiter import Waiter

MAX_MODELS = 256  # models with a cached estimate
MAX_TOKENS = 2**47  # of a ticket; the queue takes no more
REUSED_FOR_S = 0.1  # how long refusals share an estimate
# With more jobs that wait and run, estimates share a survey: for so long for each of these jobs, and until a
# part of them have been queued or granted since. So surveys take a fixed, small part of the time, and a fixed
# time for each job.
EXACT_JOBS = 256
SURVEYED_S_PER_JOB = 60e-6
SURVEYED_CHANGES = 2  # half of the jobs


NO_SERVER_S = 20
"""The wait that retry times are made of while no server has the model."""


class Backlog(NamedTuple):
    """The number of jobs that wait for a model, and the estimated wait of the next one in seconds."""

    waiting: int
    wait_s: int


class WaitEstimator:
    """Estimates waits of waiting and future jobs, retry times of refused ones, and costs of running ones.

    scheduler: answers questions; nothing of it is changed.
    queue: the settings.
    random: spreads the retries of jobs that are refused together.
    paused_s: returns how long all nodes of a model are full for a tenant.

    Learns from each seat that is granted, lost (`requeued`) or released (`ended`). `mean` has the mean wait
    and service time of past jobs.
    """

    def __init__(
        self,
        scheduler: SchedulerQueries,
        queue: QueueConfig,
        random: Random,
        *,
        paused_s: Callable[[str, str], float] = lambda _model, _tenant: 0.0,
    ) -> None:
        self._scheduler = scheduler
        self._paused_s = paused_s
        self._random = random
        self._weights = TokenWeights(queue.prompt_weight, queue.output_weight)
        self._lengths = LengthPredictor()
        self.mean = MeanEstimate()
        self._quantile = QuantileEstimate() if queue.estimate == "quantile" else None
        self._predictions: dict[Ticket, QuantilePrediction] = {}  # as of each queued job's arrival
        # When each sequence that runs was granted its seat, and the waiter of its job; the oldest first.
        self._running: dict[Run, tuple[float, Waiter]] = {}
        self._paused: dict[Run, float] = {}  # how long each suspended sequence has run
        self._refusal_estimates: dict[str, tuple[float, WaitEstimate]] = {}  # by model: when made, and what
        self._survey: WaitSurvey | None = None
        # Of the survey, by model, place in its sample, and number of seats.
        self._predicted: dict[tuple[str, int, int], QuantilePrediction] = {}

    # Jobs ---------------------------------------------------------------------------------------------

    def new_ticket(self, job: JobSpec) -> Ticket:
        """Return a ticket with the cost and the cache tokens that the job will probably have."""
        generated = 0.0
        if not (job.is_embedding or job.has_no_tokens):
            generated = job.sequences * self._output_tokens(job)
        tokens = min(job.prompt_cache_tokens + round(generated), MAX_TOKENS)
        return Ticket(job, cost=self._cost(job, generated), tokens=tokens)

    def granted(self, waiter: Waiter) -> float:
        """Record that the job's latest sequences have got seats; return the time."""
        now = trio.current_time()
        for run in waiter.ticket.runs.values():
            if run.state is RunState.RUNNING and run not in self._running:
                self._running[run] = now - self._paused.pop(run, 0.0), waiter
        if self._survey is not None:
            self._survey.granted()
        return now

    def suspended(self, run: Run) -> None:
        """Record that a sequence has to pause, which does not count as service."""
        self._paused[run] = trio.current_time() - self._running.pop(run)[0]

    def requeued(self, waiter: Waiter) -> None:
        """Record that a job has lost its seats, and will wait for others."""
        for run in waiter.ticket.runs.values():
            self._running.pop(run, None)
            self._paused.pop(run, None)

    def waited(self, ticket: Ticket, waited_s: float) -> None:
        """Record how long a job waited for its first seat."""
        self.mean.granted(waited_s)
        prediction = self._predictions.pop(ticket, None)
        if prediction is not None and self._quantile is not None:
            self._quantile.granted(prediction, waited_s)

    def ended(self, waiter: Waiter) -> None:
        """Record that a job has ended, with a seat or without."""
        ticket = waiter.ticket
        self._predictions.pop(ticket, None)
        if not ticket.attempts:
            return
        generated = waiter.generated()
        if ticket.node is not None:
            job = ticket.job
            if generated:
                self._lengths.observe(job.tenant, job.model, generated // job.sequences)
            elif ticket.has_begun and not job.is_embedding:
                self._lengths.observe_silence(job.model)
        for index in list(ticket.runs):
            self.sequence_ended(waiter, index)

    def sequence_ended(self, waiter: Waiter, index: int) -> None:
        """Record that a sequence of a job, or all, is about to give its seats back."""
        ticket = waiter.ticket
        run = ticket.runs.get(index)
        if run is None:
            return
        self._paused.pop(run, None)
        if (entry := self._running.pop(run, None)) is None:
            return
        service_s = trio.current_time() - entry[0]
        self.mean.finished(service_s)
        # A request without tokens that was refused at once says nothing of how long others take.
        if self._quantile is not None and (ticket.has_begun or not ticket.job.has_no_tokens):
            self._quantile.finished(self._size_of_run(run, _tokens_of_each(waiter)), service_s)

    def cost(self, waiter: Waiter) -> float:
        """Return what a job has cost until now; 0 before its first delta."""
        if not waiter.ticket.has_begun:
            return 0.0
        return self._cost(waiter.ticket.job, waiter.generated())

    def _cost(self, job: JobSpec, generated: float) -> float:
        """Return the cost of a job that generates so many tokens."""
        if job.has_no_tokens:
            return self._weights.cost_without_tokens(REQUEST_TOKENS)
        return self._weights.cost(job.prompt_tokens, generated)

    def running(self) -> Iterator[Waiter]:
        """Iterate over the jobs that have seats, in the order in which they got their oldest one."""
        return iter(dict.fromkeys(waiter for _, waiter in self._running.values()))

    # Estimates ---------------------------------------------------------------------------------------

    def for_ticket(self, ticket: Ticket, *, is_arriving: bool = False) -> WaitEstimate:
        """Return a waiting job's estimate; the one of its arrival is later compared with its actual wait."""
        estimate = self._for_ticket(ticket, is_arriving=is_arriving)
        if not self._scheduler.is_served(ticket.job.model):
            return WaitEstimate(estimate.position, None)
        return _at_least(estimate, self._paused_s(ticket.job.model, ticket.job.tenant))

    def _for_ticket(self, ticket: Ticket, *, is_arriving: bool) -> WaitEstimate:
        if (survey := self._surveyed()) is not None:
            job = ticket.job
            if not is_arriving:
                return self._estimate_from(survey, job.model, survey.index_of(ticket), job.seats)
            index = survey.index_of_newcomer(job.tenant, job.priority, job.team)
            survey.queued(job)
            # Errors of waits at the same time are much alike, so a few are learned from.
            is_learned = survey.arrivals % (survey.size // EXACT_JOBS + 1) == 0
            arriving = ticket if is_learned else None
            return self._estimate_from(survey, job.model, index, job.seats, arriving=arriving)
        model, seats = ticket.job.model, ticket.job.seats
        arriving = ticket if is_arriving else None
        if self._quantile is None:
            jobs_ahead = partial(self._scheduler.jobs_ahead, ticket)
            return self._estimate(
                model, self._scheduler.position(ticket), jobs_ahead, seats, arriving=arriving
            )
        listed = self._scheduler.jobs_ahead(ticket)  # a prediction needs them all, so they are looked up once
        return self._estimate(model, len(_distinct(listed)), lambda: listed, seats, arriving=arriving)

    def for_newcomer(
        self, model: str, tenant: str, priority: int, seats: int = 1, *, team: str = ""
    ) -> WaitEstimate:
        """Return the estimate for a job that arrived now.

        model: the name of its model.
        tenant: whose turn it would take.
        priority: its class.
        seats: how many it would take.
        team: the tenant's team; empty: none.
        """
        paused_s = self._paused_s(model, tenant)
        if paused_s <= 0 and self._scheduler.has_free_seat(model, seats):
            return WaitEstimate(0, 0, None if self._quantile is None else 0)
        estimate = self._for_waiting(model, tenant, priority, seats, team)
        if not self._scheduler.is_served(model):
            return WaitEstimate(estimate.position, None)
        return _at_least(estimate, paused_s)

    def _for_waiting(self, model: str, tenant: str, priority: int, seats: int, team: str) -> WaitEstimate:
        """Return the estimate for a job that would have to wait."""
        if (survey := self._surveyed()) is not None:
            return self._estimate_from(survey, model, survey.index_of_newcomer(tenant, priority, team), seats)
        line = line_of(tenant, team)
        ahead = self._scheduler.jobs_ahead_of_newcomer(model, line, priority, seats) or []
        return self._estimate(model, len(_distinct(ahead)), lambda: ahead, seats)

    def behind_all(self, model: str) -> Backlog:
        """Return how many jobs wait for the model, and the estimated wait of one that came after all of them.

        The wait is 0 if a seat is free.
        """
        waiting = sum(job.model == model for job in self._scheduler.waiting_jobs())
        if self._scheduler.has_free_seat(model):
            return Backlog(waiting, 0)
        return Backlog(waiting, self._behind_all(model).estimated_wait_s or 0)

    def add_retry_time(self, error: FairleadError, model: str) -> FairleadError:
        """Return the error of a job for the model.

        An error that a retry may avoid gets a retry time, and the wait to expect then.
        """
        if error.status == HTTPStatus.TOO_MANY_REQUESTS or isinstance(error, QueueTimeout):
            if error.estimated_wait_s is None:
                behind_all = self._behind_all(model)
                error.queue_position = behind_all.position
                if self._scheduler.is_served(model):
                    error.estimated_wait_s = behind_all.estimated_wait_s
            wait_s = NO_SERVER_S if error.estimated_wait_s is None else error.estimated_wait_s
            error.retry_after_s = retry_after_s(wait_s, self._random)
            if isinstance(error, QueueFull):
                error.message += f"; try again in {error.retry_after_s} s"
        return error

    def _behind_all(self, model: str) -> WaitEstimate:
        """Return the estimate for a job for the model behind all waiting jobs.

        A flood of refusals needs it thousands of times a second, so it is kept for a moment.
        """
        if (survey := self._surveyed()) is not None:
            return self._estimate_from(survey, model, survey.waiting)
        now = trio.current_time()
        waiting = self._scheduler.waiting()
        made_at, estimate = self._refusal_estimates.get(model, (0.0, None))
        if estimate is None or estimate.position != waiting + 1 or now - made_at >= REUSED_FOR_S:
            estimate = self._estimate(model, waiting, self._scheduler.waiting_jobs)
            if len(self._refusal_estimates) >= MAX_MODELS:  # remote nodes may change their models
                self._refusal_estimates.clear()
            self._refusal_estimates[model] = now, estimate
        return estimate

    def _estimate(
        self,
        model: str,
        ahead: int,
        jobs_ahead: Callable[[], Sequence[JobSpec]],
        seats: int = 1,
        *,
        arriving: Ticket | None = None,
    ) -> WaitEstimate:
        """Return the estimate for a job that takes `seats` seats. A wait is at least one second.

        model: the name of its model.
        ahead: how many jobs leave before it, some of which wait for other seats.
        jobs_ahead: returns these jobs, each as often as it gets a turn before; called only if their number is
            not enough.
        seats: how many it takes on a node that has as many.
        arriving: the ticket with which a prediction is kept, to be compared with the actual wait.
        """
        now = trio.current_time()
        awaited = AwaitedSeats(model, self._scheduler.nodes())
        position = ahead + 1
        needed = awaited.needed_for(seats)
        if not awaited.are_awaited_by_all:
            competing = [job for job in jobs_ahead() if awaited.are_awaited_by(job.model)]
            ahead, jobs_ahead = len(_distinct(competing)), lambda: competing
        running = [
            (run, *entry)
            for run, entry in self._running.items()
            if run.ticket.node is not None and awaited.include(run.ticket.node.id)
        ]
        if self._quantile is None:
            if self._scheduler.has_wide_jobs():
                ahead = sum(size.seats for size in self._sizes_ahead(awaited, jobs_ahead()))
            running_s = [now - since for run, since, _ in running for _ in range(run.seats)]
            wait_s = self.mean.wait_s(ahead=ahead + needed - 1, seats=awaited.seats, running_s=running_s)
            return WaitEstimate(position, max(1, wait_s))
        prediction = self._quantile.predict(
            ahead=self._sizes_ahead(awaited, jobs_ahead()),
            running=[
                seat
                for run, since, waiter in running
                for seat in [self._running_job(run, waiter, now - since)] * run.seats
            ],
            seats=awaited.seats,
            needed=needed,
        )
        if arriving is not None:
            self._predictions[arriving] = prediction
        return WaitEstimate(
            position, max(1, math.ceil(prediction.wait_s)), max(1, math.ceil(prediction.p90_s))
        )

    def _sizes_ahead(self, awaited: AwaitedSeats, jobs: Sequence[JobSpec]) -> list[JobSize]:
        """Return the sizes of what takes seats before a job: each sequence, or whole jobs."""
        if awaited.by_sequence:
            return [self._size_of_turn(job, self._output_tokens(job)) for job in jobs]
        return [
            self._size(job, self._output_tokens(job), min(job.seats, awaited.most)) for job in _distinct(jobs)
        ]

    def _estimate_from(
        self, survey: WaitSurvey, model: str, index: int, seats: int = 1, *, arriving: Ticket | None = None
    ) -> WaitEstimate:
        """Return the estimate for a job with `index` others before it; see `_estimate`."""
        waits = survey.waits(model)
        awaited = waits.awaited
        needed = 1 if seats == 1 else awaited.needed_for(seats)
        if self._quantile is None:
            ahead, _ = waits.ahead_of(index)
            ahead += needed - 1
            wait_s = self.mean.wait_s(ahead=ahead, seats=awaited.seats, running_s=waits.running_s)
            return WaitEstimate(index + 1, max(1, wait_s))
        key = model, waits.place(index), needed
        prediction = self._predicted.get(key)
        if prediction is None:
            prediction = self._predicted[key] = self._quantile.predict_from(waits, index, needed)
        if arriving is not None:
            self._predictions[arriving] = prediction
        wait_s, p90_s = math.ceil(prediction.wait_s), math.ceil(prediction.p90_s)
        return WaitEstimate(index + 1, max(1, wait_s), max(1, p90_s))

    def _surveyed(self) -> WaitSurvey | None:
        """Return the survey of a large queue; None if there are so few jobs that each is looked at."""
        waiting = self._scheduler.waiting()
        if waiting + len(self._running) <= EXACT_JOBS:
            self._survey = None
            return None
        survey, now = self._survey, trio.current_time()
        if (
            survey is None
            or SURVEYED_CHANGES * (survey.arrivals + survey.grants) > survey.size
            or now - survey.made_at > SURVEYED_S_PER_JOB * survey.size
        ):
            self._survey = survey = self.new_survey()
            self._predicted.clear()
        return survey

    def new_survey(self) -> WaitSurvey:
        """Return a survey of the queue and the seats as they are now."""
        now, order = trio.current_time(), self._scheduler.queue_order()
        tickets, step = sampled(order.tickets)
        jobs = [ticket.job for ticket in tickets]
        nodes = self._scheduler.nodes()
        most = {
            model: AwaitedSeats(model, nodes).most for model in {job.model for job in jobs if job.seats > 1}
        }
        waiting = [
            SurveyedJob(job.model, job.seats, self._service_s(job, min(job.seats, most.get(job.model, 1))))
            for job in jobs
        ]
        running = [
            (
                run.seats,
                SurveyedSeat(run.ticket.node.id, now - since, self._remaining_s(run, waiter, now - since)),
            )
            for run, (since, waiter) in self._running.items()
            if run.ticket.node is not None
        ]
        taken = [seat for held, seat in running for _ in range(held)]

        def waits_for(model: str) -> ModelWaits:
            return ModelWaits(AwaitedSeats(model, self._scheduler.nodes()), taken, waiting, step)

        return WaitSurvey(now, order, len(running), waits_for)

    def _remaining_s(self, run: Run, waiter: Waiter, running_s: float) -> float:
        """Return how long its seats will probably be held; 0 if it is not predicted."""
        if self._quantile is None:
            return 0.0
        return self._quantile.remaining_s(self._running_job(run, waiter, running_s))

    def _service_s(self, job: JobSpec, seats: int) -> float:
        """Return how long a waiting job will probably hold so many seats; 0 if it is not predicted."""
        if self._quantile is None:
            return 0.0
        oldest_s = trio.current_time() - next(iter(self._running.values()))[0] if self._running else 0.0
        return self._quantile.service_s(self._size(job, self._output_tokens(job), seats), unknown_s=oldest_s)

    def _output_tokens(self, job: JobSpec, so_far: int = 0) -> float:
        """Return the predicted output tokens of each of the job's sequences."""
        return self._lengths.predict(job.tenant, job.model, so_far=so_far, max_tokens=job.max_tokens)

    def _size(self, job: JobSpec, output_tokens: float, seats: int) -> JobSize:
        """Return the size of a job with that many output tokens in each of its sequences."""
        if self._has_no_tokens(job):
            return JobSize(0, 0.0, seats, job.model)
        return JobSize(job.prompt_tokens, output_tokens * _in_turn(job, seats), seats)

    def _size_of_run(self, run: Run, output_tokens: float) -> JobSize:
        """Return the size of a sequence that runs, or of a whole job."""
        if run.is_whole:
            return self._size(run.ticket.job, output_tokens, run.seats)
        return self._size_of_turn(run.ticket.job, output_tokens)

    def _size_of_turn(self, job: JobSpec, output_tokens: float) -> JobSize:
        """Return the size of one of the job's sequences, which share the computation of their prompts."""
        if self._has_no_tokens(job):
            return JobSize(0, 0.0, 1, job.model)
        return JobSize(job.prompt_tokens // job.turns, output_tokens)

    def _has_no_tokens(self, job: JobSpec) -> bool:
        """Return whether nothing is known of the job's tokens, neither before nor after it has run."""
        return job.has_no_tokens or (not job.is_embedding and self._lengths.is_silent(job.model))

    def _running_job(self, run: Run, waiter: Waiter, running_s: float) -> RunningJob:
        so_far = _tokens_of_each(waiter)
        size = self._size_of_run(run, self._output_tokens(run.ticket.job, so_far))
        in_turn = _in_turn(run.ticket.job, run.seats) if run.is_whole else 1
        return RunningJob(size, running_s, so_far * in_turn)


def _at_least(estimate: WaitEstimate, wait_s: float) -> WaitEstimate:
    """Return an estimate of at least this wait."""
    least = math.ceil(wait_s)
    if estimate.estimated_wait_s is not None and least <= estimate.estimated_wait_s:
        return estimate
    p90_s = estimate.estimated_wait_p90_s
    return WaitEstimate(estimate.position, least, None if p90_s is None else max(least, p90_s))


def _distinct(jobs: Sequence[JobSpec]) -> list[JobSpec]:
    """Return each of the jobs once, in order."""
    return list({id(job): job for job in jobs}.values())


def _tokens_of_each(waiter: Waiter) -> int:
    """Return how many tokens each of the job's sequences that have begun has generated, on average."""
    job = waiter.ticket.job
    begun = job.sequences if job.is_embedding else max(1, job.turns - waiter.ticket.left)
    return waiter.generated() // begun


def _in_turn(job: JobSpec, seats: int) -> int:
    """Return how many of a job's sequences run one after another in each of its seats."""
    return 1 if job.is_embedding else -(-job.sequences // max(seats, 1))
