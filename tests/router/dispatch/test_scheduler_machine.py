"""The scheduler under random events, and mutants which prove that the machine finds errors."""

from collections.abc import Iterable
from functools import partial

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from fairlead._cext.fairqueue import FairQueue
from fairlead.router.dispatch import suspension
from fairlead.router.dispatch.effects import PausedModel
from fairlead.router.dispatch.fullness import FullModel, Pause
from fairlead.router.dispatch.job_spec import JobSpec
from fairlead.router.dispatch.kept_seats import KeptSeats
from fairlead.router.dispatch.node_groups import JobKind
from fairlead.router.dispatch.node_pool import NodePool
from fairlead.router.dispatch.node_state import NodeState
from fairlead.router.dispatch.queue import Queue
from fairlead.router.dispatch.scheduler import Scheduler
from fairlead.router.dispatch.seat_search import SeatSearch
from fairlead.router.dispatch.suspension import Suspension
from fairlead.router.dispatch.swaps import Swaps
from fairlead.router.dispatch.ticket import Run, RunState, Ticket, TicketState
from fairlead.router.dispatch.tickets import Tickets
from first_failure import until_first_failure
from router.dispatch import test_fullness as fullness
from router.dispatch import test_job_seats as job_seats
from router.dispatch import test_kept_seats as kept_seats
from router.dispatch import test_scheduler as scheduler
from router.dispatch import test_scheduler_models as models
from router.dispatch import test_scheduler_swaps as swaps
from router.dispatch import test_sequence_seats as sequence_seats
from router.dispatch import test_suspension as pauses
from router.dispatch.scheduler_machine import (
    SETTINGS,
    SchedulerMachine,
    SequenceMachine,
    TokensMachine,
    TokensSequenceMachine,
)

TestRoundRobin = SchedulerMachine.TestCase
TestRoundRobin.settings = SETTINGS
TestTokens = TokensMachine.TestCase
TestTokens.settings = SETTINGS

TestSequences = SequenceMachine.TestCase
TestSequences.settings = settings(SETTINGS, max_examples=50)
TestSequencesByTokens = TokensSequenceMachine.TestCase
TestSequencesByTokens.settings = settings(SETTINGS, max_examples=50)


# A mutant is found in fewer than a hundred examples; what is drawn depends on the version of Hypothesis.
HUNT = until_first_failure(SETTINGS, max_examples=2000)


def omits_the_pump(self: Scheduler) -> None:
    return None


def releases_a_seat_twice(self: NodePool, ticket: Ticket) -> NodeState:
    node = _release(self, ticket)
    if node.busy:
        node.release(0)
    return node


def keeps_the_seat_of_a_removed_job(self: NodePool, ticket: Ticket) -> NodeState | None:
    node, ticket.node = ticket.node, None
    return node


def evicts_a_busy_model(self: Swaps) -> None:
    jobs = {node: node.jobs for node in self._nodes.values()}
    for node in jobs:
        node.jobs = 0
    _start_swaps(self)
    for node, count in jobs.items():
        node.jobs = count


def never_starts_a_swap(self: Swaps) -> None:
    return None


def counts_one_seat_too_many(self: NodeState) -> int:
    return 0 if self.draining else self.limits.seats + 1 - self.busy


def ignores_the_deadline(self: Scheduler, ticket: Ticket, error: Exception) -> None:
    if ticket.state is TicketState.GRANTED:
        _deadline(self, ticket, error)


def ignores_a_deadline_that_passed_in_a_seat(self: Scheduler, ticket: Ticket, error: Exception) -> None:
    late = ticket.late
    _deadline(self, ticket, error)
    ticket.late = late


def puts_all_tickets_into_one_class(self: Queue, ticket: Ticket, push) -> None:
    def push_into_default_class(tenant: str, cost: float, **options: int) -> int:
        return push(tenant, cost, **options | {"priority": 1})

    _add(self, ticket, push_into_default_class)


