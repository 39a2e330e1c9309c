"""The seats that a job waits for, and the jobs that wait for the same seats."""

import pytest

from fairlead.router.dispatch.awaited_seats import AwaitedSeats
from fairlead.router.dispatch.node_state import NodeState
from router.dispatch.recorded import FakeNode, limits


def node(id: str, *models: str, seats: int, busy: int) -> NodeState:  # noqa: A002
    made = NodeState(*FakeNode(id, *models), limits(seats))
    for _ in range(busy):
        made.acquire(0)
    return made


def test_seats_of_nodes_without_the_model_do_not_count():
    own, shared, other = (
        node("own", "m", seats=3, busy=3),
        node("shared", "m", "k", seats=2, busy=2),
        node("other", "x", seats=4, busy=4),
    )
    awaited = AwaitedSeats("m", [own, shared, other])
    assert awaited.seats == 5
    assert [awaited.include(each.id) for each in (own, shared, other)] == [True, True, False]


def test_jobs_that_wait_only_for_other_nodes_do_not_compete():
    awaited = AwaitedSeats("m", [node("1", "m", "k", seats=1, busy=1), node("2", "k", "x", seats=1, busy=1)])
    are_awaited = {model: awaited.are_awaited_by(model) for model in ("m", "k", "x", "to be loaded")}
    assert are_awaited == {"m": True, "k": True, "x": False, "to be loaded": True}
    assert not awaited.are_awaited_by_all


def test_model_that_no_node_has_waits_for_all_seats():
    nodes = [node("1", "k", seats=1, busy=1), node("2", "x", seats=2, busy=2)]
    awaited = AwaitedSeats("m", nodes)
    assert (awaited.seats, awaited.are_awaited_by_all) == (3, True)
    assert all(map(awaited.include, ["1", "2", "gone"]))


@pytest.mark.parametrize("state", ["draining", "leaving", None])
def test_free_seats_that_a_waiting_job_cannot_have_do_not_count(state):
    subject = node("1", "m", seats=4, busy=1)
    if state is not None:
        setattr(subject, state, True)
    assert AwaitedSeats("m", [subject]).seats == 1


def test_seats_that_a_node_has_lost_do_not_count():
    assert AwaitedSeats("m", [node("1", "m", seats=1, busy=3)]).seats == 1
