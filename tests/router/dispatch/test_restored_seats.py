"""Seats that jobs hold from an earlier scheduler: given again without a grant, and counted where they are."""

from random import Random

import trio

from fairlead.base.config import QueueConfig
from fairlead.base.grant import Grant
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.dispatch.ticket import TicketState
from fairlead.router.dispatch.waiter import HeldSeat, WaitingTask
from router.dispatch.recorded import FakeNode, job, limits, scheduler, submit


def test_restored_job_has_its_seat_without_a_grant():
    subject, effects = scheduler()
    subject.node_up(*FakeNode(), limits(1))
    restored = job("A")
    subject.restore(restored, "node")
    assert restored.state is TicketState.GRANTED
    assert effects.granted == []
    assert subject.node_counts("node").busy == 1


def test_next_job_gets_a_restored_seat_when_its_job_has_finished():
    subject, effects = scheduler()
    subject.node_up(*FakeNode(), limits(1))
    restored = job("A")
    subject.restore(restored, "node")
    (waiting,) = submit(subject, job("B"))
    assert effects.granted == []
    subject.finished(restored, cost=1.0)
    assert effects.granted == [waiting]
    assert subject.node_counts("node").busy == 1


def test_restored_seat_counts_at_a_node_that_comes_up_later():
    subject, effects = scheduler()
    restored = job("A")
    subject.restore(restored, "node")
    waiting = submit(subject, *map(job, "BC"))
    subject.node_up(*FakeNode(), limits(2))
    assert effects.granted == waiting[:1]
    assert subject.node_counts("node").busy == 2
    subject.finished(restored, cost=1.0)
    assert effects.granted == waiting


def test_restored_job_may_end_before_its_node_comes_up():
    subject, effects = scheduler()
    restored = job("A")
    subject.restore(restored, "node")
    subject.leave(restored)
    waiting = submit(subject, *map(job, "BB"))
    subject.node_up(*FakeNode(), limits(2))
    assert effects.granted == waiting


def test_node_that_failed_before_it_came_up_has_no_restored_seats():
    subject, _ = scheduler()
    restored = job("A")
    subject.restore(restored, "node")
    subject.node_down("node")
    subject.node_up(*FakeNode(), limits(2))
    assert subject.node_counts("node").busy == 0
    subject.finished(restored, cost=1.0)
    assert subject.node_counts("node").busy == 0


def test_restored_job_is_queued_first_when_its_node_fails():
    subject, effects = scheduler()
    subject.node_up(*FakeNode(), limits(1))
    restored = job("A")
    subject.restore(restored, "node")
    submit(subject, *map(job, "AB"))
    subject.node_down("node")
    subject.requeued(restored)
    subject.node_up(*FakeNode(), limits(1))
    assert effects.granted == [restored]


async def test_dispatcher_continues_a_job_with_its_seat_grant_and_wait(autojump_clock):
    dispatcher = Dispatcher(QueueConfig(), random=Random(0), epoch=7)
    dispatcher.scheduler.node_up(*FakeNode(), limits(1))
    held = WaitingTask(dispatcher.new_ticket(job("A").job))
    dispatcher.restore(held, HeldSeat("node", Grant(6, 12), 3.0, has_begun=True), age_s=30.0)
    assert (held.grant, held.waited_s) == (Grant(6, 12), 3.0)
    assert held.ticket.has_begun
    next_one = WaitingTask(dispatcher.new_ticket(job("B").job))
    dispatcher.submit(next_one)
    assert next_one.grant is None
    await trio.sleep(2)
    dispatcher.end(held)
    assert (next_one.grant, next_one.waited_s) == (Grant(7, 1), 2.0)
    dispatcher.end(next_one)
    assert dispatcher.statistics().running == 0


async def test_job_that_waited_before_keeps_its_deadline(autojump_clock):
    dispatcher = Dispatcher(QueueConfig(timeout_s=60.0), random=Random(0))
    late = WaitingTask(dispatcher.new_ticket(job("A").job))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(dispatcher.run)
        dispatcher.submit(late, age_s=50.0)
        await trio.sleep(9.5)
        assert late.error is None
        await trio.sleep(1)
        assert late.error is not None
        assert late.error.code == "queue_timeout"
        dispatcher.end(late)
        nursery.cancel_scope.cancel()
