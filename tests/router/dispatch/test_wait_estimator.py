"""The waits that are estimated for queued jobs, and what is learned from jobs that have waited."""

from random import Random

import pytest
import trio

from fairlead.base.config import QueueConfig
from fairlead.base.errors import NodeFailed, QueueFull, QueueTimeout
from fairlead.router.dispatch.estimates import WaitEstimate
from fairlead.router.dispatch.job_spec import JobSpec
from fairlead.router.dispatch.scheduler import Scheduler
from fairlead.router.dispatch.ticket import TicketState
from fairlead.router.dispatch.wait_estimator import MAX_MODELS, WaitEstimator
from fairlead.router.dispatch.waiter import WaitingTask
from router.dispatch.recorded import FakeNode, job, limits, scheduler

SERVICE_S = 10.0


def estimator(seats: int = 1, *, estimate: str = "mean", **more: int) -> tuple[WaitEstimator, Scheduler]:
    """Return the estimator of a scheduler with one node, and that scheduler."""
    its, _ = scheduler()
    its.node_up(*FakeNode(), limits(seats, **more))
    return WaitEstimator(its, QueueConfig(estimate=estimate), Random(0)), its


def submit_job(subject: WaitEstimator, to: Scheduler, spec: JobSpec) -> WaitingTask:
    """Submit a job, as the dispatcher does."""
    waiter = WaitingTask(subject.new_ticket(spec))
    to.submit(waiter.ticket)
    if waiter.ticket.state is TicketState.GRANTED:
        subject.granted(waiter)
        subject.waited(waiter.ticket, 0.0)
    return waiter


def end_job(subject: WaitEstimator, to: Scheduler, waiter: WaitingTask) -> None:
    subject.ended(waiter)
    to.finished(waiter.ticket, cost=subject.cost(waiter))


async def test_waits_are_estimated_from_the_service_times_of_jobs_that_had_a_seat(autojump_clock):
    subject, to = estimator()
    assert WaitEstimate(0, 0) == subject.for_newcomer("m", "A", 1), "a seat is free"
    served = submit_job(subject, to, job().job)
    await trio.sleep(SERVICE_S)
    end_job(subject, to, served)
    assert subject.mean.mean_service_s == SERVICE_S
    sitting, first, second = (submit_job(subject, to, job().job) for _ in range(3))
    assert [sitting] == list(subject.running())
    predicted = [
        subject.for_ticket(first.ticket, is_arriving=True),
        subject.for_ticket(second.ticket),
        subject.for_newcomer("m", "A", 1),
    ]
    assert [estimate.position for estimate in predicted] == [1, 2, 3]
    waits = [estimate.estimated_wait_s for estimate in predicted]
    assert waits == [10, 10, 20], "the rest of the running job, then the mean of each job ahead"


async def test_jobs_that_never_had_a_seat_or_lost_it_do_not_change_the_estimate(autojump_clock):
    subject, to = estimator()
    lost, waiting = submit_job(subject, to, job().job), submit_job(subject, to, job().job)
    await trio.sleep(SERVICE_S)
    subject.requeued(lost)
    assert list(subject._running) == []
    for waiter in (waiting, lost):
        end_job(subject, to, waiter)
    taught = submit_job(subject, to, job().job)
    await trio.sleep(1.0)
    end_job(subject, to, taught)
    assert subject.mean.mean_service_s == 1.0


async def test_job_costs_nothing_before_its_first_delta():
    subject, to = estimator()
    waiter = submit_job(subject, to, job(prompt=3).job)
    waiter.count_generated = lambda: 5
    assert subject.cost(waiter) == 0.0
    to.first_delta(waiter.ticket)
    assert subject.cost(waiter) == 3 * 1.0 + 5 * 2.0


async def test_only_errors_that_allow_a_retry_get_retry_after():
    subject, to = estimator()
    submit_job(subject, to, job().job)
    submit_job(subject, to, job().job)
    for error in (QueueFull("full"), QueueTimeout("late")):
        predicted = subject.add_retry_time(error, "m")
        assert predicted is error
        assert predicted.retry_after_s in range(1, 61)
        assert predicted.estimated_wait_s is not None
    assert subject.add_retry_time(NodeFailed("gone"), "m").retry_after_s is None


