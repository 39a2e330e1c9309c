"""The scheduler as a pure state machine: its events, one situation at a time, against recorded effects."""

from collections import Counter

from fairlead.base.errors import (
    ContextLengthExceeded,
    Displaced,
    Draining,
    LoadFailed,
    NoQueue,
    QueueFull,
    QueueTimeout,
)
from fairlead.router.dispatch.effects import PausedModel
from fairlead.router.dispatch.ticket import TicketState
from router.dispatch.recorded import FakeNode, Ledger, job, limits, scheduler, submit


def test_two_tenants_with_five_jobs_and_two_are_served_a_b_a_b_a_a_a():
    subject, effects = scheduler()
    tickets = submit(subject, *map(job, "AAAAABB"))
    subject.node_up(*FakeNode(), limits(1))
    for _ in tickets:
        subject.leave(effects.granted[-1])
    assert "".join(ticket.job.tenant for ticket in effects.granted) == "ABABAAA"


def test_job_with_a_free_seat_never_counts_against_the_queue():
    subject, effects = scheduler(capacity=2)
    subject.node_up(*FakeNode(), limits(3))
    tickets = submit(subject, *map(job, "AAAAAA"))
    assert tickets[:3] == effects.granted
    assert [tickets[5]] == list(effects.refused)
    assert isinstance(effects.refused[tickets[5]], QueueFull)
    assert subject.statistics().waiting == 2


def test_one_queue_and_one_bound_hold_the_jobs_of_all_models():
    subject, effects = scheduler(capacity=2)
    for model in "xy":
        subject.node_up(*FakeNode(f"node of {model}", model), limits(1))
    submit(subject, *(job(model=model) for model in "xyxy"))
    (last,) = submit(subject, job(model="x"))
    assert len(effects.granted) == 2
    assert subject.statistics().waiting == 2
    assert isinstance(effects.refused[last], QueueFull)


def test_with_capacity_zero_a_busy_node_refuses_at_once():
    subject, effects = scheduler(capacity=0)
    subject.node_up(*FakeNode(), limits(1))
    first, second = submit(subject, job(), job())
    assert [first] == effects.granted
    assert [second] == list(effects.refused)


def test_departed_waiter_never_holds_a_seat():
    subject, effects = scheduler()
    subject.node_up(*FakeNode(), limits(1))
    first, second, third = submit(subject, job(), job(), job())
    subject.leave(second)
    subject.leave(first)
    assert [first, third] == effects.granted
    subject.leave(third)
    assert (subject.statistics().waiting, subject.statistics().running) == (0, 0)


def test_leaving_twice_frees_one_seat():
    subject, effects = scheduler()
    subject.node_up(*FakeNode(), limits(1))
    first, *_ = submit(subject, job(), job(), job())
    subject.leave(first)
    subject.leave(first)
    assert len(effects.granted) == 2
    assert subject.statistics().running == 1


def test_seat_of_a_node_that_went_down_is_not_given_back_to_its_next_life():
    subject, effects = scheduler()
    node = FakeNode()
    subject.node_up(*node, limits(1))
    first, second, third = submit(subject, job(), job(), job())
    subject.node_down(node.id)
    subject.node_up(*node, limits(1))
    assert [first, second] == effects.granted
    subject.leave(first)
    assert TicketState.QUEUED is third.state
    assert subject.statistics().running == 1


def test_no_job_gets_a_seat_on_a_node_that_is_down():
    subject, effects = scheduler()
    node = FakeNode()
    subject.node_up(*node, limits(1))
    first, second = submit(subject, job(), job())
    subject.node_down(node.id)
    subject.leave(first)
    assert [first] == effects.granted
    assert TicketState.QUEUED is second.state


def test_idle_node_comes_before_a_busy_one():
    subject, effects = scheduler()
    subject.node_up(*FakeNode("big"), limits(8))
    subject.node_up(*FakeNode("small"), limits(1))
    submit(subject, job(), job(), job())
    nodes = Counter(ticket.node.id for ticket in effects.granted if ticket.node)
    assert Counter(big=2, small=1) == nodes


def test_prompt_that_fits_no_node_is_refused_and_one_that_fits_exactly_is_not():
    subject, effects = scheduler()
    subject.node_up(*FakeNode(), limits(2, longest=10))
    fits, too_long = submit(subject, job(prompt=9), job(prompt=10))
    assert [fits] == effects.granted
    assert isinstance(effects.refused[too_long], ContextLengthExceeded)
    assert effects.refused[too_long].param == "prompt"


