"""Nodes that are full for a model, that refuse a job, or that have failed lately."""

import pytest
import trio

from fairlead.base.config import QueueConfig
from fairlead.base.errors import NodesFull, NodesLimited, NoOtherNode, QueueFull
from fairlead.router.dispatch.dispatcher import FAILED_FOR_S, Dispatcher
from fairlead.router.dispatch.effects import PausedModel
from fairlead.router.dispatch.fullness import FIRST_PAUSE_S, FORGOTTEN_S, LONGEST_NAMED_S, LONGEST_PAUSE_S
from fairlead.router.dispatch.ticket import TicketState
from fairlead.router.dispatch.waiter import SeatLoss
from router.dispatch.recorded import FakeNode, job, limits, scheduler, submit

GRANTED, QUEUED = TicketState.GRANTED, TicketState.QUEUED


def with_nodes(*names, seats=4, models="mn"):
    subject, effects = scheduler()
    for name in names:
        subject.node_up(*FakeNode(name, *models), limits(seats))
    return subject, effects


def resume(subject, *whose, node="node", model="m"):
    for each in whose:
        subject.resume(PausedModel(node, model, each))


def states(*tickets):
    return [ticket.state for ticket in tickets]


def test_node_is_full_for_one_model_only():
    subject, _ = with_nodes("node")
    (rejected,) = submit(subject, job("A"))
    subject.rejected_by_node(rejected)
    same, other = submit(subject, job("B"), job("B", model="n"))
    assert states(rejected, same, other) == [QUEUED, QUEUED, GRANTED]


def test_one_job_tries_again_and_all_follow_when_it_succeeds():
    subject, _ = with_nodes("node")
    tickets = submit(subject, job("A"), job("B"), job("C"))
    for ticket in tickets:
        subject.rejected_by_node(ticket)
    resume(subject, None, *"ABC")
    assert states(*tickets).count(GRANTED) == 1
    (trial,) = [ticket for ticket in tickets if ticket.state is GRANTED]
    subject.first_delta(trial)
    assert states(*tickets) == [GRANTED] * 3


