"""Predictions of costs and waits, which learn from the jobs that were granted and finished.

Knows tickets and which estimate the configuration selects; no queue and no clock.
"""

import math
from collections.abc import Callable, Sequence

import msgspec

from fairlead.config import QueueConfig
from fairlead.dispatch import estimate
from fairlead.dispatch.estimate import JobSize, MeanEstimate, QuantileEstimate, RunningJob
from fairlead.dispatch.lengths import LengthPredictor, TokenWeights
from fairlead.dispatch.ticket import Ticket
from fairlead.job import Job


class Forecast(msgspec.Struct, frozen=True):
    """A waiting job's position (1 is next) and wait in whole seconds. Only `quantile` has a P90."""

    position: int
    estimated_wait_s: int
    estimated_wait_p90_s: int | None = None


class Running(msgspec.Struct, frozen=True):
    """A job that holds a seat since `granted_at`, and how many tokens it has generated."""

    job: Job
    granted_at: float
    generated: int


class Forecaster:
    """Learns from every granted and every finished job."""

    def __init__(self, queue: QueueConfig) -> None:
        self.weights = TokenWeights(queue.prompt_weight, queue.output_weight)
        self._lengths = LengthPredictor()
        self._mean = MeanEstimate()
        self._quantile = QuantileEstimate() if queue.estimate == "quantile" else None
        self._foretold: dict[Ticket, estimate.Forecast] = {}

    @property
    def mean_wait_s(self) -> float:
        """Mean wait of the last jobs that were granted a seat."""
        return self._mean.mean_wait_s

    @property
    def mean_service_s(self) -> float:
        """Mean time the last jobs held their seats."""
        return self._mean.mean_service_s

    @property
    def wants_jobs_ahead(self) -> bool:
        """Whether the estimate needs the jobs ahead, not only their number."""
        return self._quantile is not None

    def ticket(self, job: Job) -> Ticket:
        """Return a ticket with the cost and the cache tokens that the job will probably have."""
        generated = 0.0 if job.embed else job.sequences * self._predict(job)
        tokens = job.prompt_tokens_at_once + round(generated)
        return Ticket(job, cost=self.weights.cost(job.prompt_tokens, generated), tokens=tokens)

    def foretell(
        self,
        *,
        position: int,
        ahead: int,
        jobs_ahead: Callable[[], Sequence[Job]],
        running: Callable[[], Sequence[Running]],
        running_s: Sequence[float],
        seats: int,
        now: float,
        ticket: Ticket | None = None,
    ) -> Forecast:
        """Return the forecast for a job at a position; it is kept with `ticket`, to learn from.

        `ahead` of the jobs before it wait for the same `seats`. The `running` jobs hold these, and have run
        for `running_s`, the longest first. `jobs_ahead` and `running` are called only by an estimate that
        looks at each job. A wait is at least one second.
        """
        if self._quantile is None:
            wait_s = self._mean.wait_s(ahead=ahead, seats=seats, running_s=running_s)
            return Forecast(position, max(1, wait_s))
        told = self._quantile.forecast(
            ahead=[JobSize(job.prompt_tokens, self._predict(job)) for job in jobs_ahead()],
            running=[self._running(each, now) for each in running()],
            seats=seats,
        )
        if ticket is not None:
            self._foretold[ticket] = told
        return Forecast(position, max(1, math.ceil(told.wait_s)), max(1, math.ceil(told.p90_s)))

    def granted(self, ticket: Ticket, waited_s: float) -> None:
        """Record how long a ticket waited for its seat."""
        self._mean.granted(waited_s)
        told = self._foretold.pop(ticket, None)
        if told is not None and self._quantile is not None:
            self._quantile.granted(told, waited_s)

    def finished(self, job: Job, service_s: float, generated: int) -> None:
        """Record how long a job held its seat, and how many tokens it sent."""
        self._mean.finished(service_s)
        longest = generated // job.sequences
        if generated:
            self._lengths.observe(job.tenant, job.model, longest)
        if self._quantile is not None:
            self._quantile.finished(JobSize(job.prompt_tokens, longest), service_s)

    def forget(self, ticket: Ticket) -> None:
        """Drop the forecast of a ticket that has ended, with or without a seat."""
        self._foretold.pop(ticket, None)

    def _predict(self, job: Job, so_far: int = 0) -> float:
        most = job.sampling.max_tokens
        return self._lengths.predict(job.tenant, job.model, so_far=so_far, max_tokens=most)

    def _running(self, running: Running, now: float) -> RunningJob:
        job, so_far = running.job, running.generated // running.job.sequences
        size = JobSize(job.prompt_tokens, self._predict(job, so_far))
        return RunningJob(size, now - running.granted_at, so_far)
