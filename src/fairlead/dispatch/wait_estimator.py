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

from fairlead.config import QueueConfig
from fairlead.dispatch.awaited_seats import AwaitedSeats
from fairlead.dispatch.estimates import (
    JobSize,
    MeanEstimate,
    QuantileEstimate,
    QuantilePrediction,
    RunningJob,
    WaitEstimate,
    retry_after_s,
)
from fairlead.dispatch.job_spec import JobSpec
from fairlead.dispatch.lengths import LengthPredictor, TokenWeights
from fairlead.dispatch.scheduling import SchedulerQueries
from fairlead.dispatch.ticket import Ticket
from fairlead.dispatch.wait_survey import ModelWaits, SurveyedSeat, WaitSurvey, sampled
from fairlead.dispatch.waiter import Waiter
from fairlead.errors import FairleadError, QueueFull, QueueTimeout

MAX_MODELS = 256  # models with a cached estimate
MAX_TOKENS = 2**47  # of a ticket; the queue takes no more
REUSED_FOR_S = 0.1  # how long refusals share an estimate
# With more jobs that wait and run, estimates share a survey: for so long for each of these jobs, and until a
# part of them have been queued or granted since. So surveys take a fixed, small part of the time, and a fixed
# time for each job.
EXACT_JOBS = 256
SURVEYED_S_PER_JOB = 60e-6
SURVEYED_CHANGES = 2  # half of the jobs


class Backlog(NamedTuple):
    """The number of jobs that wait for a model, and the estimated wait of the next one in seconds."""

    waiting: int
    wait_s: int