def test_prompt_that_waited_for_the_model_is_refused_when_it_turns_out_not_to_fit():
    subject, effects = scheduler()
    (too_long,) = submit(subject, job(prompt=10))
    subject.node_up(*FakeNode(), limits(2, longest=10))
    assert isinstance(effects.refused[too_long], ContextLengthExceeded)
    assert subject.statistics().waiting == 0


def test_waiters_fail_when_the_model_cannot_be_loaded():
    subject, effects = scheduler()
    (waiting,) = submit(subject, job())
    error = LoadFailed("no such file")
    subject.load_failed(FakeNode().models, error)
    assert {waiting: error} == effects.refused


def test_waiters_stay_when_another_node_has_the_model():
    subject, effects = scheduler()
    subject.node_up(*FakeNode("one"), limits(1))
    _running, waiting = submit(subject, job(), job())
    subject.load_failed(FakeNode("two").models, LoadFailed("no such file"))
    assert effects.refused == {}
    assert TicketState.QUEUED is waiting.state


def test_draining_refuses_waiting_and_new_jobs_and_finishes_running_ones():
    subject, effects = scheduler()
    subject.node_up(*FakeNode(), limits(1))
    running, waiting = submit(subject, job(), job())
    subject.drain()
    (late,) = submit(subject, job())
    assert [waiting, late] == list(effects.refused)
    assert all(isinstance(error, Draining) for error in effects.refused.values())
    assert subject.statistics().running == 1
    subject.leave(running)
    assert subject.statistics().running == 0


def test_flood_does_not_keep_the_others_out_of_a_full_queue():
    subject, effects = scheduler(capacity=4)
    flood = submit(subject, *map(job, "AAAA"))
    (newcomer,) = submit(subject, job("B"))
    assert [flood[3]] == list(effects.refused)
    assert isinstance(effects.refused[flood[3]], Displaced)
    assert TicketState.QUEUED is newcomer.state
    assert subject.statistics().waiting == 4


def test_no_job_is_displaced_for_a_tenant_with_nearly_as_many():
    subject, effects = scheduler(capacity=3)
    submit(subject, *map(job, "AAB"))
    (newcomer,) = submit(subject, job("B"))
    assert [newcomer] == list(effects.refused)
    assert isinstance(effects.refused[newcomer], QueueFull)


def test_lower_class_is_displaced_first():
    subject, effects = scheduler(capacity=4)
    *_, low, _high = submit(subject, job("A"), job("A"), job("C", priority=2), job("A"))
    submit(subject, job("B"))
    assert [low] == list(effects.refused)


def test_higher_classes_go_first_and_min_share_lets_the_lower_ones_through():
    for min_share, expected in ((0.0, "0000000022"), (0.25, "0000200020")):
        subject, effects = scheduler(min_share=min_share)
        submit(subject, *(job("A", priority=priority) for priority in (2, 2, *8 * (0,))))
        subject.node_up(*FakeNode(), limits(1))
        for _ in range(10):
            subject.leave(effects.granted[-1])
        assert expected == "".join(str(ticket.job.priority) for ticket in effects.granted)


def test_job_that_may_not_wait_is_refused_only_when_it_would_have_to():
    subject, effects = scheduler()
    subject.node_up(*FakeNode(), limits(1))
    seated, refused = submit(subject, job(no_queue=True), job(no_queue=True))
    assert [seated] == effects.granted
    assert isinstance(effects.refused[refused], NoQueue)


def test_deadline_ends_a_wait_and_not_a_job_that_runs():
    subject, effects = scheduler()
    subject.node_up(*FakeNode(), limits(1))
    running, waiting = submit(subject, job(), job())
    for ticket in (running, waiting):
        subject.deadline(ticket, QueueTimeout("late"))
    assert [waiting] == list(effects.refused)
    assert effects.stopped == []


def test_deadline_stops_a_stream_before_its_first_delta_and_not_after():
    subject, effects = scheduler()
    subject.node_up(*FakeNode(), limits(2))
    silent, begun = submit(subject, job(stream=True), job(stream=True))
    subject.first_delta(begun)
    for ticket in (silent, begun):
        subject.deadline(ticket, QueueTimeout("late"))
    assert [silent] == effects.stopped


