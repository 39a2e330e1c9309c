"""Wait estimates for waiting, possible and refused jobs, learned from past waits.

Supplies the pure `Forecaster` with what it does not know: queue, seats, clock, and since when jobs run.
"""

from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from random import Random

import trio

from fairlead.config import QueueConfig
from fairlead.dispatch.awaited_seats import AwaitedSeats
from fairlead.dispatch.estimate import retry_after_s
from fairlead.dispatch.forecast import Forecast, Forecaster, Running
from fairlead.dispatch.scheduling import SchedulerQuestions
from fairlead.dispatch.seat import Waiter
from fairlead.dispatch.ticket import Ticket
from fairlead.errors import FairleadError, QueueFull, QueueTimeout
from fairlead.job import Job

MODELS_AT_MOST = 256  # models with a cached estimate
SAME_FORECAST_S = 0.1  # how long refusals share an estimate


class Outlook:
    """Forecasts for waiting and future jobs, retry times for refused ones, and the costs of running ones.

    Receives every seat that is granted (`seated`), lost (`unseated`) or released (`over`), and learns from
    them. Queries the scheduler without changing it. `random` spreads the retries of jobs refused together.
    """

    def __init__(self, scheduler: SchedulerQuestions, queue: QueueConfig, random: Random) -> None:
        self._scheduler = scheduler
        self._random = random
        self._forecaster = Forecaster(queue)
        self._seated: dict[Ticket, tuple[float, Waiter]] = {}  # grant time, waiter; the oldest first
        self._refusals_forecasts: dict[str, tuple[float, Forecast]] = {}  # by model: when computed, and what

    # Seats --------------------------------------------------------------------------------------------

    def ticket(self, job: Job) -> Ticket:
        """Return a ticket with the cost and the cache tokens that the job will probably have."""
        return self._forecaster.ticket(job)

    def seated(self, waiter: Waiter) -> None:
        """Record that a job has got a seat."""
        self._seated[waiter.ticket] = trio.current_time(), waiter

    def unseated(self, waiter: Waiter) -> None:
        """Record that a job has lost its seat, and will wait for another."""
        del self._seated[waiter.ticket]

    def waited(self, ticket: Ticket, waited_s: float) -> None:
        """Record how long a job waited for its first seat."""
        self._forecaster.granted(ticket, waited_s)

    def running(self) -> list[Ticket]:
        """Return the tickets of the jobs that hold a seat, in the order of their grants."""
        return list(self._seated)

    def spent(self, waiter: Waiter) -> float:
        """Return what a job has cost until now; 0 before its first delta."""
        if not waiter.ticket.has_begun:
            return 0.0
        return self._forecaster.weights.cost(waiter.ticket.job.prompt_tokens, waiter.generated())

    def over(self, waiter: Waiter) -> None:
        """Record that a job has ended, with a seat or without."""
        self._forecaster.forget(waiter.ticket)
        if (sitting := self._seated.pop(waiter.ticket, None)) is not None:
            since, _ = sitting
            service_s = trio.current_time() - since
            self._forecaster.finished(waiter.ticket.job, service_s, waiter.generated())

    # Forecasts ---------------------------------------------------------------------------------------

    @property
    def mean_wait_s(self) -> float:
        """Mean wait of the last jobs that were granted a seat."""
        return self._forecaster.mean_wait_s

    @property
    def mean_service_s(self) -> float:
        """Mean time the last jobs held their seats."""
        return self._forecaster.mean_service_s

    def on_arrival(self, ticket: Ticket) -> Forecast:
        """Return the forecast for a job just queued; its actual wait is compared with that later."""
        return self._of(ticket, told=ticket)

    def now(self, ticket: Ticket) -> Forecast:
        """Return the current forecast for a waiting job."""
        return self._of(ticket, told=None)

    def for_newcomer(self, model: str, tenant: str, priority: int) -> Forecast:
        """Return the forecast for a job of this tenant and class if it arrived now."""
        ahead = self._scheduler.foretell(model, tenant, priority)
        if ahead is None:
            return Forecast(0, 0, 0 if self._forecaster.wants_jobs_ahead else None)
        return self._foretell(model, len(ahead), lambda: ahead)

    def with_estimate(self, error: FairleadError, model: str) -> FairleadError:
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

    def _behind_all(self, model: str) -> Forecast:
        """Return the forecast for a job for the model behind all waiting jobs.

        A flood of refusals needs it thousands of times a second, so it is kept for a moment.
        """
        now = trio.current_time()
        waiting = self._scheduler.statistics().waiting
        made_at, made = self._refusals_forecasts.get(model, (0.0, None))
        if made is None or made.position != waiting + 1 or now - made_at >= SAME_FORECAST_S:
            made = self._foretell(model, waiting, self._scheduler.waiting_jobs)
            if len(self._refusals_forecasts) >= MODELS_AT_MOST:  # remote nodes may change their models
                self._refusals_forecasts.clear()
            self._refusals_forecasts[model] = now, made
        return made

    def _of(self, ticket: Ticket, *, told: Ticket | None) -> Forecast:
        ahead = self._scheduler.position(ticket)
        jobs_ahead = partial(self._scheduler.jobs_ahead, ticket)
        return self._foretell(ticket.job.model, ahead, jobs_ahead, told=told)

    def _foretell(
        self, model: str, ahead: int, jobs_ahead: Callable[[], list[Job]], *, told: Ticket | None = None
    ) -> Forecast:
        """Return the forecast for a job behind `ahead` others, some of which wait for other seats."""
        now = trio.current_time()
        awaited = AwaitedSeats(model, self._scheduler.places())
        position = ahead + 1
        if not awaited.are_awaited_by_all:
            rivals = [job for job in jobs_ahead() if awaited.are_awaited_by(job)]
            ahead, jobs_ahead = len(rivals), lambda: rivals
        seated = [each for ticket, each in self._seated.items() if awaited.include(ticket.place)]
        return self._forecaster.foretell(
            position=position,
            ahead=ahead,
            jobs_ahead=jobs_ahead,
            running=lambda: [
                Running(waiter.ticket.job, since, waiter.generated()) for since, waiter in seated
            ],
            running_s=[now - since for since, _ in seated],
            seats=awaited.seats,
            now=now,
            ticket=told,
        )