class WaitEstimator:
    """Estimates waits of waiting and future jobs, retry times of refused ones, and costs of running ones.

    Learns from each seat that is granted, lost (`requeued`) or released (`ended`). Queries the scheduler
    without changing it. `random` spreads the retries of jobs that are refused together. `mean` has the mean
    wait and service time of the last jobs.
    """

    def __init__(self, scheduler: SchedulerQueries, queue: QueueConfig, random: Random) -> None:
        self._scheduler = scheduler
        self._random = random
        self._weights = TokenWeights(queue.prompt_weight, queue.output_weight)
        self._lengths = LengthPredictor()
        self.mean = MeanEstimate()
        self._quantile = QuantileEstimate() if queue.estimate == "quantile" else None
        self._predictions: dict[Ticket, QuantilePrediction] = {}  # as of each queued job's arrival
        self._running: dict[Ticket, tuple[float, Waiter]] = {}  # grant time, waiter; the oldest first
        self._refusal_estimates: dict[str, tuple[float, WaitEstimate]] = {}  # by model: when made, and what
        self._survey: WaitSurvey | None = None
        # Of the survey, by model and place in its sample.
        self._predicted: dict[tuple[str, int], QuantilePrediction] = {}

    # Jobs ---------------------------------------------------------------------------------------------

    def new_ticket(self, job: JobSpec) -> Ticket:
        """Return a ticket with the cost and the cache tokens that the job will probably have."""
        generated = 0.0 if job.is_embedding else job.sequences * self._output_tokens(job)
        tokens = min(job.prompt_cache_tokens + round(generated), MAX_TOKENS)
        return Ticket(job, cost=self._weights.cost(job.prompt_tokens, generated), tokens=tokens)

    def granted(self, waiter: Waiter) -> float:
        """Record that a job has got a seat; return the time."""
        now = trio.current_time()
        self._running[waiter.ticket] = now, waiter
        if self._survey is not None:
            self._survey.granted()
        return now

    def requeued(self, waiter: Waiter) -> None:
        """Record that a job has lost its seat, and will wait for another."""
        del self._running[waiter.ticket]

    def waited(self, ticket: Ticket, waited_s: float) -> None:
        """Record how long a job waited for its first seat."""
        self.mean.granted(waited_s)
        prediction = self._predictions.pop(ticket, None)
        if prediction is not None and self._quantile is not None:
            self._quantile.granted(prediction, waited_s)

    def ended(self, waiter: Waiter) -> None:
        """Record that a job has ended, with a seat or without."""
        self._predictions.pop(waiter.ticket, None)
        if (entry := self._running.pop(waiter.ticket, None)) is None:
            return
        job, service_s = waiter.ticket.job, trio.current_time() - entry[0]
        self.mean.finished(service_s)
        generated = waiter.generated()
        longest = generated // job.sequences
        if generated:
            self._lengths.observe(job.tenant, job.model, longest)
        if self._quantile is not None:
            self._quantile.finished(JobSize(job.prompt_tokens, longest), service_s)

    def cost(self, waiter: Waiter) -> float:
        """Return what a job has cost until now; 0 before its first delta."""
        if not waiter.ticket.has_begun:
            return 0.0
        return self._weights.cost(waiter.ticket.job.prompt_tokens, waiter.generated())

    def running(self) -> Iterator[Waiter]:
        """Iterate over the jobs that have a seat, in the order in which they got it."""
        return (waiter for _, waiter in self._running.values())

    # Estimates ---------------------------------------------------------------------------------------

    def for_ticket(self, ticket: Ticket, *, is_arriving: bool = False) -> WaitEstimate:
        """Return a waiting job's estimate; the one of its arrival is later compared with its actual wait."""
        if (survey := self._surveyed()) is not None:
            job = ticket.job
            if not is_arriving:
                return self._estimate_from(survey, job.model, survey.index_of(ticket))
            index = survey.index_of_newcomer(job.tenant, job.priority)
            survey.queued(job)
            # Errors of waits at the same time are much alike, so a few are learned from.
            is_learned = survey.arrivals % (survey.size // EXACT_JOBS + 1) == 0
            return self._estimate_from(survey, job.model, index, arriving=ticket if is_learned else None)
        arriving = ticket if is_arriving else None
        if self._quantile is None:
            jobs_ahead = partial(self._scheduler.jobs_ahead, ticket)
            return self._estimate(
                ticket.job.model, self._scheduler.position(ticket), jobs_ahead, arriving=arriving
            )
        listed = self._scheduler.jobs_ahead(ticket)  # a prediction needs them all, so they are looked up once
        return self._estimate(ticket.job.model, len(listed), lambda: listed, arriving=arriving)

    def for_newcomer(self, model: str, tenant: str, priority: int) -> WaitEstimate:
        """Return the estimate for a job of this tenant and class if it arrived now."""
        if self._scheduler.has_free_seat(model):
            return WaitEstimate(0, 0, None if self._quantile is None else 0)
        if (survey := self._surveyed()) is not None:
            return self._estimate_from(survey, model, survey.index_of_newcomer(tenant, priority))
        ahead = self._scheduler.jobs_ahead_of_newcomer(model, tenant, priority) or []
        return self._estimate(model, len(ahead), lambda: ahead)

    def behind_all(self, model: str) -> Backlog:
        """Return how many jobs wait for the model, and the estimated wait of one that came after all of them.

        The wait is 0 if a seat is free.
        """
        waiting = sum(job.model == model for job in self._scheduler.waiting_jobs())
        if self._scheduler.has_free_seat(model):
            return Backlog(waiting, 0)
        return Backlog(waiting, self._behind_all(model).estimated_wait_s)

    def add_retry_time(self, error: FairleadError, model: str) -> FairleadError:
        """Return the error of a job for the model.

        An error that a retry may avoid gets a retry time, and the wait to expect then.
        """
        if error.status == HTTPStatus.TOO_MANY_REQUESTS or isinstance(error, QueueTimeout):
            if error.estimated_wait_s is None:
                behind_all = self._behind_all(model)
                error.estimated_wait_s = behind_all.estimated_wait_s
                error.queue_position = behind_all.position
            error.retry_after_s = retry_after_s(error.estimated_wait_s, self._random)
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
        *,
        arriving: Ticket | None = None,
    ) -> WaitEstimate:
        """Return the estimate for a job behind `ahead` others, some of which wait for other seats.

        `jobs_ahead` is called only if the number of jobs is not enough. A wait is at least one second. The
        prediction is kept with the `arriving` ticket, to be compared with its actual wait.
        """
        now = trio.current_time()
        awaited = AwaitedSeats(model, self._scheduler.nodes())
        position = ahead + 1
        if not awaited.are_awaited_by_all:
            competing = [job for job in jobs_ahead() if awaited.are_awaited_by(job.model)]
            ahead, jobs_ahead = len(competing), lambda: competing
        running = [
            entry
            for ticket, entry in self._running.items()
            if ticket.node is not None and awaited.include(ticket.node.id)
        ]
        if self._quantile is None:
            running_s = [now - since for since, _ in running]
            wait_s = self.mean.wait_s(ahead=ahead, seats=awaited.seats, running_s=running_s)
            return WaitEstimate(position, max(1, wait_s))
        prediction = self._quantile.predict(
            ahead=[JobSize(job.prompt_tokens, self._output_tokens(job)) for job in jobs_ahead()],
            running=[self._running_job(waiter, now - since) for since, waiter in running],
            seats=awaited.seats,
        )
        if arriving is not None:
            self._predictions[arriving] = prediction
        return WaitEstimate(
            position, max(1, math.ceil(prediction.wait_s)), max(1, math.ceil(prediction.p90_s))
        )

    def _estimate_from(
        self, survey: WaitSurvey, model: str, index: int, *, arriving: Ticket | None = None
    ) -> WaitEstimate:
        """Return the estimate for a job with `index` others before it; see `_estimate`."""
        waits = survey.waits(model)
        if self._quantile is None:
            ahead, _ = waits.ahead_of(index)
            wait_s = self.mean.wait_s(ahead=ahead, seats=waits.seats_awaited, running_s=waits.running_s)
            return WaitEstimate(index + 1, max(1, wait_s))
        place = waits.place(index)
        prediction = self._predicted.get((model, place))
        if prediction is None:
            prediction = self._predicted[model, place] = self._quantile.predict_from(waits, index)
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
        models = [ticket.job.model for ticket in tickets]
        services_s = [self._service_s(ticket.job) for ticket in tickets]
        taken = [
            SurveyedSeat(ticket.node.id, now - since, self._remaining_s(waiter, now - since))
            for ticket, (since, waiter) in self._running.items()
            if ticket.node is not None
        ]

        def waits_for(model: str) -> ModelWaits:
            awaited = AwaitedSeats(model, self._scheduler.nodes())
            return ModelWaits(awaited, taken, models, services_s, step)

        return WaitSurvey(now, order, len(taken), waits_for)

    def _remaining_s(self, waiter: Waiter, running_s: float) -> float:
        """Return how long a running job will probably hold its seat; 0 if it is not predicted."""
        if self._quantile is None:
            return 0.0
        return self._quantile.remaining_s(self._running_job(waiter, running_s))

    def _service_s(self, job: JobSpec) -> float:
        """Return how long a waiting job will probably hold its seat; 0 if it is not predicted."""
        if self._quantile is None:
            return 0.0
        oldest_s = trio.current_time() - next(iter(self._running.values()))[0] if self._running else 0.0
        return self._quantile.service_s(
            JobSize(job.prompt_tokens, self._output_tokens(job)), unknown_s=oldest_s
        )

    def _output_tokens(self, job: JobSpec, so_far: int = 0) -> float:
        """Return the predicted output tokens of each of the job's sequences."""
        return self._lengths.predict(job.tenant, job.model, so_far=so_far, max_tokens=job.max_tokens)

    def _running_job(self, waiter: Waiter, running_s: float) -> RunningJob:
        job = waiter.ticket.job
        so_far = waiter.generated() // job.sequences
        return RunningJob(JobSize(job.prompt_tokens, self._output_tokens(job, so_far)), running_s, so_far)