def test_job_that_a_node_returns_goes_first_and_is_charged_once():
    subject, effects = scheduler(fairness="tokens")
    subject.node_up(*FakeNode(), limits(1))
    first, second = submit(subject, job("A", cost=5.0), job("A", cost=5.0))
    subject.requeued(first)
    assert [first, first] == effects.granted
    assert first.attempts == 2
    assert TicketState.QUEUED is second.state
    assert subject._queue._kernel.counter("A") == 5.0


def test_job_requeued_after_its_deadline_is_refused_and_costs_nothing():
    subject, effects = scheduler(fairness="tokens")
    node = FakeNode()
    subject.node_up(*node, limits(1))
    late, first, _second = submit(subject, job("A", cost=50.0), job("B"), job("B"))
    error = QueueTimeout("late")
    subject.deadline(late, error)
    assert late not in effects.refused
    subject.requeued(late)
    assert error is effects.refused[late]
    assert [late, first] == effects.granted
    (again,) = submit(subject, job("A"))
    assert subject.position(again) == 0


def test_job_that_may_not_wait_does_not_wait_for_a_second_seat_either():
    subject, effects = scheduler()
    subject.node_up(*FakeNode("one"), limits(1))
    subject.node_up(*FakeNode("two"), limits(1))
    (moved,) = submit(subject, job("A", no_queue=True))
    subject.requeued(moved)
    assert [moved, moved] == effects.granted
    submit(subject, job("B"))
    subject.requeued(moved)
    assert isinstance(effects.refused[moved], NoQueue)
    assert subject.statistics().waiting == 0


def test_failed_job_waits_for_a_node_other_than_the_one_that_failed():
    subject, effects = scheduler()
    bad, good = FakeNode("bad"), FakeNode("good")
    subject.node_up(*bad, limits(1))
    (moved,) = submit(subject, job("A"))
    subject.node_up(*good, limits(1))
    (other,) = submit(subject, job("B"))
    subject.requeued(moved)
    assert TicketState.QUEUED is moved.state
    (third,) = submit(subject, job("C"))
    assert third.node.id == "bad"
    subject.finished(other, cost=1.0)
    assert moved.node.id == "good"
    assert [moved, other, third, moved] == effects.granted


def test_job_may_run_on_a_node_that_failed_it_and_restarted():
    subject, _ = scheduler()
    node, other = FakeNode("node"), FakeNode("other")
    subject.node_up(*node, limits(1))
    (moved,) = submit(subject, job("A"))
    subject.node_down(node.id)
    subject.requeued(moved)
    subject.node_up(*other, limits(1))
    assert moved.node.id == "other"
    subject.node_down(other.id)
    subject.requeued(moved)
    subject.node_up(*node, limits(1))
    assert moved.node.id == "node"


def test_node_that_rejected_a_job_is_full_until_one_of_its_jobs_ends_or_time_has_passed():
    subject, _ = scheduler()
    subject.node_up(*FakeNode(), limits(3))
    running, rejected = submit(subject, job("A"), job("B"))
    node = rejected.node
    subject.rejected_by_node(rejected)
    assert TicketState.QUEUED is rejected.state
    subject.finished(running, cost=1.0)
    assert TicketState.GRANTED is rejected.state
    subject.rejected_by_node(rejected)
    assert TicketState.QUEUED is rejected.state
    subject.resume(PausedModel(node.id, "m", None))
    subject.resume(PausedModel(node.id, "m", "B"))
    assert TicketState.GRANTED is rejected.state


def test_job_that_leaves_after_its_node_failed_costs_only_what_it_has_used():
    subject, _ = scheduler(fairness="tokens")
    ledger = subject._queue._kernel = Ledger(subject._queue._kernel)
    node = FakeNode()
    subject.node_up(*node, limits(2))
    begun, silent = submit(subject, job("A", cost=50.0), job("B", cost=50.0))
    subject.first_delta(begun)
    subject.node_down(node.id)
    subject.requeued(begun)
    subject.requeued(silent)
    subject.finished(begun, cost=7.0)
    subject.finished(silent, cost=0.0)
    assert ledger.charged == {"A": 7.0, "B": 0.0}


def test_job_that_has_begun_has_no_deadline_and_a_drain_lets_it_continue():
    subject, effects = scheduler()
    node = FakeNode()
    subject.node_up(*node, limits(1))
    (begun,) = submit(subject, job("A", stream=True))
    subject.first_delta(begun)
    subject.deadline(begun, QueueTimeout("late"))
    subject.node_down(node.id)
    subject.requeued(begun)
    subject.deadline(begun, QueueTimeout("late"))
    subject.drain()
    assert effects.refused == {}
    subject.node_up(*node, limits(1))
    assert [begun, begun] == effects.granted