def test_pause_doubles_up_to_a_bound_and_begins_anew_after_a_success():
    subject, effects = with_nodes("node")
    (ticket,) = submit(subject, job("A"))
    pauses = []
    for _ in range(6):
        subject.rejected_by_node(ticket)
        pauses.append(effects.pauses[PausedModel("node", "m", "A")])
        resume(subject, None, "A")
        assert ticket.state is GRANTED
    assert pauses == [1.0, 2.0, 4.0, 8.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    subject.first_delta(ticket)
    subject.finished(ticket, cost=1.0)
    (ticket,) = submit(subject, job("A"))
    subject.rejected_by_node(ticket)
    assert effects.pauses[PausedModel("node", "m", "A")] == FIRST_PAUSE_S


@pytest.mark.parametrize(("named_s", "pause_s"), [(7.0, 7.0), (86400.0, LONGEST_NAMED_S)])
def test_node_names_the_time_within_a_bound(named_s, pause_s):
    subject, effects = with_nodes("node")
    running, ticket = submit(subject, job("A"), job("A"))
    subject.rejected_by_node(ticket, named_s)
    assert effects.pauses[PausedModel("node", "m", "A")] == pause_s
    subject.finished(running, cost=1.0)
    assert ticket.state is QUEUED, "the end of another job does not end a time that the node has named"


def test_rejections_of_jobs_that_were_sent_together_count_once():
    subject, effects = with_nodes("node")
    for ticket in submit(subject, *[job("A") for _ in range(4)]):
        subject.rejected_by_node(ticket)
    assert effects.pauses[PausedModel("node", "m", "A")] == FIRST_PAUSE_S


def test_another_tenant_tries_after_the_first_pause_and_is_not_held_up_by_the_first_one():
    subject, effects = with_nodes("node")
    (poison,) = submit(subject, job("A"))
    subject.rejected_by_node(poison, 60.0)
    assert effects.pauses == {
        PausedModel("node", "m", "A"): 60.0,
        PausedModel("node", "m", None): FIRST_PAUSE_S,
    }
    others = submit(subject, job("B"), job("C"))
    assert states(*others) == [QUEUED, QUEUED]
    resume(subject, None)
    assert states(poison, *others) == [QUEUED, GRANTED, QUEUED]
    subject.first_delta(others[0])
    assert states(poison, *others) == [QUEUED, GRANTED, GRANTED]


def test_rejection_of_a_tenant_while_others_are_served_pauses_only_that_tenant():
    subject, _ = with_nodes("node")
    (poison,) = submit(subject, job("A"))
    subject.rejected_by_node(poison)
    (other,) = submit(subject, job("B"))
    resume(subject, None)
    subject.first_delta(other)
    resume(subject, "A")
    assert poison.state is GRANTED
    subject.rejected_by_node(poison)
    (again,) = submit(subject, job("B"))
    assert states(poison, again) == [QUEUED, GRANTED]


def test_all_wait_for_the_time_that_the_node_names_once_two_tenants_were_rejected():
    subject, effects = with_nodes("node")
    for ticket in submit(subject, job("A"), job("B")):
        subject.rejected_by_node(ticket, 30.0)
    assert effects.pauses[PausedModel("node", "m", None)] == 30.0


@pytest.mark.parametrize("event", ["leave", "requeued"])
def test_another_job_tries_when_a_trial_ends_without_a_result(event):
    subject, _ = with_nodes("node")
    first, second = submit(subject, job("A"), job("A"))
    for ticket in (first, second):
        subject.rejected_by_node(ticket, 30.0)
    resume(subject, None, "A")
    (trial,) = [ticket for ticket in (first, second) if ticket.state is GRANTED]
    getattr(subject, event)(trial)
    assert states(first, second).count(GRANTED) == 1


def test_slow_trial_lets_another_job_try_after_a_pause():
    subject, effects = with_nodes("node")
    tickets = submit(subject, job("A"), job("A"))
    for ticket in tickets:
        subject.rejected_by_node(ticket)
    effects.pauses.clear()
    resume(subject, None, "A")
    assert effects.pauses == {PausedModel("node", "m", whose): FIRST_PAUSE_S for whose in (None, "A")}
    resume(subject, None, "A")
    assert states(*tickets) == [GRANTED, GRANTED]


def test_pause_after_which_nobody_tries_is_forgotten():
    subject, effects = with_nodes("node")
    (ticket,) = submit(subject, job("A"))
    node = ticket.node
    subject.rejected_by_node(ticket)
    subject.leave(ticket)
    resume(subject, None, "A")
    assert set(effects.pauses.values()) == {FORGOTTEN_S}
    resume(subject, None, "A")
    assert not node.full


def test_full_node_sends_its_job_to_another_at_once_and_only_if_all_are_full_it_waits():
    subject, effects = with_nodes("one", "two")
    (ticket,) = submit(subject, job("A"))
    first = ticket.node.id
    subject.rejected_by_node(ticket)
    assert ticket.state is GRANTED
    assert ticket.node.id != first
    assert subject.full_error(ticket.job) is None
    subject.rejected_by_node(ticket, is_limit=True)
    assert ticket.state is QUEUED
    assert isinstance(subject.full_error(ticket.job), NodesFull)
    (impatient,) = submit(subject, job("B", no_queue=True))
    assert isinstance(effects.refused[impatient], NodesFull)


@pytest.mark.parametrize(("is_limit", "kind"), [(False, NodesFull), (True, NodesLimited)])
def test_job_that_must_not_be_queued_is_refused_as_its_node_says(is_limit, kind):
    subject, effects = with_nodes("node")
    (ticket,) = submit(subject, job("A", no_queue=True))
    subject.rejected_by_node(ticket, 5.0, is_limit=is_limit)
    assert type(effects.refused[ticket]) is kind


def test_node_that_opens_again_is_not_full():
    subject, _ = with_nodes("node")
    (ticket,) = submit(subject, job("A"))
    subject.rejected_by_node(ticket, 60.0)
    for seats in (0, 4):
        subject.seats_changed("node", frozenset("mn"), limits(seats))
    assert ticket.state is GRANTED


def test_job_that_one_node_refuses_is_tried_on_each_other_once():
    subject, effects = with_nodes("one", "two", "three")
    (ticket,) = submit(subject, job("A"))
    seen = set()
    while ticket.state is GRANTED:
        seen.add(ticket.node.id)
        subject.unsuited(ticket)
    assert seen == {"one", "two", "three"}
    assert isinstance(effects.refused[ticket], NoOtherNode)


@pytest.mark.parametrize("event", ["node_down", "close_node"])
def test_job_that_waits_for_the_only_other_node_ends_when_that_goes(event):
    subject, effects = with_nodes("one")
    (ticket,) = submit(subject, job("A"))
    subject.node_up(*FakeNode("two", "m"), limits(1))
    busy = submit(subject, *[job("B") for _ in range(4)])
    subject.unsuited(ticket)
    assert ticket.state is QUEUED
    if event == "close_node":
        subject.seats_changed("two", frozenset("m"), limits(0))
    else:
        subject.node_down("two")
    assert isinstance(effects.refused[ticket], NoOtherNode)
    assert all(each.state is GRANTED for each in busy)


def test_node_that_has_failed_lately_gets_a_job_only_if_no_other_has_a_free_seat():
    subject, _ = with_nodes("bad", "good", seats=3)
    (failed,) = submit(subject, job("A"))
    bad = failed.node
    subject.requeued(failed)
    jobs = submit(subject, *[job("A") for _ in range(2)])
    assert bad not in [ticket.node for ticket in (failed, *jobs)]
    (last,) = submit(subject, job("A"))
    assert last.node is bad
    subject.first_delta(last)
    assert not bad.has_failed


def dispatcher_with(*names, seats=1):
    dispatcher = Dispatcher(QueueConfig())
    for name in names:
        dispatcher.scheduler.node_up(name, frozenset("m"), limits(seats))
    return dispatcher


async def test_node_that_has_failed_is_like_the_others_after_a_while(autojump_clock, nursery):
    dispatcher = dispatcher_with("one", "two")
    nursery.start_soon(dispatcher.run)
    async with dispatcher.seat(job().job) as seat:
        first = seat.node_id
        await seat.requeue(SeatLoss())
        assert seat.node_id != first
    (state,) = [node for node in dispatcher.scheduler.nodes() if node.id == first]
    await trio.sleep(FAILED_FOR_S - 0.1)
    assert state.has_failed
    await trio.sleep(0.2)
    assert not state.has_failed


async def test_estimate_is_at_least_the_time_until_the_first_node_is_tried(autojump_clock, nursery):
    dispatcher = dispatcher_with("one", "two")
    nursery.start_soon(dispatcher.run)

    def estimate(tenant):
        return dispatcher.estimator.for_newcomer("m", tenant, 1).estimated_wait_s

    async def wait(ticket):
        async with dispatcher.seat(ticket.job) as seat:
            for full_for_s in (30.0, 20.0):
                await seat.requeue(SeatLoss("full", full_for_s))
            await trio.sleep_forever()

    nursery.start_soon(wait, job("A"))
    await trio.sleep(0.5)
    assert (estimate("A"), estimate("B")) == (20, 1)
    await trio.sleep(10)
    assert estimate("A") == 10
    with pytest.raises(QueueFull, match="about 10 s"):
        async with dispatcher.seat(job("A", wait_limit_s=5.0).job):
            pass


async def test_error_at_the_deadline_has_the_time_that_is_left(autojump_clock, nursery):
    dispatcher = dispatcher_with("one")
    nursery.start_soon(dispatcher.run)
    with pytest.raises(NodesLimited, match="every server of m is full") as refusal:
        async with dispatcher.seat(job("A", wait_limit_s=4.0).job) as seat:
            await seat.requeue(SeatLoss("full", 30.0, is_limit=True))
    assert refusal.value.retry_after_s == 26
