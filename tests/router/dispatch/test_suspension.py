"""Sequences pause for tenants that hold fewer seats than their share, and for classes that preempt."""

import gc
import weakref

import pytest
import trio
import trio.testing

from fairlead.base.config import QueueConfig
from fairlead.base.grant import FIRST_GRANT
from fairlead.base.sequence_seats import SequenceSeats
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.dispatch.held_sequences import HeldSequences
from fairlead.router.dispatch.scheduler import Scheduler
from fairlead.router.dispatch.ticket import RunState, Ticket, TicketState
from router.dispatch.recorded import FakeNode, engine_limits, job, limits, submit
from router.dispatch.test_sequence_seats import with_engine


def ripen(subject: Scheduler, *tickets: Ticket) -> None:
    """Let all sequences of these jobs have run for a quantum."""
    for ticket in tickets:
        for index in list(ticket.runs):
            subject.ripened(ticket, index)


def held(subject: Scheduler) -> dict[str, int]:
    """Return how many seats each tenant holds."""
    counts: dict[str, int] = {}
    for node in subject.nodes():
        for run in node.runs:
            counts[run.ticket.job.tenant] = counts.get(run.ticket.job.tenant, 0) + 1
    return counts


@pytest.mark.parametrize("fairness", ["roundRobin", "tokens"])
def test_tenant_below_its_share_gets_seats_of_the_one_above_at_once(fairness):
    subject, effects = with_engine(8, fairness=fairness)
    attack = submit(subject, *[job("A") for _ in range(20)])
    ripen(subject, *attack)
    submit(subject, *[job("B") for _ in range(6)])
    assert held(subject) == {"A": 4, "B": 4}
    submit(subject, job("C"))
    assert held(subject) == {"A": 3, "B": 4, "C": 1}
    assert effects.suspensions == 5


def test_newest_sequence_pauses_and_goes_on_in_its_turn():
    subject, effects = with_engine(2)
    first, second = submit(subject, job("A"), job("A"))
    ripen(subject, first, second)
    (other,) = submit(subject, job("B"))
    assert effects.paused == [(second, 0)]
    assert (other.seats, second.seats, second.state) == (1, 0, TicketState.GRANTED)
    (later,) = submit(subject, job("A"))
    subject.finished(other, cost=1.0)
    assert effects.paused == []
    assert second.seats == 1  # before the tenant's other job
    assert later.state is TicketState.QUEUED


def test_sequence_runs_for_a_quantum_before_it_pauses():
    subject, effects = with_engine(2)
    first, second = submit(subject, job("A"), job("A"))
    (other,) = submit(subject, job("B"))
    assert effects.suspensions == 0
    ripen(subject, first)
    assert effects.paused == [(first, 0)]
    assert other.seats == 1
    assert second.seats == 1


def test_one_seat_is_never_taken_away():
    subject, effects = with_engine(1)
    submit(subject, job("A"))
    tickets = submit(subject, *[job("A") for _ in range(4)], job("B"), job("B"))
    assert len(tickets) == 6
    for _ in range(7):
        ripen(subject, *effects.granted)
        subject.finished(effects.granted[-1], cost=1.0)
    assert "".join(ticket.job.tenant for ticket in effects.granted) == "ABABAAA"
    assert effects.suspensions == 0


def test_tenant_keeps_its_share():
    subject, effects = with_engine(4)
    attack = submit(subject, *[job("A") for _ in range(4)])
    ripen(subject, *attack)
    submit(subject, *[job(tenant) for tenant in "BCDEFG"])
    assert held(subject)["A"] == 1
    assert effects.suspensions == 3


def test_weights_decide_the_shares_under_token_fairness():
    subject, _ = with_engine(6, fairness="tokens", tenant_weights={"B": 2.0})
    ripen(subject, *submit(subject, *[job("A") for _ in range(9)]))
    submit(subject, *[job("B") for _ in range(9)])
    assert held(subject) == {"A": 2, "B": 4}


@pytest.mark.parametrize(
    ("weight", "expected"), [(1.0, {"A": 2, "B": 2, "c": 4}), (3.0, {"A": 3, "B": 3, "c": 2})]
)
def test_tenants_of_a_team_divide_its_share(weight, expected):
    subject, _ = with_engine(8, fairness="tokens")
    first = submit(subject, *[job("A", team="red", team_weight=weight) for _ in range(20)])
    ripen(subject, *first)
    submit(subject, *[job("c") for _ in range(20)])
    submit(subject, *[job("B", team="red", team_weight=weight) for _ in range(20)])
    ripen(subject, *[run.ticket for node in subject.nodes() for run in node.runs])
    assert held(subject) == expected


def test_sequence_pauses_at_most_three_times_until_its_tenant_is_within_its_share():
    subject, effects = with_engine(3)
    (wide,) = submit(subject, job("A", n=3))
    paused = []
    for _ in range(6):
        ripen(subject, wide)
        (other,) = submit(subject, job("B"))
        paused.append([index for _, index in effects.paused])
        subject.finished(other, cost=1.0)
    assert paused == [[2], [2], [2], [1], [1], [1]]


def test_nothing_pauses_where_suspension_is_off():
    subject, effects = with_engine(2, suspends=False)
    ripen(subject, *submit(subject, job("A"), job("A")))
    submit(subject, job("B"))
    assert effects.suspensions == 0


def test_nothing_pauses_on_a_server_that_runs_whole_requests():
    subject, effects = with_engine(2)
    subject.node_up(*FakeNode("whole", "n"), limits(2))
    ripen(subject, *submit(subject, job("A", model="n"), job("A", model="n")))
    submit(subject, job("B", model="n"))
    assert effects.suspensions == 0


