"""The waits that are forecast for queued jobs, and what is learned from jobs that have waited."""

from random import Random

import pytest
import trio

from dispatch.recorded import FakeNode, job, limits, scheduler
from fairlead.config import QueueConfig
from fairlead.dispatch.forecast import Forecast
from fairlead.dispatch.outlook import MODELS_AT_MOST, Outlook
from fairlead.dispatch.scheduler import Scheduler
from fairlead.dispatch.seat import Waiter
from fairlead.dispatch.ticket import TicketState
from fairlead.errors import NodeFailed, QueueFull, QueueTimeout
from fairlead.job import Job

SERVICE_S = 10.0


def outlook(seats: int = 1, *, estimate: str = "mean", **more: int) -> tuple[Outlook, Scheduler]:
    """Return forecasts for a scheduler with one node, and that scheduler."""
    its, _ = scheduler()
    its.node_up(FakeNode(), limits(seats, **more))
    return Outlook(its, QueueConfig(estimate=estimate), Random(0)), its


def come(subject: Outlook, to: Scheduler, asked: Job) -> Waiter:
    """Submit a job, as the dispatcher does."""
    waiter = Waiter(subject.ticket(asked))
    to.submit(waiter.ticket)
    if waiter.ticket.state is TicketState.GRANTED:
        subject.seated(waiter)
        subject.waited(waiter.ticket, 0.0)
    return waiter


def go(subject: Outlook, to: Scheduler, waiter: Waiter) -> None:
    subject.over(waiter)
    to.finished(waiter.ticket, cost=subject.spent(waiter))


async def test_waits_are_forecast_from_the_service_times_of_jobs_that_had_a_seat(autojump_clock):
    subject, to = outlook()
    assert Forecast(0, 0) == subject.for_newcomer("m", "A", 1), "a seat is free"
    served = come(subject, to, job().job)
    await trio.sleep(SERVICE_S)
    go(subject, to, served)
    assert subject.mean_service_s == SERVICE_S
    sitting, first, second = (come(subject, to, job().job) for _ in range(3))
    assert [sitting.ticket] == subject.running()
    told = [subject.on_arrival(first.ticket), subject.now(second.ticket), subject.for_newcomer("m", "A", 1)]
    assert [forecast.position for forecast in told] == [1, 2, 3]
    waits = [forecast.estimated_wait_s for forecast in told]
    assert waits == [10, 10, 20], "the rest of the running job, then the mean of each job ahead"


async def test_jobs_that_never_had_a_seat_or_lost_it_do_not_change_the_estimate(autojump_clock):
    subject, to = outlook()
    lost, waiting = come(subject, to, job().job), come(subject, to, job().job)
    await trio.sleep(SERVICE_S)
    subject.unseated(lost)
    assert subject.running() == []
    for waiter in (waiting, lost):
        go(subject, to, waiter)
    taught = come(subject, to, job().job)
    await trio.sleep(1.0)
    go(subject, to, taught)
    assert subject.mean_service_s == 1.0


async def test_a_job_costs_nothing_before_its_first_delta():
    subject, to = outlook()
    waiter = come(subject, to, job(prompt=3).job)
    waiter.generated = lambda: 5
    assert subject.spent(waiter) == 0.0
    to.first_delta(waiter.ticket)
    assert subject.spent(waiter) == 3 * 1.0 + 5 * 2.0


async def test_only_errors_that_allow_a_retry_get_retry_after():
    subject, to = outlook()
    come(subject, to, job().job)
    come(subject, to, job().job)
    for error in (QueueFull("full"), QueueTimeout("late")):
        told = subject.with_estimate(error, "m")
        assert told is error
        assert told.retry_after_s in range(1, 61)
        assert told.estimated_wait_s is not None
    assert subject.with_estimate(NodeFailed("gone"), "m").retry_after_s is None


async def test_estimates_of_refusals_are_kept_for_a_bounded_number_of_models():
    subject, _ = outlook()
    for number in range(3 * MODELS_AT_MOST):
        subject.with_estimate(QueueFull("full"), f"model-{number}")
        assert len(subject._refusals_forecasts) <= MODELS_AT_MOST


async def test_a_refusal_that_has_an_estimate_keeps_it_and_its_position():
    subject, to = outlook()
    come(subject, to, job().job)
    come(subject, to, job().job)
    told = subject.with_estimate(QueueFull("too long", estimated_wait_s=40, queue_position=9), "m")
    assert (told.estimated_wait_s, told.queue_position) == (40, 9)


@pytest.fixture(params=["mean", "quantile"])
def estimate(request: pytest.FixtureRequest) -> str:
    return request.param


def long_job(**options: object) -> Job:
    """Return a job that is known to generate ten tokens."""
    return job(max_tokens=int(SERVICE_S), **options).job


async def taught(subject: Outlook, to: Scheduler, model: str = "m") -> None:
    """Run one job to its end."""
    served = come(subject, to, long_job(model=model))
    begin(to, served)
    await trio.sleep(SERVICE_S)
    go(subject, to, served)


def begin(to: Scheduler, waiter: Waiter) -> None:
    """Let the job generate a token a second from now on."""
    since = trio.current_time()
    waiter.generated = lambda: int(trio.current_time() - since)
    to.first_delta(waiter.ticket)


async def test_the_first_in_line_waits_at_least_for_the_rest_of_a_job_however_many_run(
    autojump_clock, estimate
):
    subject, to = outlook(3, estimate=estimate)
    await taught(subject, to)
    for _ in range(3):
        begin(to, come(subject, to, long_job()))
    await trio.sleep(3.0)
    first = come(subject, to, long_job())
    assert subject.on_arrival(first.ticket).estimated_wait_s == 7


async def test_seats_and_jobs_of_another_model_change_no_estimate(autojump_clock, estimate):
    subject, to = outlook(estimate=estimate)
    to.node_up(FakeNode("other", "k"), limits(4))
    await taught(subject, to)
    begin(to, come(subject, to, long_job()))
    await trio.sleep(3.0)
    assert subject.for_newcomer("k", "A", 1).estimated_wait_s == 0
    assert subject.for_newcomer("m", "A", 1).estimated_wait_s == 7
    for _ in range(20):  # four have seats, and sixteen wait for them
        come(subject, to, long_job(model="k"))
    assert subject.for_newcomer("m", "A", 1).estimated_wait_s == 7
    assert subject.for_newcomer("m", "A", 1).position == 17, "the queue is one"
    behind_all_s = {"m": 7, "k": 40 if estimate == "mean" else 50}
    for model, wait_s in behind_all_s.items():
        told = subject.with_estimate(QueueFull("full"), model)
        assert told.estimated_wait_s == wait_s, model


async def test_a_job_that_waits_for_memory_waits_at_least_for_the_rest_of_the_running_job(
    autojump_clock, estimate
):
    subject, to = outlook(8, estimate=estimate, cache_tokens=20)
    await taught(subject, to)
    begin(to, come(subject, to, long_job(prompt=15)))
    await trio.sleep(3.0)
    first = come(subject, to, long_job(prompt=15))
    assert first.ticket.state is TicketState.QUEUED
    assert subject.on_arrival(first.ticket).estimated_wait_s >= 7
