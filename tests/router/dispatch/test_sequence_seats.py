"""Where sequences start one by one, each takes a seat in a turn of its tenant."""

import pytest
import trio

from fairlead.base.config import QueueConfig
from fairlead.base.errors import Displaced
from fairlead.base.grant import Grant
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.dispatch.held_sequences import HeldSequences
from fairlead.router.dispatch.scheduler import Scheduler
from fairlead.router.dispatch.ticket import TicketState
from router.dispatch.recorded import (
    FakeNode,
    Ledger,
    RecordedEffects,
    engine_limits,
    job,
    remote_limits,
    scheduler,
    submit,
)
from router.dispatch.test_wait_estimator import begin, estimator, long_job, run_one_job, submit_job


def with_engine(seats: int, **options: object) -> tuple[Scheduler, RecordedEffects]:
    subject, effects = scheduler(**options)
    subject.node_up(*FakeNode(), engine_limits(seats))
    return subject, effects


def order(effects: RecordedEffects) -> str:
    """Return the tenants in the order in which their sequences have started."""
    return "".join(ticket.job.tenant for ticket in effects.all_started)


def end_oldest(subject: Scheduler, effects: RecordedEffects) -> None:
    """End the sequence that has run for longest; with its last sequence, its job."""
    ticket = next(ticket for ticket in effects.all_started if ticket.runs)
    if ticket.left or len(ticket.runs) > 1:
        subject.sequence_ended(ticket, min(ticket.runs))
    else:
        subject.finished(ticket, cost=ticket.charged)


def test_job_begins_with_as_many_seats_as_are_free_and_gets_the_others_later():
    subject, effects = with_engine(3)
    (wide,) = submit(subject, job("A", n=5))
    assert effects.granted == [wide]
    assert effects.started == [(wide, 1), (wide, 2)]
    assert (wide.seats, wide.left) == (3, 2)
    subject.sequence_ended(wide, 1)
    assert effects.started[2:] == [(wide, 3)]
    for index in (0, 2, 3):
        subject.sequence_ended(wide, index)
    assert effects.started[3:] == [(wide, 4)]
    assert (wide.seats, wide.left) == (1, 0)
    subject.finished(wide, cost=5.0)
    assert [node.busy for node in subject.nodes()] == [0]


@pytest.mark.parametrize("fairness", ["roundRobin", "tokens"])
def test_tenants_take_turns_sequence_by_sequence(fairness):
    subject, effects = with_engine(1, fairness=fairness)
    submit(subject, job("H"), job("A", n=4, cost=4.0), job("A"), job("B"), job("B", n=2, cost=2.0))
    while any(ticket.runs for ticket in effects.all_started):
        end_oldest(subject, effects)
    assert order(effects) == "HABABABAA"


def test_one_job_of_many_sequences_delays_another_tenant_by_one():
    subject, effects = with_engine(8)
    submit(subject, job("A", n=64))
    (small,) = submit(subject, job("B"))
    assert small.state is TicketState.QUEUED
    end_oldest(subject, effects)
    assert small.state is TicketState.GRANTED


def test_each_sequence_is_charged_when_it_starts():
    subject, _ = with_engine(1, fairness="tokens")
    ledger = subject._queue._kernel = Ledger(subject._queue._kernel)
    (wide,) = submit(subject, job("A", n=4, cost=40.0))
    assert ledger.charged["A"] == wide.charged == 10.0
    subject.sequence_ended(wide, 0)
    assert ledger.charged["A"] == wide.charged == 20.0
    subject.leave(wide)  # nothing of it was generated
    assert ledger.charged["A"] == 0.0


def test_job_that_is_requeued_is_charged_once_for_each_sequence():
    subject, effects = with_engine(2, fairness="tokens")
    ledger = subject._queue._kernel = Ledger(subject._queue._kernel)
    (wide,) = submit(subject, job("A", n=4, cost=40.0))
    subject.requeued(wide)
    assert effects.granted == [wide, wide]
    assert effects.started == [(wide, 1), (wide, 1)]
    assert ledger.charged["A"] == wide.charged == 20.0
    for index in (0, 1):
        subject.sequence_ended(wide, index)
    assert ledger.charged["A"] == wide.charged == 40.0


