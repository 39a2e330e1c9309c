"""Surveys of large queues: their order is exact, and their estimates are close to exact ones."""

from random import Random

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from fairlead.base.config import QueueConfig
from fairlead.router.dispatch import wait_estimator as module
from fairlead.router.dispatch.queue import Queue
from fairlead.router.dispatch.scheduler import Scheduler
from fairlead.router.dispatch.ticket import Ticket, TicketState
from fairlead.router.dispatch.wait_estimator import WaitEstimator
from fairlead.router.dispatch.wait_survey import SeatWaits
from fairlead.router.dispatch.waiter import WaitingTask
from router.dispatch.recorded import FakeNode, job, limits, scheduler

JOBS = st.lists(st.tuples(st.sampled_from("ABCD"), st.integers(0, 2), st.booleans()), max_size=30)
TIMES_S = st.lists(st.floats(0, 100), max_size=8)


@pytest.mark.parametrize("fairness", ["roundRobin", "tokens"])
@pytest.mark.parametrize("min_share", [0.0, 0.2])
@given(jobs=JOBS)
def test_order_of_a_survey_is_that_in_which_jobs_leave_and_it_changes_nothing(fairness, min_share, jobs):
    queue = Queue(100, fairness=fairness, min_share=min_share)
    for tenant, drawn, is_retried in jobs:
        priority = drawn if fairness == "roundRobin" else ord(tenant) % 3  # a charge counts in all classes
        (queue.requeue if is_retried else queue.push)(job(tenant, priority=priority))
    order = queue.order()
    if not min_share:  # with it, the two newcomers of each tenant earn others their share
        for (tenant, priority), newcomer in order.newcomers.items():
            name = "newcomer" if tenant is None else tenant
            assert newcomer.first == len(queue.ahead_of_newcomer(name, priority))
            assert newcomer.first <= newcomer.second
    left = [queue.pop(lambda _: True) for _ in jobs]
    if not min_share:
        assert left == order.tickets
    assert set(left) == set(order.tickets)


@given(remaining_s=TIMES_S, seats=st.integers(0, 8), service_s=st.floats(0, 1000), ahead=st.integers(0, 20))
def test_work_ahead_fills_the_seats_evenly_and_the_nth_job_waits_at_most_for_the_nth_seat(
    remaining_s, seats, service_s, ahead
):
    waits = SeatWaits(remaining_s, seats)
    free_after_s = [0.0] * waits.seats_free + sorted(remaining_s)[-waits.seats :]
    wait_s = waits.work_s(ahead, service_s)
    assert free_after_s[0] <= wait_s
    filled_s = sum(max(0.0, wait_s - free_s) for free_s in free_after_s)
    if ahead < waits.seats:
        assert wait_s <= waits.least_s(ahead) == free_after_s[ahead]
    assert filled_s <= service_s + 1e-6
    if ahead >= waits.seats and wait_s > free_after_s[0]:
        level_s = wait_s + service_s / ahead / 2
        filled_s = sum(max(0.0, level_s - free_s) for free_s in free_after_s)
        assert filled_s == pytest.approx(service_s)


def busy(estimate: str, waiting: int) -> tuple[WaitEstimator, Scheduler, list[Ticket]]:
    """Return an estimator of forty seats on four nodes, two of them with a second model, and its jobs."""
    its, _ = scheduler(10_000)
    for number in range(4):
        its.node_up(*FakeNode(f"node-{number}", "m", *("k",) * (number < 2)), limits(10, longest=10_000))
    subject = WaitEstimator(its, QueueConfig(estimate=estimate), Random(0))
    random, tickets = Random(1), []
    for _ in range(40 + waiting):
        tenant, model = random.choice("AAAABBC"), random.choice("mmk")
        spec = job(tenant, model=model, prompt=random.randint(1, 100), max_tokens=random.randint(5, 50)).job
        tickets.append(submitted(subject, its, spec))
    return subject, its, tickets


def submitted(subject: WaitEstimator, its: Scheduler, spec) -> Ticket:
    waiter = WaitingTask(subject.new_ticket(spec))
    its.submit(waiter.ticket)
    if waiter.ticket.state is TicketState.GRANTED:
        subject.granted(waiter)
    return waiter.ticket


@pytest.mark.parametrize("estimate", ["mean", "quantile"])
async def test_estimates_of_a_survey_are_close_to_exact_ones(monkeypatch, autojump_clock, estimate):
    subject, _, tickets = busy(estimate, 400)
    for prompt, tokens in ((10, 10), (50, 40), (100, 20)):
        await trio.sleep(1.0)
        if subject._quantile is not None:
            subject._quantile.finished(module.JobSize(prompt, tokens), 0.01 * prompt + 0.1 * tokens)
        subject.mean.finished(0.01 * prompt + 0.1 * tokens)
    asked = [*[(model, tenant) for model in "mk" for tenant in "ABCD"]]
    surveyed = [subject.for_newcomer(model, tenant, 1) for model, tenant in asked]
    waiting = [ticket for ticket in tickets if ticket.state is TicketState.QUEUED][::20]
    surveyed += [subject.for_ticket(ticket) for ticket in waiting]
    assert subject._survey is not None
    monkeypatch.setattr(module, "EXACT_JOBS", 10_000)
    exact = [subject.for_newcomer(model, tenant, 1) for model, tenant in asked]
    exact += [subject.for_ticket(ticket) for ticket in waiting]
    assert subject._survey is None
    assert [each.position for each in surveyed] == [each.position for each in exact]
    for one, other in zip(surveyed, exact, strict=True):
        assert one.estimated_wait_s == pytest.approx(other.estimated_wait_s, rel=0.15, abs=1)
        assert (one.estimated_wait_p90_s is None) == (estimate == "mean")
        if estimate == "quantile":
            assert one.estimated_wait_p90_s == pytest.approx(other.estimated_wait_p90_s, rel=0.15, abs=1)


async def test_surveys_are_few_however_many_jobs_arrive_at_once(autojump_clock):
    subject, its, _ = busy("quantile", 1000)
    surveys = 0

    def counted():
        nonlocal surveys
        surveys += 1
        return queue_order()

    queue_order, its.queue_order = its.queue_order, counted
    for _ in range(1000):
        ticket = submitted(subject, its, job().job)
        subject.for_ticket(ticket, is_arriving=True)
    assert 1 < surveys < 10


async def test_jobs_of_a_flood_get_later_positions_between_two_surveys(autojump_clock):
    subject, its, _ = busy("quantile", 1000)
    tickets = [submitted(subject, its, job("B").job) for _ in range(20)]
    positions = [subject.for_ticket(ticket, is_arriving=True).position for ticket in tickets]
    assert positions == sorted(set(positions))


async def test_survey_is_old_after_a_time_in_proportion_to_its_size(autojump_clock):
    subject, *_ = busy("quantile", 1000)
    subject.for_newcomer("m", "A", 1)
    first = subject._survey
    await trio.sleep(module.SURVEYED_S_PER_JOB * 1000)
    subject.for_newcomer("m", "A", 1)
    assert subject._survey is first
    await trio.sleep(module.SURVEYED_S_PER_JOB * 1000)
    subject.for_newcomer("m", "A", 1)
    assert subject._survey is not first
