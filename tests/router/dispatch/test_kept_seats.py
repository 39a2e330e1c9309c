"""Where running answers cannot pause, seats are kept for tenants that hold fewer than their share."""

from random import Random

import pytest
import trio
import trio.testing

from fairlead.base.config import QueueConfig
from fairlead.base.errors import NoQueue
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.dispatch.scheduler import Scheduler
from fairlead.router.dispatch.ticket import TicketState
from router.dispatch.recorded import FakeNode, RecordedEffects, engine_limits, job, limits, submit


def with_server(seats: int, **options) -> tuple[Scheduler, RecordedEffects]:
    """Return a scheduler with one node that cannot suspend."""
    effects = RecordedEffects()
    subject = Scheduler(effects, capacity=100, random=Random(0), **options)
    subject.node_up(*FakeNode(), limits(seats))
    return subject, effects


def running(subject: Scheduler) -> str:
    """Return the tenant of each job that runs, in order."""
    return "".join(sorted(run.ticket.job.tenant for node in subject.nodes() for run in node.runs))


def test_seat_is_kept_for_the_tenant_that_has_just_left_it():
    subject, effects = with_server(4)
    attack = submit(subject, *[job("A") for _ in range(10)])
    (first,) = submit(subject, job("B"))
    subject.finished(attack[0], cost=1.0)
    subject.finished(first, cost=1.0)
    assert running(subject) == "AAA"
    (second,) = submit(subject, job("B"))
    assert second.state is TicketState.GRANTED
    assert running(subject) == "AAAB"
    subject.finished(second, cost=1.0)
    subject.seats_rested(*effects.freed[0])  # it was used since
    assert running(subject) == "AAA"
    subject.seats_rested(*effects.freed[-1])
    assert running(subject) == "AAAA"


def test_tenant_alone_has_every_seat_at_once():
    subject, _ = with_server(2)
    first, *_ = submit(subject, *[job("A") for _ in range(5)])
    subject.finished(first, cost=1.0)
    assert running(subject) == "AA"


def test_nothing_is_kept_from_a_tenant_below_its_share():
    subject, _ = with_server(4)
    attack = submit(subject, *[job("A") for _ in range(4)])
    others = submit(subject, *[job("B") for _ in range(4)])
    for ticket in attack[:2]:
        subject.finished(ticket, cost=1.0)
    assert running(subject) == "AABB"
    subject.finished(others[0], cost=1.0)
    subject.finished(others[1], cost=1.0)
    assert running(subject) == "AABB"


def test_each_tenant_may_hold_one_seat():
    subject, _ = with_server(2)
    first, *_ = submit(subject, job("A"), job("B"), job("C"), job("D"), job("A"))
    subject.finished(first, cost=1.0)
    assert running(subject) == "BC"


def test_tenants_with_waiting_jobs_take_turns_for_every_seat():
    subject, _ = with_server(4)
    first = submit(subject, *[job("A") for _ in range(4)])
    submit(subject, *[job("B") for _ in range(8)], *[job("A") for _ in range(8)])
    for ticket in first:
        subject.finished(ticket, cost=1.0)
    assert running(subject) == "AABB"
    (node,) = subject.nodes()
    for run in [run for run in node.runs if run.ticket.job.tenant == "B"]:
        subject.finished(run.ticket, cost=1.0)
    assert node.free == 0


def test_seats_that_are_idle_for_a_quantum_are_for_everybody():
    subject, _ = with_server(4)
    submit(subject, job("B"), *[job("A") for _ in range(3)])
    assert running(subject) == "AAAB"


@pytest.mark.parametrize(("weight", "expected"), [(1.0, "AA"), (3.0, "AAA")])
def test_weights_decide_the_shares(weight, expected):
    subject, _ = with_server(4, fairness="tokens", tenant_weights={"A": weight})
    held = submit(subject, *[job("A") for _ in range(2)], job("B"), job("B"))
    submit(subject, job("A"))
    for ticket in held[2:]:
        subject.finished(ticket, cost=1.0)
    assert running(subject) == expected


def test_job_that_must_not_be_queued_is_refused_while_seats_are_kept():
    subject, effects = with_server(2)
    first, second = submit(subject, job("A"), job("B"))
    subject.finished(second, cost=1.0)
    (third,) = submit(subject, job("A", no_queue=True))
    assert isinstance(effects.refused[third], NoQueue)
    assert first.state is TicketState.GRANTED


def test_other_models_and_nodes_are_not_concerned():
    subject, _ = with_server(2)
    subject.node_up(*FakeNode("other", "n"), limits(2))
    submit(subject, job("A"))
    (other,) = submit(subject, job("B"))
    subject.finished(other, cost=1.0)
    submit(subject, job("A"), job("A", model="n"), job("A", model="n"))
    assert [node.busy for node in subject.nodes()] == [1, 2]


def test_engine_keeps_no_seats_because_its_answers_pause():
    subject, _ = with_server(2)
    subject.node_up(*FakeNode(), engine_limits(2))
    submit(subject, job("A"))
    (other,) = submit(subject, job("B"))
    subject.finished(other, cost=1.0)
    submit(subject, job("A"))
    assert running(subject) == "AA"


def test_nothing_is_kept_where_suspension_is_off():
    subject, _ = with_server(2, suspends=False)
    submit(subject, job("A"))
    (other,) = submit(subject, job("B"))
    subject.finished(other, cost=1.0)
    submit(subject, job("A"))
    assert running(subject) == "AA"


def test_seats_of_a_server_with_fewer_than_before_are_not_kept():
    subject, _ = with_server(3)
    first, second = submit(subject, job("A"), job("B"))
    subject.finished(second, cost=1.0)
    subject.seats_changed(*FakeNode(), limits(1))
    (node,) = subject.nodes()
    assert (node.free, node.fresh) == (0, {})
    subject.finished(first, cost=1.0)
    submit(subject, job("A"))
    assert running(subject) == "A"


async def test_waiting_job_gets_a_kept_seat_after_a_quantum(autojump_clock):
    dispatcher = Dispatcher(QueueConfig(quantum_s=2.0))
    dispatcher.scheduler.node_up("node", frozenset({"m"}), limits(2))
    got = []

    async def hold(tenant: str, seconds: float) -> None:
        async with dispatcher.seat(job(tenant).job):
            got.append((tenant, trio.current_time()))
            await trio.sleep(seconds)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(dispatcher.run)
        began = trio.current_time()
        async with trio.open_nursery() as jobs:
            jobs.start_soon(hold, "A", 10)
            await trio.testing.wait_all_tasks_blocked()
            jobs.start_soon(hold, "B", 3)
            await trio.testing.wait_all_tasks_blocked()
            jobs.start_soon(hold, "A", 1)
        nursery.cancel_scope.cancel()
    assert [(tenant, round(at - began, 2)) for tenant, at in got] == [("A", 0.0), ("B", 0.0), ("A", 5.0)]