def test_server_that_takes_whole_requests_gets_all_sequences_at_once():
    subject, effects = scheduler(fairness="tokens")
    ledger = subject._queue._kernel = Ledger(subject._queue._kernel)
    subject.node_up(*FakeNode(), remote_limits(4))
    relayed = job("A", n=3, cost=30.0)
    relayed.job = relayed.job.__class__(
        request_id="r", tenant="A", model="m", sequences=3, body_bytes=10, max_tokens=1
    )
    submit(subject, relayed)
    assert (relayed.seats, relayed.left, effects.started) == (3, 0, [])
    assert ledger.charged["A"] == 30.0
    assert len(subject._queue._kernel) == 0


def test_job_that_has_begun_is_not_displaced_for_its_sequences_that_wait():
    subject, effects = with_engine(1, capacity=2)
    wide, first, second = submit(subject, job("A", n=9), job("A"), job("A"))
    submit(subject, job("B"))
    assert isinstance(effects.refused[second], Displaced)
    assert wide.state is TicketState.GRANTED
    assert first.state is TicketState.QUEUED


def test_sequences_that_wait_do_not_count_against_the_queue():
    subject, _ = with_engine(1, capacity=1)
    submit(subject, job("A", n=9))
    assert subject.statistics().waiting == 0
    (other,) = submit(subject, job("B"))
    assert other.state is TicketState.QUEUED


def test_model_is_unloaded_only_after_all_sequences_of_its_jobs():
    subject, effects = with_engine(1)
    (wide,) = submit(subject, job("A", n=3))
    subject.unload("m")
    late = submit(subject, job("B", n=2))[0]
    for index in range(3):
        assert effects.stopped_models == []
        assert index in wide.runs
        subject.sequence_ended(wide, index)
    subject.finished(wide, cost=1.0)
    assert effects.stopped_models == ["m"]
    assert late not in effects.granted


@pytest.mark.parametrize("event", ["requeued", "leave"])
def test_job_loses_its_sequences_that_wait_with_its_seats(event):
    subject, _ = with_engine(2)
    (wide,) = submit(subject, job("A", n=5))
    subject.node_down("node")
    getattr(subject, event)(wide)
    assert len(subject._queue._kernel) == (event == "requeued")
    subject.node_up(*FakeNode(), engine_limits(2))
    assert wide.seats == (2 if event == "requeued" else 0)
    subject.leave(wide)
    assert len(subject._queue._kernel) == 0


def test_restored_job_gets_its_other_sequences_from_the_next_scheduler():
    subject, effects = scheduler()
    restored = job("A", n=5)
    subject.restore(restored, "node", HeldSequences(running=(1, 2), begun=3))
    subject.node_up(*FakeNode(), engine_limits(3))
    assert effects.started == [(restored, 3)]
    subject.sequence_ended(restored, 1)
    assert effects.started == [(restored, 3), (restored, 4)]
    subject.finished(restored, cost=1.0)
    assert [(node.jobs, node.busy) for node in subject.nodes()] == [(0, 0)]


async def test_each_sequence_has_a_grant_of_its_own():
    dispatcher = Dispatcher(QueueConfig(), epoch=7)
    dispatcher.scheduler.node_up(*FakeNode(), engine_limits(2))
    async with dispatcher.seat(job(n=3).job) as seat:
        assert seat.grant == Grant(7, 1)
        assert seat.sequences.grants == {0: Grant(7, 1), 1: Grant(7, 2)}
        seat.sequences.end(0)
        assert seat.sequences.grants == {1: Grant(7, 2), 2: Grant(7, 3)}


async def test_estimate_counts_the_sequences_that_leave_before(autojump_clock):
    subject, to = estimator(1, estimate="quantile")
    to.node_up(*FakeNode(), engine_limits(2))
    await run_one_job(subject, to)
    wide = submit_job(subject, to, long_job(n=20, tenant="A"))
    begin(to, wide)
    await trio.sleep(1.0)
    behind = subject.for_newcomer("m", "B", 1)
    assert behind.position == 1  # its turn is the next one
    assert 8 <= behind.estimated_wait_s <= 10