def test_class_that_preempts_takes_the_seat_of_the_newest_of_the_lowest_class():
    subject, effects = with_engine(3, preempting=[0])
    low, other_low, normal = submit(subject, job("A", priority=2), job("A", priority=2), job("B", priority=1))
    ripen(subject, low, other_low, normal)
    submit(subject, job("A", priority=0))
    assert effects.paused == [(other_low, 0)]
    submit(subject, job("C", priority=0), job("C", priority=0))
    assert {ticket for ticket, _ in effects.paused} == {low, other_low, normal}
    (late,) = submit(subject, job("C", priority=0))
    assert late.state is TicketState.QUEUED


def test_lower_class_takes_no_seat_of_a_higher_one_beyond_its_least_share():
    for min_share, suspensions in ((0.0, 0), (0.5, 1)):
        subject, effects = with_engine(2, min_share=min_share)
        ripen(subject, *submit(subject, job("A", priority=0), job("A", priority=0)))
        submit(subject, job("B", priority=1))
        assert effects.suspensions == suspensions


@pytest.mark.parametrize("event", ["leave", "requeued", "sequence_ended"])
def test_suspended_sequence_may_end_in_any_way(event):
    subject, effects = with_engine(2)
    first, second = submit(subject, job("A"), job("A"))
    ripen(subject, first, second)
    submit(subject, job("B"))
    assert effects.paused == [(second, 0)]
    if event == "sequence_ended":
        subject.sequence_ended(second, 0)
    getattr(subject, "leave" if event == "sequence_ended" else event)(second)
    subject.leave(second)
    assert len(subject._queue._kernel) == 0
    assert [(node.jobs, node.busy) for node in subject.nodes()] == [(2, 2)]


def test_model_is_not_unloaded_while_a_sequence_of_it_is_suspended():
    subject, effects = with_engine(2)
    first, second = submit(subject, job("A"), job("A"))
    ripen(subject, first, second)
    (other,) = submit(subject, job("B"))
    subject.unload("m")
    subject.finished(first, cost=1.0)
    assert second.seats == 1  # it goes on, although new jobs get no seat
    subject.finished(other, cost=1.0)
    assert effects.stopped_models == []
    subject.finished(second, cost=1.0)
    assert effects.stopped_models == ["m"]


def test_suspended_sequence_of_an_earlier_dispatcher_goes_on():
    subject, effects = with_engine(1)
    effects.suspend(restored := job("A", n=3), 1)
    subject.restore(restored, "node", HeldSequences(running=(0,), begun=3, suspended=(1,)))
    assert restored.runs[1].state is RunState.SUSPENDED
    subject.sequence_ended(restored, 0)
    assert effects.paused == []
    assert restored.seats == 1


async def begin_and_wait(dispatcher: Dispatcher, tenant: str, started: list[SequenceSeats]) -> None:
    async with dispatcher.seat(job(tenant).job) as seat:
        started.append(seat.sequences)
        await trio.sleep_forever()


@pytest.mark.parametrize(("quantum_s", "rate", "waited_s"), [(2.0, 0, 1.0), (2.0, 1000, 0.0), (2.0, 20, 0.6)])
async def test_quantum_is_a_time_or_a_number_of_tokens(autojump_clock, nursery, quantum_s, rate, waited_s):
    """A job that arrives a second later gets the seat when the quantum ends. `rate`: tokens per second."""
    dispatcher = Dispatcher(QueueConfig(quantum_s=quantum_s, quantum_tokens=32))
    nursery.start_soon(dispatcher.run)
    dispatcher.scheduler.node_up(*FakeNode(), engine_limits(2))
    started: list[SequenceSeats] = []
    for _ in range(2):
        nursery.start_soon(begin_and_wait, dispatcher, "A", started)
    await trio.testing.wait_all_tasks_blocked()
    submitted_s = trio.current_time()
    for waiter in dispatcher.estimator.running():
        waiter.count_generated = lambda: int(rate * (trio.current_time() - submitted_s))
    await trio.sleep(1.0)
    began_s = trio.current_time()
    async with dispatcher.seat(job("B").job):
        assert waited_s <= trio.current_time() - began_s <= waited_s + quantum_s / 100
        assert sorted(len(seats.suspended) for seats in started) == [0, 1]
    await trio.testing.wait_all_tasks_blocked()
    assert [seats.suspended for seats in started] == [set(), set()]


class Runner:
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def start(self, index: int, _grant: object) -> None:
        self.calls.append(("start", index))

    def suspend(self, index: int) -> None:
        self.calls.append(("suspend", index))

    def resume(self, index: int) -> None:
        self.calls.append(("resume", index))

    def failed(self, error: Exception) -> None:
        raise error


def test_node_that_follows_late_learns_what_is_suspended():
    seats, runner = SequenceSeats(), Runner()
    seats.grant(0, FIRST_GRANT)
    seats.pause(0, is_paused=True)
    seats.pause(7, is_paused=True)  # which has not begun
    seats.follow(runner)
    seats.pause(0, is_paused=True)
    seats.pause(0, is_paused=False)
    seats.end(0)
    seats.pause(0, is_paused=True)
    assert runner.calls == [("start", 0), ("suspend", 0), ("resume", 0)]


async def test_seat_is_freed_without_the_garbage_collector(autojump_clock, nursery):
    dispatcher = Dispatcher(QueueConfig())
    nursery.start_soon(dispatcher.run)
    dispatcher.scheduler.node_up(*FakeNode(), engine_limits(2))
    gc.disable()
    try:
        async with dispatcher.seat(job("A").job) as seat:
            seats = weakref.ref(seat.sequences)
        del seat
        await trio.sleep(10)  # until no quantum of it is counted any more
        assert seats() is None
    finally:
        gc.enable()
