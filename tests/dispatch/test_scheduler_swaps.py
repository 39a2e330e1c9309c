"""When the scheduler loads a model, and what it makes room with (spec 4, seed 004)."""

from collections.abc import Sequence

from dispatch.recorded import FakeNode, RecordedEffects, job, limits, scheduler, submit
from fairlead.dispatch.scheduler import Scheduler
from fairlead.dispatch.ticket import TicketState
from fairlead.errors import LoadFailed


class OneAtATime:
    """A policy of two lines: whatever runs makes room."""

    def eviction_for(self, target: str, running: Sequence[str]) -> frozenset[str]:
        return frozenset(running)


def swapping() -> tuple[Scheduler, RecordedEffects]:
    return scheduler(policy=OneAtATime(), loadable=frozenset("xyz"))


def up(subject: Scheduler, model: str, *, seats: int = 1) -> FakeNode:
    node = FakeNode(f"node of {model}", model)
    subject.node_up(node, limits(seats))
    return node


def test_a_model_is_loaded_when_a_job_wants_it_and_others_join_that_swap():
    subject, effects = swapping()
    first, second = submit(subject, job(model="x"), job(model="x"))
    assert [("x", frozenset())] == effects.swaps
    up(subject, "x", seats=2)
    assert [first, second] == effects.granted


def test_an_idle_model_makes_room():
    subject, effects = swapping()
    up(subject, "x")
    submit(subject, job(model="y"))
    assert [("y", frozenset("x"))] == effects.swaps
    assert 0 == subject.statistics().seats


def test_a_model_with_work_in_flight_is_never_evicted():
    subject, effects = swapping()
    up(subject, "x")
    running, _waiting = submit(subject, job(model="x"), job(model="y"))
    assert [] == effects.swaps
    subject.leave(running)
    assert [("y", frozenset("x"))] == effects.swaps


def test_the_jobs_of_the_loaded_model_go_first_so_that_swaps_are_few():
    subject, effects = swapping()
    up(subject, "x")
    submit(subject, job(model="x"), job("B", model="y"), job("C", model="x"), job("D", model="x"))
    subject.leave(effects.granted[-1])
    subject.leave(effects.granted[-1])
    assert ["x", "x", "x"] == [ticket.job.model for ticket in effects.granted]
    assert [] == effects.swaps
    subject.leave(effects.granted[-1])
    assert [("y", frozenset("x"))] == effects.swaps


def test_who_starves_gets_its_model_before_those_who_came_later():
    subject, effects = swapping()
    up(subject, "x")
    _running, starving, later = submit(subject, job(model="x"), job("B", model="y"), job("C", model="x"))
    subject.starved(starving)
    subject.leave(effects.granted[-1])
    assert [("y", frozenset("x"))] == effects.swaps
    assert TicketState.QUEUED is later.state
    up(subject, "y")
    subject.leave(starving)
    assert [("y", frozenset("x")), ("x", frozenset("y"))] == effects.swaps


def test_a_starving_job_that_leaves_starves_nobody_else():
    subject, effects = swapping()
    up(subject, "x")
    running, starving, later = submit(subject, job(model="x"), job("B", model="y"), job("C", model="x"))
    subject.starved(starving)
    subject.leave(starving)
    subject.leave(running)
    assert [running, later] == effects.granted
    assert [] == effects.swaps


def test_when_who_starves_leaves_the_model_that_was_to_make_room_has_its_seats_again_at_once():
    subject, effects = swapping()
    up(subject, "x", seats=2)
    running, starving = submit(subject, job(model="x"), job("B", model="y"))
    subject.starved(starving)
    (waiting,) = submit(subject, job("C", model="x"))
    assert [running] == effects.granted
    subject.leave(starving)
    assert [running, waiting] == effects.granted
    assert [] == effects.swaps


def test_a_model_that_is_being_loaded_is_not_evicted_again():
    subject, effects = swapping()
    submit(subject, job(model="x"), job("B", model="y"))
    assert [("x", frozenset())] == effects.swaps


def test_a_failed_load_tells_those_who_wait_and_the_next_job_tries_again():
    subject, effects = swapping()
    (waiting,) = submit(subject, job(model="x"))
    error = LoadFailed("no such file")
    subject.load_failed(FakeNode("node of x", "x"), error)
    assert {waiting: error} == effects.refused
    submit(subject, job(model="x"))
    assert [("x", frozenset()), ("x", frozenset())] == effects.swaps


def test_no_swap_is_started_for_who_has_left():
    subject, effects = swapping()
    up(subject, "x")
    running, waiting = submit(subject, job(model="x"), job(model="y"))
    subject.leave(waiting)
    subject.leave(running)
    assert [] == effects.swaps


def test_a_new_policy_is_a_few_lines_and_touches_nothing_else():
    class KeepX:
        def eviction_for(self, target: str, running: Sequence[str]) -> frozenset[str]:
            return frozenset(running) - {"x"}

    subject, effects = scheduler(policy=KeepX(), loadable=frozenset("xyz"))
    up(subject, "x")
    up(subject, "y")
    submit(subject, job(model="z"))
    assert [("z", frozenset("y"))] == effects.swaps
    assert 1 == subject.statistics().seats


def test_the_policy_is_told_who_was_used_longest_ago_and_who_works():
    asked = []

    class Watching:
        def eviction_for(self, target: str, running: Sequence[str]) -> frozenset[str]:
            asked.append((target, list(running)))
            return frozenset()

    subject, _ = scheduler(policy=Watching(), loadable=frozenset("wxyz"))
    for model in "xyz":
        up(subject, model)
    for model in "zxy":
        ticket, *_ = submit(subject, job(model=model))
        if model != "x":
            subject.leave(ticket)
    submit(subject, job(model="w"))
    assert [("w", ["z", "y", "x"])] == asked