def keeps_the_displaced_ticket_in_its_line(self: Queue, ticket: Ticket) -> None:
    ticket.become(TicketState.DONE)


def prefers_the_node_that_failed(self: NodePool, ticket: Ticket) -> tuple[NodeState, ...]:
    return ticket.unsuited


def relays_a_model_that_it_does_not_have(self: NodeState, job: JobSpec) -> bool:
    return job.model in self.models


def forgets_a_node_that_has_a_seat_again(self: NodePool) -> None:
    for node in [node for node in self._changed if node.busy < node.limits.seats and node.used]:
        del self._changed[node]
    _update(self)


def takes_all_jobs_to_be_of_one_kind(self: NodePool, job: JobSpec) -> JobKind:
    (kind, *_) = self._kinds.values() or [_kind(self, job)]
    return kind


def keeps_a_removed_node_in_its_group(self: NodePool, node: NodeState) -> None:
    return None


def charges_for_each_attempt(self: Scheduler, ticket: Ticket) -> None:
    self._queue.requeue = self._queue.push
    _requeue(self, ticket)
    del self._queue.requeue


def ignores_that_a_node_is_full(self: Tickets, ticket: Ticket, named_s, *, is_limit: bool) -> None:
    return None


def never_uses_a_full_node_again(self: Scheduler, pause: PausedModel) -> None:
    return None


def takes_all_models_of_a_node_to_be_full(self: NodeState) -> None:
    _update_full(self)
    if self.closed_models:
        self.closed_models = self.models


def lets_all_jobs_try(self: FullModel, ticket: Ticket) -> list:
    return []


def takes_a_rejection_to_concern_all_tenants(self: FullModel, ticket: Ticket, named_s, *, is_limit) -> list:
    self.of_all = self.of_all or Pause()
    return [(None, self.of_all.begin(named_s, is_limit=is_limit, grows=ticket.is_trial))]


def lets_one_tenant_pause_the_others_again(self: FullModel, ticket: Ticket, named_s, *, is_limit) -> list:
    self.of_tenants.pop(ticket.job.tenant, None)
    return _rejected(self, ticket, named_s, is_limit=is_limit)


def opens_for_all_tenants_only_when_each_succeeds(self: FullModel, ticket: Ticket) -> None:
    self.of_tenants.pop(ticket.job.tenant, None)
    if not self.of_tenants:
        self.of_all = None


def never_pauses_longer(self: Pause, named_s: float | None, *, is_limit: bool, grows: bool) -> float:
    return _begin(self, named_s, is_limit=is_limit, grows=False)


def never_places_a_node_last(self: Scheduler, ticket: Ticket) -> None:
    return None


def never_tries_again_after_a_trial_without_result(self: Tickets, ticket: Ticket, node: NodeState) -> None:
    ticket.is_trial = False


def returns_to_a_node_that_refused_the_job(self: Scheduler, ticket: Ticket) -> None:
    self.stale(ticket)


def waits_for_nodes_that_have_all_refused_the_job(self: Scheduler) -> None:
    return None


def refunds_nothing(self: Queue, ticket: Ticket, *, down_to: float) -> None:
    return None


def removes_busy_nodes(self: Scheduler) -> None:
    for node in [node for node in self._nodes.values() if node.leaving]:
        node.jobs, kept = 0, node.jobs
        _remove_leaving_nodes(self)
        node.jobs = kept


def grants_seats_of_a_removed_node(self: NodeState) -> int:
    return 0 if self.draining else self.limits.seats - self.busy


def omits_stopping_models(self: Swaps, models: Iterable[str]) -> None:
    return None


def evicts_for_a_request_that_must_not_evict(self: Swaps, model: str) -> bool:
    return False


def never_ends_a_load_request(self: Swaps, model: str, error: Exception | None) -> None:
    return None


