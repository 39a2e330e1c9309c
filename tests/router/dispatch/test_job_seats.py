"""A job takes a seat for each of its sequences, and waits for them without waiting for ever."""

from itertools import count

import pytest
import trio

from fairlead.base.config import QueueConfig
from fairlead.base.errors import NoQueue, QueueFull
from fairlead.base.grant import Grant
from fairlead.base.job import Job, Sampling
from fairlead.generation.gateway import spec_of
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.dispatch.held_sequences import HeldSequences
from fairlead.router.dispatch.job_spec import JobSpec
from fairlead.router.dispatch.scheduler import Scheduler
from fairlead.router.dispatch.ticket import Ticket, TicketState
from router.dispatch.recorded import FakeNode, RecordedEffects, job, limits, scheduler, submit
from router.dispatch.test_wait_estimator import SERVICE_S, begin, estimator, long_job, run_one_job, submit_job


def with_node(seats: int, **options: int) -> tuple[Scheduler, RecordedEffects]:
    subject, effects = scheduler(**options)
    subject.node_up(*FakeNode(), limits(seats))
    return subject, effects


def busy(subject: Scheduler, node_id: str = "node") -> int:
    counts = subject.node_counts(node_id)
    assert counts is not None
    return counts.busy


@pytest.mark.parametrize(("sequences", "seats", "taken"), [(1, 8, 1), (3, 8, 3), (64, 8, 8), (3, 1, 1)])
def test_job_takes_a_seat_for_each_sequence_or_all_seats(sequences, seats, taken):
    subject, effects = with_node(seats)
    (wide,) = submit(subject, job(n=sequences))
    assert effects.granted == [wide]
    assert busy(subject) == taken
    assert subject.statistics().running == 1
    subject.finished(wide, cost=1.0)
    assert busy(subject) == 0
    assert subject.statistics().running == 0


@pytest.mark.parametrize(
    ("prompts", "options", "seats"),
    [(4, {}, 4), (4, {"n": 2}, 8), (100, {"embed": True}, 1), (0, {"n": 5}, 5)],
)
def test_lists_of_prompts_take_seats_likewise_and_texts_to_embed_take_one(prompts, options, seats):
    texts = Job("id", "A", "m", prompts=((1, 2),) * prompts, sampling=Sampling(max_tokens=1), **options)
    assert spec_of(texts).seats == seats


def test_number_of_seats_is_bounded():
    assert JobSpec(request_id="r", tenant="A", model="m", sequences=2**20).seats == 1024


def test_with_one_seat_tenants_take_turns_whatever_the_number_of_sequences():
    subject, effects = with_node(1)
    holder = job("H")
    submit(subject, holder, *[job("A", n=3) for _ in range(5)], job("B"), job("B", n=64))
    for _ in range(8):
        subject.finished(effects.granted[-1], cost=1.0)
    assert [ticket.job.tenant for ticket in effects.granted] == list("HABABAAA")


def test_number_of_seats_is_decided_when_they_are_granted():
    subject, effects = with_node(8)
    small, wide = submit(subject, job(), job(n=8))
    assert effects.granted == [small]
    subject.seats_changed(*FakeNode(), limits(2))
    assert wide.state is TicketState.QUEUED
    subject.finished(small, cost=1.0)
    assert effects.granted == [small, wide]
    assert busy(subject) == 2
    subject.seats_changed(*FakeNode(), limits(8))  # and it gives back what it took
    subject.finished(wide, cost=1.0)
    assert busy(subject) == 0


# At most eight overtake ----------------------------------------------------------------------------


def overtake(subject: Scheduler, effects: RecordedEffects, waiting: Ticket, most: int = 50) -> int:
    """Let other tenants' small jobs come and go; return how many got a seat before the waiting job."""
    names = (f"tenant {number}" for number in count())
    before = len(effects.granted)
    for _ in range(most):
        if waiting.state is TicketState.GRANTED:
            break
        submit(subject, job(next(names)), job(next(names)))
        running = [ticket for ticket in effects.granted if ticket.state is TicketState.GRANTED]
        subject.finished(running[0], cost=1.0)
    return len(effects.granted) - before - (waiting.state is TicketState.GRANTED)


@pytest.mark.parametrize("fairness", ["roundRobin", "tokens"])
@pytest.mark.parametrize("sequences", [2, 5, 8, 64])
def test_at_most_eight_jobs_overtake_one_that_needs_more_seats(sequences, fairness):
    subject, effects = with_node(8, fairness=fairness, capacity=1000)
    submit(subject, *[job("S") for _ in range(8)])
    (wide,) = submit(subject, job("W", n=sequences))
    assert overtake(subject, effects, wide) <= 8
    assert wide.state is TicketState.GRANTED
    assert wide.seats == min(sequences, 8)