def test_jobs_ahead_of_the_last_of_thousands_are_in_the_order_in_which_they_leave():
    subject, effects = scheduler(capacity=4000)
    tickets = [job(tenant, model="x") for tenant in "AAABBC" * 500]
    submit(subject, *tickets)
    last = max(tickets, key=subject.position)
    ahead = subject.jobs_ahead(last)
    subject.node_up(*FakeNode("node", "x"), limits(4000))
    assert [ticket.job for ticket in effects.granted] == [*ahead, last.job]


def test_jobs_requeued_above_the_capacity_leave_no_room_and_cause_no_error():
    subject, effects = scheduler(capacity=1)
    node = FakeNode()
    subject.node_up(*node, limits(2))
    first, second, _third = submit(subject, *map(job, "AAA"))
    subject.node_down(node.id)
    subject.requeued(first)
    subject.requeued(second)
    assert len(subject.jobs_ahead_of_newcomer("m", "B", 2)) == 3
    (newcomer,) = submit(subject, job("B"))
    assert [newcomer] == list(effects.refused)
    assert isinstance(effects.refused[newcomer], QueueFull)
    subject.node_up(*FakeNode("other", "n"), limits(1))
    (remote_limits,) = submit(subject, job("B", model="n"))
    assert TicketState.GRANTED is remote_limits.state


def test_long_job_costs_its_tenant_the_turns_it_took():
    subject, effects = scheduler(fairness="tokens")
    subject.node_up(*FakeNode(), limits(1))
    submit(subject, *(job("A", cost=10.0) for _ in range(3)), *(job("B", cost=10.0) for _ in range(3)))
    subject.finished(effects.granted[-1], cost=25.0)
    for _ in range(5):
        subject.finished(effects.granted[-1], cost=10.0)
    assert "".join(ticket.job.tenant for ticket in effects.granted) == "ABBABA"


def test_unused_part_of_a_charge_is_refunded():
    subject, _effects = scheduler(fairness="tokens")
    subject.node_up(*FakeNode(), limits(1))
    (running,) = submit(subject, job("A", cost=10.0))
    subject.first_delta(running)
    subject.charge(running, 4.0)
    assert subject._queue._kernel.counter("A") == 10.0
    subject.finished(running, cost=4.0)
    assert subject._queue._kernel.counter("A") == 4.0


def test_job_waits_until_the_cache_holds_it_and_is_passed_at_most_eight_times():
    subject, effects = scheduler()
    subject.node_up(*FakeNode(), limits(2, cache_tokens=100))
    holder, big = submit(subject, job("A", tokens=60), job("B", tokens=60))
    small = submit(subject, *(job("C", tokens=10) for _ in range(12)))
    for ticket in small[:8]:
        assert TicketState.GRANTED is ticket.state
        subject.leave(ticket)
    assert [big.state, *(ticket.state for ticket in small[8:])] == [TicketState.QUEUED] * 5
    subject.leave(holder)
    assert big in effects.granted


def test_job_larger_than_the_whole_cache_runs_alone():
    subject, effects = scheduler()
    subject.node_up(*FakeNode(), limits(2, cache_tokens=100))
    (huge,) = submit(subject, job(tokens=1000))
    assert [huge] == effects.granted


def test_fewer_seats_end_no_running_job_and_more_seats_are_granted_at_once():
    subject, effects = scheduler()
    node = FakeNode()
    subject.node_up(*node, limits(2))
    first, second, third = submit(subject, job(), job(), job())
    subject.seats_changed(*node, limits(1))
    subject.leave(first)
    assert TicketState.QUEUED is third.state
    subject.seats_changed(*node, limits(2))
    assert [first, second, third] == effects.granted


def test_forecasting_for_a_newcomer_does_not_change_the_queue():
    subject, effects = scheduler()
    submit(subject, *map(job, "AAB"))
    assert [each.tenant for each in subject.jobs_ahead_of_newcomer("m", "A", 1)] == ["A", "B", "A"]
    assert [each.tenant for each in subject.jobs_ahead_of_newcomer("m", "C", 1)] == ["A", "B"]
    subject.node_up(*FakeNode(), limits(1))
    for _ in range(3):
        subject.leave(effects.granted[-1])
    assert "".join(ticket.job.tenant for ticket in effects.granted) == "ABA"
