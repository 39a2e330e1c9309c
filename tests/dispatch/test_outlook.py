"""What those who wait are told, and what is learnt from those who have waited."""

from random import Random

import trio

from dispatch.recorded import FakeNode, job, limits, scheduler
from fairlead.config import QueueConfig
from fairlead.dispatch.forecast import Forecast
from fairlead.dispatch.outlook import Outlook
from fairlead.dispatch.scheduler import Scheduler
from fairlead.dispatch.seat import Waiter
from fairlead.dispatch.ticket import TicketState
from fairlead.errors import NodeFailed, QueueFull, QueueTimeout
from fairlead.job import Job

SERVICE_S = 10.0


def outlook() -> tuple[Outlook, Scheduler]:
    """Over one seat."""
    its, _ = scheduler()
    its.node_up(FakeNode(), limits(1))
    return Outlook(its, QueueConfig(estimate="mean"), Random(0)), its


def come(subject: Outlook, to: Scheduler, asked: Job) -> Waiter:
    """Have a job arrive, as the dispatcher does."""
    waiter = Waiter(subject.ticket(asked))
    to.submit(waiter.ticket)
    if waiter.ticket.state is TicketState.GRANTED:
        subject.seated(waiter)
        subject.waited(waiter.ticket, 0.0)
    return waiter


def go(subject: Outlook, to: Scheduler, waiter: Waiter) -> None:
    subject.over(waiter)
    to.finished(waiter.ticket, cost=subject.spent(waiter))


async def test_who_waits_is_told_what_those_before_took_that_had_a_seat(autojump_clock):
    subject, to = outlook()
    assert Forecast(0, 0) == subject.for_newcomer("m", "A", 1), "a seat is free"
    served = come(subject, to, job().job)
    await trio.sleep(SERVICE_S)
    go(subject, to, served)
    assert SERVICE_S == subject.mean_service_s
    sitting, first, second = (come(subject, to, job().job) for _ in range(3))
    assert [sitting.ticket] == subject.running()
    told = [subject.on_arrival(first.ticket), subject.now(second.ticket), subject.for_newcomer("m", "A", 1)]
    assert [1, 2, 3] == [forecast.position for forecast in told]
    waits = [forecast.estimated_wait_s for forecast in told]
    assert waits == [10, 10, 20], "the rest of the running job, then the mean of each job ahead"


async def test_who_left_without_a_seat_or_lost_it_teaches_nothing(autojump_clock):
    subject, to = outlook()
    lost, waiting = come(subject, to, job().job), come(subject, to, job().job)
    await trio.sleep(SERVICE_S)
    subject.unseated(lost)
    assert [] == subject.running()
    for waiter in (waiting, lost):
        go(subject, to, waiter)
    taught = come(subject, to, job().job)
    await trio.sleep(1.0)
    go(subject, to, taught)
    assert 1.0 == subject.mean_service_s


async def test_a_job_costs_nothing_before_its_first_delta():
    subject, to = outlook()
    waiter = come(subject, to, job(prompt=3).job)
    waiter.generated = lambda: 5
    assert 0.0 == subject.spent(waiter)
    to.first_delta(waiter.ticket)
    assert 3 * 1.0 + 5 * 2.0 == subject.spent(waiter)


async def test_only_who_could_come_again_is_told_when():
    subject, to = outlook()
    come(subject, to, job().job)
    come(subject, to, job().job)
    for error in (QueueFull("full"), QueueTimeout("late")):
        told = subject.with_estimate(error)
        assert told is error
        assert told.retry_after_s in range(1, 61)
        assert told.estimated_wait_s is not None
    assert subject.with_estimate(NodeFailed("gone")).retry_after_s is None