def test_seats_are_kept_on_one_node_only():
    subject, effects = scheduler(capacity=1000)
    for name in ("one", "two", "three"):
        subject.node_up(*FakeNode(name), limits(4))
    submit(subject, *[job("S") for _ in range(12)])
    (wide,) = submit(subject, job("W", n=4))
    kept = set()
    while wide.state is TicketState.QUEUED:
        submit(subject, job("S"), job("S"))
        running = [ticket for ticket in effects.granted if ticket.state is TicketState.GRANTED]
        subject.finished(running[0], cost=1.0)
        held = [node.id for node in subject.nodes() if node.is_held]
        kept.add(len(held))
        assert len(effects.granted) < 100
    assert kept == {0, 1}
    assert [node.is_held for node in subject.nodes()] == [False] * 3


def test_seats_are_kept_where_the_fewest_are_missing():
    subject, _ = scheduler(capacity=1000)
    for name in ("a", "b", "c"):
        subject.node_up(*FakeNode(name), limits(4))
    smalls = submit(subject, *[job("S") for _ in range(12)])
    (wide,) = submit(subject, job("W", n=4))
    wide.overtaken = 8
    for node, gone in (("a", 1), ("b", 3), ("c", 2)):
        for ticket in [ticket for ticket in smalls if ticket.node and ticket.node.id == node][:gone]:
            subject.finished(ticket, cost=1.0)
    assert [node.is_held for node in subject.nodes()] == [False, True, False]


def test_seats_are_kept_only_where_the_job_can_run():
    subject, _ = scheduler(capacity=1000)
    subject.node_up(*FakeNode("another", "n"), limits(1))
    subject.node_up(*FakeNode("node"), limits(2))
    submit(subject, job("S"))
    (wide,) = submit(subject, job("W", n=2))
    wide.overtaken = 8
    (other,) = submit(subject, job("S", model="n"))
    assert other.state is TicketState.GRANTED
    assert [node.is_held for node in subject.nodes()] == [False, True]


def test_jobs_on_nodes_that_cannot_run_it_do_not_overtake():
    subject, _ = scheduler(capacity=1000)
    subject.node_up(*FakeNode("another", "n"), limits(1))
    subject.node_up(*FakeNode("node"), limits(2))
    submit(subject, job("S"))
    (wide,) = submit(subject, job("W", n=2))
    submit(subject, job("S", model="n"))
    assert wide.overtaken == 0
    submit(subject, job("S"))
    assert wide.overtaken == 1


def test_seats_that_are_kept_are_free_again_when_the_job_leaves():
    subject, _ = with_node(4, capacity=1000)
    first = submit(subject, *[job("S") for _ in range(4)])
    (wide,) = submit(subject, job("W", n=4))
    smalls = submit(subject, *[job("S") for _ in range(10)])
    for ticket in [*first, *smalls[:6]]:
        subject.finished(ticket, cost=1.0)
    assert [ticket.state for ticket in smalls[8:]] == [TicketState.QUEUED] * 2
    assert not subject.has_free_seat("m")
    subject.leave(wide)
    assert [ticket.state for ticket in smalls[8:]] == [TicketState.GRANTED] * 2


def test_job_of_a_higher_class_takes_seats_that_are_kept_for_a_lower_one():
    subject, _ = with_node(4, capacity=1000)
    first = submit(subject, *[job("S") for _ in range(4)])
    (wide,) = submit(subject, job("W", n=4))
    smalls = submit(subject, *[job("S") for _ in range(10)])
    for ticket in [*first, *smalls[:6]]:
        subject.finished(ticket, cost=1.0)
    (urgent,) = submit(subject, job("U", priority=0))
    assert urgent.state is TicketState.GRANTED
    assert wide.state is TicketState.QUEUED


def test_jobs_of_other_models_do_not_wait_for_one_that_needs_more_seats():
    subject, _ = with_node(2, capacity=1000)
    subject.node_up(*FakeNode("other", "n"), limits(1))
    submit(subject, job("S"))
    (wide,) = submit(subject, job("W", n=2))
    others = [submit(subject, job("S", model="n"))[0] for _ in range(30)]
    for other in others:
        assert other.state is TicketState.GRANTED
        subject.finished(other, cost=1.0)
    assert wide.overtaken == 0


def test_each_grant_looks_at_one_of_many_jobs_that_need_more_seats():
    subject, _ = with_node(8, capacity=10_000)
    submit(subject, job("S"), *[job("W", n=8) for _ in range(1000)])
    tried: list[Ticket] = []
    fits = subject._nodes.fits
    subject._nodes.fits = lambda ticket: tried.append(ticket) or fits(ticket)
    submit(subject, job("X"))
    assert len(tried) < 5