async def test_estimates_of_refusals_are_kept_for_a_bounded_number_of_models():
    subject, _ = estimator()
    for number in range(3 * MAX_MODELS):
        subject.add_retry_time(QueueFull("full"), f"model-{number}")
        assert len(subject._refusal_estimates) <= MAX_MODELS


async def test_refusal_that_has_an_estimate_keeps_it_and_its_position():
    subject, to = estimator()
    submit_job(subject, to, job().job)
    submit_job(subject, to, job().job)
    predicted = subject.add_retry_time(QueueFull("too long", estimated_wait_s=40, queue_position=9), "m")
    assert (predicted.estimated_wait_s, predicted.queue_position) == (40, 9)


async def test_refusals_share_an_estimate_for_a_moment_only(autojump_clock):
    subject, to = estimator()
    await run_one_job(subject, to)
    begin(to, submit_job(subject, to, long_job()))

    def refused_s() -> int | None:
        return subject.add_retry_time(QueueFull("full"), "m").estimated_wait_s

    waits = []
    for _ in range(5):
        waits.append(refused_s())
        await trio.sleep(2.0)
    assert waits == [10, 8, 6, 4, 2]


@pytest.fixture(params=["mean", "quantile"])
def estimate(request: pytest.FixtureRequest) -> str:
    return request.param


def long_job(**options: object) -> JobSpec:
    """Return a job that is known to generate ten tokens."""
    return job(max_tokens=int(SERVICE_S), **options).job


async def run_one_job(subject: WaitEstimator, to: Scheduler, model: str = "m") -> None:
    """Run one job to its end."""
    served = submit_job(subject, to, long_job(model=model))
    begin(to, served)
    await trio.sleep(SERVICE_S)
    end_job(subject, to, served)


def begin(to: Scheduler, waiter: WaitingTask) -> None:
    """Let the job generate a token a second from now on."""
    since = trio.current_time()
    waiter.count_generated = lambda: int(trio.current_time() - since)
    to.first_delta(waiter.ticket)


async def test_first_in_line_waits_at_least_for_the_rest_of_a_job_however_many_run(autojump_clock, estimate):
    subject, to = estimator(3, estimate=estimate)
    await run_one_job(subject, to)
    for _ in range(3):
        begin(to, submit_job(subject, to, long_job()))
    await trio.sleep(3.0)
    first = submit_job(subject, to, long_job())
    assert subject.for_ticket(first.ticket, is_arriving=True).estimated_wait_s == 7


async def test_seats_and_jobs_of_another_model_change_no_estimate(autojump_clock, estimate):
    subject, to = estimator(estimate=estimate)
    to.node_up(*FakeNode("other", "k"), limits(4))
    await run_one_job(subject, to)
    begin(to, submit_job(subject, to, long_job()))
    await trio.sleep(3.0)
    assert subject.for_newcomer("k", "A", 1).estimated_wait_s == 0
    assert subject.for_newcomer("m", "A", 1).estimated_wait_s == 7
    for _ in range(20):  # four have seats, and sixteen wait for them
        submit_job(subject, to, long_job(model="k"))
    assert subject.for_newcomer("m", "A", 1).estimated_wait_s == 7
    assert subject.for_newcomer("m", "A", 1).position == 17, "all models share one queue"
    behind_all_s = {"m": 7, "k": 40 if estimate == "mean" else 50}
    for model, wait_s in behind_all_s.items():
        predicted = subject.add_retry_time(QueueFull("full"), model)
        assert predicted.estimated_wait_s == wait_s, model


async def test_job_that_waits_for_memory_waits_at_least_for_the_rest_of_the_running_job(
    autojump_clock, estimate
):
    subject, to = estimator(8, estimate=estimate, cache_tokens=20)
    await run_one_job(subject, to)
    begin(to, submit_job(subject, to, long_job(prompt=15)))
    await trio.sleep(3.0)
    first = submit_job(subject, to, long_job(prompt=15))
    assert first.ticket.state is TicketState.QUEUED
    assert subject.for_ticket(first.ticket, is_arriving=True).estimated_wait_s >= 7
