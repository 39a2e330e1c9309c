"""A node with no seats, whose server fails: for new jobs as if it were down, but its running jobs count."""

import pytest

from fairlead.base.errors import ModelLoading, QueueFull
from fairlead.base.job import Relay
from fairlead.router.dispatch.awaited_seats import AwaitedSeats
from fairlead.router.swap.policy import KeepEverything
from router.dispatch.recorded import FakeNode, job, limits, remote_limits, scheduler, submit

RELAY = Relay("/v1/completions", b"x")
FAR, NEAR = FakeNode("far"), FakeNode("near")


def relayed(tenant="A"):
    return job(tenant, relay=RELAY)


def close(subject, node=FAR):
    subject.seats_changed(*node, remote_limits(0))


def test_closed_node_keeps_its_jobs_and_has_their_seats_when_it_opens():
    subject, effects = scheduler()
    subject.node_up(*FAR, remote_limits(2))
    first, second, third = submit(subject, relayed(), relayed(), relayed())
    close(subject)
    assert (subject.statistics().running, subject.statistics().seats) == (2, 0)
    subject.leave(first)
    assert effects.granted == [first, second]
    subject.seats_changed(*FAR, remote_limits(2))
    assert effects.granted == [first, second, third]
    (fourth,) = submit(subject, relayed())
    assert fourth not in effects.granted, "the second job has run all the time"


def test_failed_job_does_not_wait_for_a_closed_node_to_avoid_its_own():
    subject, effects = scheduler()
    for node in (FAR, NEAR):
        subject.node_up(*node, remote_limits(1))
    (failed,) = submit(subject, relayed())
    close(subject, FAR if failed.node.id == "near" else NEAR)
    subject.requeued(failed)
    assert effects.granted == [failed, failed]


@pytest.mark.parametrize("rejects_loading", [False, True])
def test_model_of_a_closed_node_is_loaded_here(rejects_loading):
    options = {"policy": KeepEverything(), "loadable": frozenset("m"), "rejects_loading": rejects_loading}
    subject, effects = scheduler(**options)
    subject.node_up(*FAR, remote_limits(1))
    running, waiting = submit(subject, relayed(), relayed())
    assert (effects.granted, effects.swaps) == ([running], [])
    close(subject)
    (refused,) = submit(subject, relayed())
    assert effects.swaps == [("m", frozenset())]
    assert [type(error) for error in effects.refused.values()] == [ModelLoading] * rejects_loading
    assert waiting not in effects.refused
    assert (refused in effects.refused) is rejects_loading


def test_closed_node_that_is_removed_is_gone_when_its_jobs_have_ended():
    subject, effects = scheduler()
    subject.node_up(*FAR, remote_limits(1))
    (running,) = submit(subject, relayed())
    close(subject)
    subject.close_node("far")
    assert effects.closed_nodes == []
    subject.leave(running)
    assert effects.closed_nodes == ["far"]


def test_full_queue_says_that_no_node_is_ready():
    subject, effects = scheduler(capacity=0)
    subject.node_up(*FAR, remote_limits(1))
    close(subject)
    submit(subject, relayed())
    (error,) = effects.refused.values()
    assert isinstance(error, QueueFull)
    assert "no node is ready" in error.message


def test_seats_of_closed_nodes_are_not_waited_for():
    subject, _ = scheduler()
    subject.node_up(*FAR, remote_limits(2))
    subject.node_up(*FakeNode("other", "x"), limits(3))
    submit(subject, relayed(), job(model="x"))
    close(subject)
    awaited = AwaitedSeats("m", subject.nodes())
    assert (awaited.seats, awaited.include("other")) == (1, True)  # as if no node had the model