def expires_although_it_was_used(self: Scheduler, node_id: str, used: int) -> None:
    if node_id in self._nodes:
        _expired(self, node_id, self._nodes[node_id].used)


def keeps_evicting_when_it_drains(self: Scheduler) -> None:
    self._pump = lambda: None
    _drain(self)
    del self._pump


def takes_one_seat_for_all_sequences(self: NodeState, tokens: int, seats: int = 1) -> None:
    _acquire(self, tokens, 1)


def gives_back_one_seat(self: NodePool, ticket: Ticket) -> NodeState:
    for run in ticket.runs.values():
        run.seats = 1
    return _release(self, ticket)


def gives_back_as_many_seats_as_it_would_take_now(self: NodePool, ticket: Ticket) -> NodeState:
    for run in ticket.runs.values():
        run.seats = ticket.node.seats_for(ticket.job.seats)
    return _release(self, ticket)


def needs_seats_that_the_node_does_not_have(self: NodeState, seats: int) -> int:
    return seats


def fits_if_any_seat_is_free(self: NodePool, ticket: Ticket) -> bool | None:
    groups = self.kind(ticket.job).groups
    return any(node not in self.avoided(ticket) for group in groups for node in group.free) or None


def never_keeps_seats(self: NodePool, ticket: Ticket) -> None:
    return None


def keeps_the_seats_of_every_node(self: NodePool, ticket: Ticket) -> None:
    for node in self.values():
        if node.free > 0:
            node.is_held = True
            self.held.append(node)


def keeps_seats_of_a_node_that_cannot_run_the_job(self: NodePool, ticket: Ticket) -> None:
    for node in [node for node in self.values() if node.free > 0][:1]:
        node.is_held = True
        self.held.append(node)


def keeps_seats_where_the_most_are_missing(self: NodePool, ticket: Ticket) -> None:
    groups = self.kind(ticket.job).groups
    free = [node for group in groups for node in group.free if node not in self.avoided(ticket)]
    for node in sorted(free, key=lambda node: node.free - node.seats_for(ticket.job.seats))[:1]:
        node.is_held = True
        self.held.append(node)


def keeps_seats_for_ever(self: NodePool) -> None:
    self.held.clear()


def counts_no_job_that_overtakes(self: NodePool, ticket: Ticket, other: Ticket) -> bool:
    return False


def counts_jobs_on_other_nodes(self: NodePool, ticket: Ticket, other: Ticket) -> bool:
    return True


def looks_no_further_than_a_job_that_lacks_seats(self: SeatSearch, ticket: Ticket) -> None:
    _pass_over(self, ticket)
    self.kinds = 0


def passes_over_kinds_with_the_same_number(self: SeatSearch, ticket: Ticket) -> None:
    _pass_over(self, ticket)
    self.kinds &= ~(1 << ticket.kind)


def grants_them_as_if_they_took_one_seat(self: Tickets, search: SeatSearch) -> list[Ticket]:
    return self._next(search.kinds)


def suspends_the_oldest(self: Suspension):
    for exchange in _exchanges(self):
        victim = exchange.victim
        alike = [
            run
            for run in victim.ticket.node.runs
            if run.ticket.job.tenant == victim.ticket.job.tenant and run.is_ripe
            if run.ticket.job.priority == victim.ticket.job.priority
        ]
        yield exchange._replace(victim=min(alike, key=lambda run: run.number))


def suspends_before_a_quantum(run: Run) -> bool:
    return run.suspensions < 3


def suspends_without_end(run: Run) -> bool:
    run.suspensions = 0
    return run.is_ripe


def suspends_for_nobody(self: Suspension):
    return iter(())


def takes_half_a_seat_above_as_above(self, tenant: str) -> float:
    return _share(self, tenant) - 0.7


def ignores_who_waits(self, tenant: str) -> float:
    return _share(self, tenant) * 2


def suspends_for_lower_classes(self, victim_priority: int):
    return _is_below(self, 7)


