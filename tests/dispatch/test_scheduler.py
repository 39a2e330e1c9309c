"""The scheduler as a pure state machine, driven by events against recorded effects."""

from collections import Counter, deque
from contextlib import AbstractAsyncContextManager
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fairlead.dispatch.scheduler import Scheduler, Ticket, TicketState
from fairlead.errors import Draining, FairleadError, InvalidRequest, LoadFailed, QueueFull
from fairlead.job import Job, Sampling
from fairlead.nodes.deltas import Deltas
from fairlead.nodes.node import NodeLimits

MODEL = "m"


class FakeNode:
    def __init__(self, id: str = "node") -> None:  # noqa: A002
        self.id = id
        self.models = frozenset({MODEL})

    def generate(self, job: Job) -> AbstractAsyncContextManager[Deltas]:
        raise AssertionError("the scheduler never generates")


class RecordedEffects:
    def __init__(self) -> None:
        self.granted: list[Ticket] = []
        self.refused: dict[Ticket, FairleadError] = {}

    def grant(self, ticket: Ticket) -> None:
        self.granted.append(ticket)

    def refuse(self, ticket: Ticket, error: FairleadError) -> None:
        assert ticket not in self.refused
        self.refused[ticket] = error


def job(tenant: str = "A", *, prompt: int = 3) -> Job:
    return Job(
        id="r", tenant=tenant, model=MODEL, prompts=(list(range(prompt)),), sampling=Sampling(max_tokens=1)
    )


def limits(seats: int, *, longest: int = 100) -> NodeLimits:
    return NodeLimits(seats=seats, max_model_len=longest)


def scheduler(capacity: int = 100) -> tuple[Scheduler, RecordedEffects]:
    effects = RecordedEffects()
    return Scheduler(effects, capacity=capacity, random=Random(0)), effects


def submit(to: Scheduler, *jobs: Job) -> list[Ticket]:
    tickets = [Ticket(each) for each in jobs]
    for ticket in tickets:
        to.submit(ticket)
    return tickets


def test_two_tenants_with_five_jobs_and_two_are_served_a_b_a_b_a_a_a():
    subject, effects = scheduler()
    tickets = submit(subject, *map(job, "AAAAABB"))
    subject.node_up(FakeNode(), limits(1))
    for _ in tickets:
        subject.leave(effects.granted[-1])
    assert "ABABAAA" == "".join(ticket.job.tenant for ticket in effects.granted)


def test_a_job_with_a_free_seat_never_counts_against_the_queue():
    subject, effects = scheduler(capacity=2)
    subject.node_up(FakeNode(), limits(3))
    tickets = submit(subject, *map(job, "AAAAAA"))
    assert tickets[:3] == effects.granted
    assert [tickets[5]] == list(effects.refused)
    assert isinstance(effects.refused[tickets[5]], QueueFull)
    assert 2 == subject.statistics().waiting


def test_with_capacity_zero_a_busy_node_refuses_at_once():
    subject, effects = scheduler(capacity=0)
    subject.node_up(FakeNode(), limits(1))
    first, second = submit(subject, job(), job())
    assert [first] == effects.granted
    assert [second] == list(effects.refused)


def test_a_departed_waiter_never_holds_a_seat():
    subject, effects = scheduler()
    subject.node_up(FakeNode(), limits(1))
    first, second, third = submit(subject, job(), job(), job())
    subject.leave(second)
    subject.leave(first)
    assert [first, third] == effects.granted
    subject.leave(third)
    assert (0, 0) == (subject.statistics().waiting, subject.statistics().running)


def test_leaving_twice_frees_one_seat():
    subject, effects = scheduler()
    subject.node_up(FakeNode(), limits(1))
    first, *_ = submit(subject, job(), job(), job())
    subject.leave(first)
    subject.leave(first)
    assert 2 == len(effects.granted)
    assert 1 == subject.statistics().running


def test_a_seat_of_a_node_that_went_down_is_not_given_back_to_its_next_life():
    subject, effects = scheduler()
    node = FakeNode()
    subject.node_up(node, limits(1))
    first, second, third = submit(subject, job(), job(), job())
    subject.node_down(node)
    subject.node_up(node, limits(1))
    assert [first, second] == effects.granted
    subject.leave(first)
    assert TicketState.QUEUED is third.state
    assert 1 == subject.statistics().running


def test_nobody_is_granted_a_seat_on_a_node_that_is_down():
    subject, effects = scheduler()
    node = FakeNode()
    subject.node_up(node, limits(1))
    first, second = submit(subject, job(), job())
    subject.node_down(node)
    subject.leave(first)
    assert [first] == effects.granted
    assert TicketState.QUEUED is second.state


def test_an_idle_node_comes_before_a_busy_one():
    subject, effects = scheduler()
    subject.node_up(FakeNode("big"), limits(8))
    subject.node_up(FakeNode("small"), limits(1))
    submit(subject, job(), job(), job())
    nodes = Counter(ticket.place.node.id for ticket in effects.granted if ticket.place)
    assert Counter(big=2, small=1) == nodes


def test_a_prompt_that_fits_no_node_is_refused_and_one_that_fits_exactly_is_not():
    subject, effects = scheduler()
    subject.node_up(FakeNode(), limits(2, longest=10))
    fits, too_long = submit(subject, job(prompt=9), job(prompt=10))
    assert [fits] == effects.granted
    assert isinstance(effects.refused[too_long], InvalidRequest)
    assert "prompt" == effects.refused[too_long].param


