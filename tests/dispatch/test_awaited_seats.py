"""The seats that a job waits for, and the jobs that wait for the same seats."""

import pytest

from dispatch.recorded import FakeNode, job, limits
from fairlead.dispatch.awaited_seats import AwaitedSeats
from fairlead.dispatch.node_state import NodeState


def place(*models: str, seats: int, busy: int) -> NodeState:
    made = NodeState(FakeNode("node", *models), limits(seats))
    for _ in range(busy):
        made.take(0)
    return made


def test_seats_of_places_without_the_model_do_not_count():
    own, shared, other = (
        place("m", seats=3, busy=3),
        place("m", "k", seats=2, busy=2),
        place("x", seats=4, busy=4),
    )
    awaited = AwaitedSeats("m", [own, shared, other])
    assert awaited.seats == 5
    assert [awaited.include(each) for each in (own, shared, other)] == [True, True, False]


def test_jobs_that_wait_only_for_other_places_do_not_compete():
    awaited = AwaitedSeats("m", [place("m", "k", seats=1, busy=1), place("k", "x", seats=1, busy=1)])
    asked = {model: awaited.are_awaited_by(job(model=model).job) for model in ("m", "k", "x", "to be loaded")}
    assert asked == {"m": True, "k": True, "x": False, "to be loaded": True}
    assert not awaited.are_awaited_by_all


def test_a_model_that_no_place_has_waits_for_all_seats():
    places = [place("k", seats=1, busy=1), place("x", seats=2, busy=2)]
    awaited = AwaitedSeats("m", places)
    assert (awaited.seats, awaited.are_awaited_by_all) == (3, True)
    assert all(map(awaited.include, [*places, place("gone", seats=1, busy=1)]))


@pytest.mark.parametrize("state", ["draining", "leaving", "is_full", None])
def test_free_seats_that_a_waiting_job_cannot_have_do_not_count(state):
    subject = place("m", seats=4, busy=1)
    if state is not None:
        setattr(subject, state, True)
    assert AwaitedSeats("m", [subject]).seats == 1


def test_seats_that_a_place_has_lost_do_not_count():
    assert AwaitedSeats("m", [place("m", seats=1, busy=3)]).seats == 1