def keeps_no_seats_for_tenants(self: KeptSeats, model: str, nodes, waiting) -> None:
    return None


def keeps_seats_from_everybody(self: KeptSeats, model: str, nodes, waiting) -> None:
    for node in nodes:
        if node.fresh:
            node.kept_from[model] = frozenset("ABC")


def takes_all_seats_to_be_kept(self: KeptSeats, model: str) -> bool:
    return True


def keeps_seats_for_good(self: NodePool, node: NodeState, number: int) -> None:
    return None


def keeps_seats_that_are_taken(self: NodePool, node: NodeState, run: Run) -> None:
    return None


def keeps_seats_of_nobody(self: KeptSeats, job: JobSpec) -> bool:
    return False


def keeps_the_seat_of_a_suspended_sequence(self: NodePool, run: Run) -> None:
    run.state = RunState.SUSPENDED


def forgets_suspended_sequences(self: Queue, run: Run) -> None:
    return None


def leaves_suspended_sequences_of_ended_jobs(self: Queue, run: Run) -> None:
    return None


def resumes_nothing_on_nodes_that_close(self: Tickets) -> None:
    return None


def starts_the_same_sequence_again(self: NodePool, ticket: Ticket, index: int, seats: int = 1) -> None:
    _begin_run(self, ticket, 0, seats)


def charges_all_for_each_sequence(self: Ticket) -> float:
    return self.cost


_exchanges = Suspension.exchanges
_share = suspension._Shares.share
_is_below = suspension._Shares._is_below
_begin_run = NodePool.begin
_acquire = NodeState.acquire
_update_full = NodeState.update_full
_rejected = FullModel.rejected
_begin = Pause.begin
_pass_over = SeatSearch.pass_over
_update = NodePool._update
_kind = NodePool.kind
_remove_leaving_nodes = Scheduler._remove_leaving_nodes
_drain = Scheduler.drain
_expired = Scheduler.expired
_requeue = Scheduler._requeue
_release = NodePool.release
_start_swaps = Swaps.start
_deadline = Scheduler.deadline
_add = Queue._add


