"""Random schedules of tenants, teams, classes, sequences, suspensions, failures and cancels.

The long form, 10,000 schedules of each machine:

    python -m pytest tests/router/dispatch/test_schedule_machine.py --nightly -k ten_thousand -s
"""

import pytest
from hypothesis.stateful import run_state_machine_as_test

from cext.fair_queue_oracle import FairQueueOracle
from fairlead._cext.fairqueue import FairQueue
from fairlead.router.dispatch import queue
from fairlead.router.dispatch.node_pool import NodePool
from fairlead.router.dispatch.node_state import NodeState
from fairlead.router.dispatch.queue import Queue
from fairlead.router.dispatch.scheduler import Scheduler
from fairlead.router.dispatch.ticket import Run, Ticket
from fairlead.router.dispatch.tickets import Tickets
from first_failure import until_first_failure
from router.dispatch.schedule_machine import ScheduleMachine, TokensScheduleMachine
from router.dispatch.scheduler_machine import SETTINGS, SequenceMachine, TokensSequenceMachine

TestSchedules = ScheduleMachine.TestCase
TestSchedules.settings = SETTINGS
TestSchedulesByTokens = TokensScheduleMachine.TestCase
TestSchedulesByTokens.settings = SETTINGS


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "machine", [SequenceMachine, TokensSequenceMachine, ScheduleMachine, TokensScheduleMachine]
)
def test_ten_thousand_schedules(machine):
    run_state_machine_as_test(machine, settings=until_first_failure(SETTINGS, max_examples=10_000))
    if issubclass(machine, ScheduleMachine):
        print(machine.__name__, dict(machine.seen), dict(machine.spread), machine.longest_wait)  # noqa: T201


def takes_members_of_teams_for_tenants_without_one(line: str):
    return line.replace("\0", "/")


def divides_seats_among_all_lines(self: Queue, model: str, lines) -> dict[str, float]:
    return dict.fromkeys(lines, 1 / len({*lines, *self.lines(model)}))


def counts_weights_of_tenants_only(self: Queue, unit: str) -> float:
    return self._line_weight(unit)


def charges_a_team_what_its_tenant_is_charged(self: Queue, job, cost: float) -> tuple[float, float]:
    own, _ = _weighted(self, job, cost)
    return own, own


def charges_for_each_attempt(self: Queue, ticket: Ticket) -> None:
    ticket.paid = 0
    _requeue(self, ticket)


def charges_no_tokens_beyond_the_estimate(self: Queue, ticket: Ticket, cost: float) -> None:
    ticket.charged = max(ticket.charged, cost)


def keeps_the_seats_of_jobs_that_failed(self: NodePool, ticket: Ticket) -> NodeState:
    node, ticket.node = ticket.node, None
    ticket.runs = {}
    return node


def leaves_suspended_sequences_of_failed_jobs(self: Queue, ticket: Ticket) -> None:
    if self._kernel.discard(ticket.handle):
        self._forget(ticket)


def lets_nothing_suspended_go_on(self: Queue, fits, kinds=None):
    suspended = {run.ticket for run in self.suspended()}
    return _pop(self, lambda ticket: None if ticket in suspended else fits(ticket), kinds)


def resumes_where_it_began(self: NodePool, run: Run) -> None:
    _resume(self, run)
    run.ticket.runs[0] = run.ticket.runs.pop(run.index)


def omits_jobs_that_wait_for_their_first_seat(self: Tickets, kinds: int) -> list:
    return [] if self._queue.has_begun_jobs and len(self._queue) > 3 else _next(self, kinds)


_weighted = Queue._weighted
_requeue = Queue.requeue
_pop = Queue.pop
_resume = NodePool.resume
_next = Tickets._next


@pytest.mark.slow  # all parameters together
@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    [
        (queue, "_tenant_in", takes_members_of_teams_for_tenants_without_one),
        (Queue, "parts", divides_seats_among_all_lines),
        (Queue, "_unit_weight", counts_weights_of_tenants_only),
        (Queue, "_weighted", charges_a_team_what_its_tenant_is_charged),
        (Queue, "requeue", charges_for_each_attempt),
        (Queue, "charge", charges_no_tokens_beyond_the_estimate),
        (NodePool, "release", keeps_the_seats_of_jobs_that_failed),
        (Queue, "remove", leaves_suspended_sequences_of_failed_jobs),
        (Queue, "pop", lets_nothing_suspended_go_on),
        (NodePool, "resume", resumes_where_it_began),
        (Tickets, "_next", omits_jobs_that_wait_for_their_first_seat),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_violated_rule_is_detected(monkeypatch: pytest.MonkeyPatch, owner, name, mutant):
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises((AssertionError, KeyError, AttributeError, ExceptionGroup)):
        run_state_machine_as_test(
            TokensScheduleMachine, settings=until_first_failure(SETTINGS, max_examples=2000)
        )


class TeamsTakeNoTurns(FairQueueOracle):
    """Its counters are those of tenants, which it believes to be what they were charged."""

    def add(self, group, member, cost):
        if group is not self.top:
            super().add(group, member, cost)


class MembersTakeNoTurns(FairQueueOracle):
    def add(self, group, member, cost):
        if group is self.top:
            super().add(group, member, cost)


class FirstComeFirstServed(FairQueueOracle):
    def add(self, group, member, cost):
        return None


@pytest.mark.slow  # all parameters together
@pytest.mark.parametrize("kernel", [TeamsTakeNoTurns, MembersTakeNoTurns, FirstComeFirstServed])
def test_unequal_service_is_detected_although_all_charges_are_right(monkeypatch, kernel):
    monkeypatch.setattr(queue, "FairQueue", kernel)
    with pytest.raises(AssertionError, match="get is too far apart"):
        run_state_machine_as_test(
            TokensScheduleMachine, settings=until_first_failure(SETTINGS, max_examples=2000)
        )


def test_machine_uses_the_compiled_queue():
    assert isinstance(ScheduleMachine().subject._queue._kernel._line, FairQueue)
    assert isinstance(ScheduleMachine().subject, Scheduler)