def test_many_numbers_of_sequences_are_told_apart():
    subject, _ = with_node(64, capacity=1000)
    submit(subject, *[job("S") for _ in range(50)])
    waiting = submit(subject, *[job("W", n=number) for number in range(64, 14, -1)])
    assert all(ticket.state is TicketState.QUEUED for ticket in waiting)
    (fitting,) = submit(subject, job("W", n=14))
    assert fitting.state is TicketState.GRANTED
    assert busy(subject) == 64


# Refusals, failures --------------------------------------------------------------------------------


def test_job_that_must_not_wait_is_refused_without_all_its_seats():
    subject, effects = with_node(4)
    submit(subject, job())
    wide, small = submit(subject, job(n=4, no_queue=True), job(no_queue=True))
    assert isinstance(effects.refused[wide], NoQueue)
    assert small.state is TicketState.GRANTED


def test_full_queue_refuses_a_job_without_all_its_seats():
    subject, effects = with_node(4, capacity=0)
    submit(subject, job())
    wide, small = submit(subject, job(n=4), job())
    assert isinstance(effects.refused[wide], QueueFull)
    assert small.state is TicketState.GRANTED


@pytest.mark.parametrize("event", ["requeued", "rejected_by_node", "leave"])
def test_job_gives_back_all_its_seats_however_it_loses_them(event):
    subject, _ = with_node(4)
    (wide,) = submit(subject, job(n=3))
    subject.node_up(*FakeNode("other"), limits(2))
    getattr(subject, event)(wide)
    assert busy(subject) == 0
    assert busy(subject, "other") == (0 if event == "leave" else 2)
    subject.leave(wide)
    assert busy(subject, "other") == 0


def test_seats_of_a_node_that_failed_are_not_given_back_to_the_next_one():
    subject, _ = with_node(4)
    (wide,) = submit(subject, job(n=3))
    subject.node_down("node")
    subject.node_up(*FakeNode(), limits(4))
    assert busy(subject) == 0
    subject.finished(wide, cost=1.0)
    assert busy(subject) == 0


def test_restored_job_holds_as_many_seats_as_before():
    subject, _ = scheduler()
    restored = job(n=8)
    subject.restore(restored, "node", HeldSequences(5))
    subject.node_up(*FakeNode(), limits(6))
    assert busy(subject) == 5
    subject.finished(restored, cost=1.0)
    assert busy(subject) == 0


async def test_grant_names_the_number_of_seats():
    dispatcher = Dispatcher(QueueConfig(), epoch=7)
    dispatcher.scheduler.node_up(*FakeNode(), limits(4))
    async with dispatcher.seat(job(n=3).job) as seat:
        assert seat._waiter.grant == Grant(7, 1, seats=3)


# Costs and estimates -------------------------------------------------------------------------------


def test_each_sequence_is_charged_under_token_fairness():
    subject, _ = estimator()
    one, many = (subject.new_ticket(job(prompt=10, max_tokens=100, n=n).job) for n in (1, 64))
    assert (one.cost, many.cost) == (10 + 2 * 100, 10 + 64 * 2 * 100)


@pytest.fixture(params=["mean", "quantile"])
def estimate(request: pytest.FixtureRequest) -> str:
    return request.param


async def test_job_that_needs_all_seats_waits_for_the_last_running_job(autojump_clock, estimate):
    subject, to = estimator(2, estimate=estimate)
    await run_one_job(subject, to)
    begin(to, submit_job(subject, to, long_job()))
    await trio.sleep(6.0)
    begin(to, submit_job(subject, to, long_job()))
    assert subject.for_newcomer("m", "A", 1).estimated_wait_s == 4
    assert subject.for_newcomer("m", "A", 1, seats=2).estimated_wait_s == 10


async def test_seats_of_a_job_ahead_count_in_the_estimate(autojump_clock, estimate):
    subject, to = estimator(2, estimate=estimate)
    await run_one_job(subject, to)
    for _ in range(2):
        begin(to, submit_job(subject, to, long_job()))
    await trio.sleep(5.0)
    submit_job(subject, to, long_job())
    behind_one = subject.for_newcomer("m", "B", 1).estimated_wait_s
    submit_job(subject, to, long_job(n=2, tenant="C"))
    behind_both = subject.for_newcomer("m", "B", 2).estimated_wait_s
    assert behind_one in (5, 6)
    assert behind_both >= 15


async def test_more_sequences_than_seats_run_one_after_another(autojump_clock):
    subject, to = estimator(2, estimate="quantile")
    await run_one_job(subject, to)
    begin(to, submit_job(subject, to, long_job(n=6)))
    assert subject.for_newcomer("m", "A", 1).estimated_wait_s == 3 * SERVICE_S


async def test_free_seats_are_no_wait_for_a_job_that_fits_them_only():
    subject, to = estimator(4)
    submit_job(subject, to, long_job(n=2))
    assert subject.for_newcomer("m", "A", 1, seats=2).estimated_wait_s == 0
    assert subject.for_newcomer("m", "A", 1, seats=3).estimated_wait_s > 0