@pytest.mark.slow  # all parameters together
@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    [
        (Scheduler, "_pump", omits_the_pump),
        (NodePool, "release", releases_a_seat_twice),
        (NodePool, "release", keeps_the_seat_of_a_removed_job),
        (Swaps, "start", never_starts_a_swap),
        (NodeState, "free", property(counts_one_seat_too_many)),
        (Scheduler, "deadline", ignores_the_deadline),
        (Queue, "_add", puts_all_tickets_into_one_class),
        (Queue, "_forget", keeps_the_displaced_ticket_in_its_line),
        (NodePool, "avoided", prefers_the_node_that_failed),
        (NodePool, "_update", forgets_a_node_that_has_a_seat_again),
        (NodePool, "kind", takes_all_jobs_to_be_of_one_kind),
        (NodePool, "_ungroup", keeps_a_removed_node_in_its_group),
        (NodeState, "accepts", relays_a_model_that_it_does_not_have),
        (Scheduler, "_requeue", charges_for_each_attempt),
        (Tickets, "rejected", ignores_that_a_node_is_full),
        (Scheduler, "resume", never_uses_a_full_node_again),
        (NodeState, "update_full", takes_all_models_of_a_node_to_be_full),
        (FullModel, "rejected", takes_a_rejection_to_concern_all_tenants),
        (Scheduler, "unsuited", returns_to_a_node_that_refused_the_job),
        (Scheduler, "_refuse_unsuited", waits_for_nodes_that_have_all_refused_the_job),
        (Queue, "refund", refunds_nothing),
        (Scheduler, "_remove_leaving_nodes", removes_busy_nodes),
        (Swaps, "stopping", omits_stopping_models),
        (Swaps, "end_load_request", never_ends_a_load_request),
        (NodeState, "acquire", takes_one_seat_for_all_sequences),
        (NodePool, "release", gives_back_one_seat),
        (NodeState, "seats_for", needs_seats_that_the_node_does_not_have),
        (NodePool, "fits", fits_if_any_seat_is_free),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_violated_rule_is_detected(monkeypatch: pytest.MonkeyPatch, owner, name, mutant):
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises((AssertionError, KeyError, ExceptionGroup)):
        run_state_machine_as_test(SchedulerMachine, settings=HUNT)


@pytest.mark.slow  # all parameters together
@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    [
        (Suspension, "exchanges", suspends_the_oldest),
        (suspension, "_may_pause", suspends_before_a_quantum),
        (Suspension, "exchanges", suspends_for_nobody),
        (suspension._Shares, "share", takes_half_a_seat_above_as_above),
        (suspension._Shares, "share", ignores_who_waits),
        (suspension._Shares, "_is_below", suspends_for_lower_classes),
        (NodePool, "suspend", keeps_the_seat_of_a_suspended_sequence),
        (Queue, "suspend", forgets_suspended_sequences),
        (Queue, "remove_run", leaves_suspended_sequences_of_ended_jobs),
        (NodePool, "begin", starts_the_same_sequence_again),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_violated_rule_of_sequences_is_detected(monkeypatch: pytest.MonkeyPatch, owner, name, mutant):
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises((AssertionError, KeyError, AttributeError, ExceptionGroup)):
        run_state_machine_as_test(SequenceMachine, settings=HUNT)


@pytest.mark.parametrize(
    ("owner", "name", "mutant", "case"),
    [
        (
            KeptSeats,
            "_keep",
            keeps_no_seats_for_tenants,
            kept_seats.test_seat_is_kept_for_the_tenant_that_has_just_left_it,
        ),
        (
            KeptSeats,
            "_keep",
            keeps_seats_from_everybody,
            kept_seats.test_nothing_is_kept_from_a_tenant_below_its_share,
        ),
        (
            KeptSeats,
            "nobody_may_have",
            takes_all_seats_to_be_kept,
            kept_seats.test_nothing_is_kept_from_a_tenant_below_its_share,
        ),
        (
            NodePool,
            "rested",
            keeps_seats_for_good,
            kept_seats.test_seat_is_kept_for_the_tenant_that_has_just_left_it,
        ),
        (
            NodePool,
            "_use_fresh",
            keeps_seats_that_are_taken,
            kept_seats.test_seat_is_kept_for_the_tenant_that_has_just_left_it,
        ),
        (
            NodePool,
            "release",
            gives_back_as_many_seats_as_it_would_take_now,
            job_seats.test_number_of_seats_is_decided_when_they_are_granted,
        ),
        (Swaps, "start", evicts_a_busy_model, swaps.test_model_with_work_in_flight_is_never_evicted),
        (
            Scheduler,
            "deadline",
            ignores_a_deadline_that_passed_in_a_seat,
            scheduler.test_job_requeued_after_its_deadline_is_refused_and_costs_nothing,
        ),
        (
            Swaps,
            "_only_if_free",
            evicts_for_a_request_that_must_not_evict,
            models.test_spare_load_request_evicts_nothing_until_it_is_strengthened,
        ),
        (
            FullModel,
            "granted",
            lets_all_jobs_try,
            fullness.test_one_job_tries_again_and_all_follow_when_it_succeeds,
        ),
        (
            Scheduler,
            "expired",
            expires_although_it_was_used,
            models.test_model_expires_only_if_it_had_no_job_since,
        ),
        (
            NodeState,
            "free",
            property(grants_seats_of_a_removed_node),
            models.test_closed_node_finishes_its_jobs_and_gets_no_more_after_a_restart_either,
        ),
        (
            suspension,
            "_may_pause",
            suspends_without_end,
            pauses.test_sequence_pauses_at_most_three_times_until_its_tenant_is_within_its_share,
        ),
        (
            Ticket,
            "share",
            property(charges_all_for_each_sequence),
            sequence_seats.test_each_sequence_is_charged_when_it_starts,
        ),
        (
            Tickets,
            "_finish_closing_nodes",
            resumes_nothing_on_nodes_that_close,
            pauses.test_model_is_not_unloaded_while_a_sequence_of_it_is_suspended,
        ),
        (
            KeptSeats,
            "is_last",
            keeps_seats_of_nobody,
            kept_seats.test_seat_is_kept_for_the_tenant_that_has_just_left_it,
        ),
        (
            Scheduler,
            "drain",
            keeps_evicting_when_it_drains,
            swaps.test_node_has_seats_again_after_its_starving_job_is_refused_at_shutdown,
        ),
        (
            FullModel,
            "rejected",
            lets_one_tenant_pause_the_others_again,
            fullness.test_rejection_of_a_tenant_while_others_are_served_pauses_only_that_tenant,
        ),
        (
            FullModel,
            "succeeded",
            opens_for_all_tenants_only_when_each_succeeds,
            fullness.test_another_tenant_tries_after_the_first_pause_and_is_not_held_up_by_the_first_one,
        ),
        (
            Tickets,
            "end_trial",
            never_tries_again_after_a_trial_without_result,
            partial(fullness.test_another_job_tries_when_a_trial_ends_without_a_result, "leave"),
        ),
        (
            Pause,
            "begin",
            never_pauses_longer,
            fullness.test_pause_doubles_up_to_a_bound_and_begins_anew_after_a_success,
        ),
        (
            Scheduler,
            "node_failed",
            never_places_a_node_last,
            fullness.test_node_that_has_failed_lately_gets_a_job_only_if_no_other_has_a_free_seat,
        ),
        (
            NodePool,
            "hold_back",
            never_keeps_seats,
            job_seats.test_seats_are_kept_where_the_fewest_are_missing,
        ),
        (
            NodePool,
            "end_holds",
            keeps_seats_for_ever,
            job_seats.test_seats_that_are_kept_are_free_again_when_the_job_leaves,
        ),
        (
            NodePool,
            "waits_for_node_of",
            counts_no_job_that_overtakes,
            job_seats.test_jobs_on_nodes_that_cannot_run_it_do_not_overtake,
        ),
        (
            SeatSearch,
            "pass_over",
            looks_no_further_than_a_job_that_lacks_seats,
            job_seats.test_jobs_on_nodes_that_cannot_run_it_do_not_overtake,
        ),
        (
            Tickets,
            "_search",
            grants_them_as_if_they_took_one_seat,
            job_seats.test_number_of_seats_is_decided_when_they_are_granted,
        ),
        (
            NodePool,
            "hold_back",
            keeps_the_seats_of_every_node,
            job_seats.test_seats_are_kept_on_one_node_only,
        ),
        (
            NodePool,
            "hold_back",
            keeps_seats_of_a_node_that_cannot_run_the_job,
            job_seats.test_seats_are_kept_only_where_the_job_can_run,
        ),
        (
            NodePool,
            "hold_back",
            keeps_seats_where_the_most_are_missing,
            job_seats.test_seats_are_kept_where_the_fewest_are_missing,
        ),
        (
            NodePool,
            "waits_for_node_of",
            counts_jobs_on_other_nodes,
            job_seats.test_jobs_on_nodes_that_cannot_run_it_do_not_overtake,
        ),
        (
            SeatSearch,
            "pass_over",
            passes_over_kinds_with_the_same_number,
            job_seats.test_many_numbers_of_sequences_are_told_apart,
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_separate_test_catches_what_the_machine_reaches_too_rarely(monkeypatch, owner, name, mutant, case):
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises((AssertionError, KeyError)):
        case()


def test_machine_uses_the_compiled_queue():
    assert isinstance(SchedulerMachine().subject._queue._kernel._line, FairQueue)