def test_a_prompt_that_waited_for_the_model_is_refused_when_it_turns_out_not_to_fit():
    subject, effects = scheduler()
    (too_long,) = submit(subject, job(prompt=10))
    subject.node_up(FakeNode(), limits(2, longest=10))
    assert isinstance(effects.refused[too_long], InvalidRequest)
    assert 0 == subject.statistics().waiting


def test_waiters_are_told_when_the_model_cannot_be_loaded():
    subject, effects = scheduler()
    (waiting,) = submit(subject, job())
    error = LoadFailed("no such file")
    subject.load_failed(FakeNode(), error)
    assert {waiting: error} == effects.refused


def test_waiters_stay_when_another_node_has_the_model():
    subject, effects = scheduler()
    subject.node_up(FakeNode("one"), limits(1))
    _running, waiting = submit(subject, job(), job())
    subject.load_failed(FakeNode("two"), LoadFailed("no such file"))
    assert {} == effects.refused
    assert TicketState.QUEUED is waiting.state


def test_draining_refuses_who_waits_and_who_comes_and_lets_the_running_finish():
    subject, effects = scheduler()
    subject.node_up(FakeNode(), limits(1))
    running, waiting = submit(subject, job(), job())
    subject.drain()
    (late,) = submit(subject, job())
    assert [waiting, late] == list(effects.refused)
    assert all(isinstance(error, Draining) for error in effects.refused.values())
    assert 1 == subject.statistics().running
    subject.leave(running)
    assert 0 == subject.statistics().running


class SchedulerMachine(RuleBasedStateMachine):
    """Random events; the counts and the order are held against a plain model of the rules."""

    CAPACITY = 5

    def __init__(self) -> None:
        super().__init__()
        self.subject, self.effects = scheduler(self.CAPACITY)
        self.tickets: list[Ticket] = []
        self.nodes = [FakeNode("one"), FakeNode("two")]
        self.up: dict[str, int] = {}
        self.held: dict[Ticket, str] = {}
        self.lines: dict[str, deque[Ticket]] = {}
        self.seen_grants = 0
        self.left: set[Ticket] = set()

    def settle(self) -> None:
        """Take in new grants; each must be the oldest of its tenant, and come while a seat was free."""
        for ticket in self.effects.granted[self.seen_grants :]:
            line = self.lines[ticket.job.tenant]
            assert line.popleft() is ticket, "FIFO within a tenant"
            assert ticket.place is not None
            self.held[ticket] = ticket.place.node.id
        self.seen_grants = len(self.effects.granted)

    @rule(tenant=st.sampled_from("ABC"), prompt=st.sampled_from([1, 9, 10, 50]))
    def submit(self, tenant: str, prompt: int) -> None:
        ticket = Ticket(job(tenant, prompt=prompt))
        line = self.lines.setdefault(tenant, deque())
        line.append(ticket)
        self.subject.submit(ticket)
        self.tickets.append(ticket)
        if ticket in self.effects.refused:
            line.remove(ticket)
        self.settle()

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        if ticket.state is TicketState.QUEUED:
            self.lines[ticket.job.tenant].remove(ticket)
        self.held.pop(ticket, None)
        self.left.add(ticket)
        self.subject.leave(ticket)
        self.settle()

    @rule(number=st.integers(0, 1), seats=st.integers(1, 3))
    def node_up(self, number: int, seats: int) -> None:
        node = self.nodes[number]
        self.lose(node.id)
        self.up[node.id] = seats
        self.subject.node_up(node, limits(seats, longest=10))
        for line in self.lines.values():
            for ticket in [each for each in line if each in self.effects.refused]:
                line.remove(ticket)
        self.settle()

    @rule(number=st.integers(0, 1))
    def node_down(self, number: int) -> None:
        self.lose(self.nodes[number].id)
        self.up.pop(self.nodes[number].id, None)
        self.subject.node_down(self.nodes[number])
        self.settle()

    def lose(self, id: str) -> None:  # noqa: A002
        for ticket in [ticket for ticket, node in self.held.items() if node == id]:
            del self.held[ticket]

    @invariant()
    def counts_agree(self) -> None:
        statistics = self.subject.statistics()
        waiting = sum(map(len, self.lines.values()))
        assert waiting == statistics.waiting
        assert len(self.held) == statistics.running
        assert sum(self.up.values()) == statistics.seats
        assert waiting <= self.CAPACITY

    @invariant()
    def a_free_seat_means_nobody_waits(self) -> None:
        if len(self.held) < sum(self.up.values()):
            assert not any(self.lines.values())

    @invariant()
    def every_ticket_has_at_most_one_end(self) -> None:
        assert not set(self.effects.refused) & set(self.effects.granted)
        assert len(self.effects.granted) == len(set(self.effects.granted))


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_machine_catches_a_scheduler_that_forgets_to_pump(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Scheduler, "_pump", lambda _self: None)
    with pytest.raises(AssertionError):
        run_machine()


def test_the_machine_catches_a_scheduler_that_gives_one_seat_twice(monkeypatch: pytest.MonkeyPatch):
    leave = Scheduler.leave

    def leave_twice(self: Scheduler, ticket: Ticket) -> None:
        if ticket.state is TicketState.GRANTED and ticket.place is not None:
            ticket.place.busy -= 1
        leave(self, ticket)

    monkeypatch.setattr(Scheduler, "leave", leave_twice)
    with pytest.raises(AssertionError):
        run_machine()


def run_machine() -> None:
    from hypothesis import Phase
    from hypothesis.stateful import run_state_machine_as_test

    quick = settings(
        max_examples=200, stateful_step_count=30, deadline=None, phases=[Phase.generate], database=None
    )
    run_state_machine_as_test(SchedulerMachine, settings=quick)
