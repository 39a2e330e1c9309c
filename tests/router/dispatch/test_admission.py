"""Which jobs are refused at once, and which of several reasons is reported."""

from random import Random

import pytest

from fairlead.base.errors import (
    ContextLengthExceeded,
    Draining,
    ModelLoading,
    ModelNotFound,
    NoQueue,
    QueueFull,
)
from fairlead.base.job import Relay
from fairlead.router.dispatch.admission import JobAdmission
from fairlead.router.dispatch.node_pool import NodePool
from fairlead.router.dispatch.queue import Queue
from fairlead.router.dispatch.swaps import Swaps
from fairlead.router.dispatch.ticket import LoadRequest
from fairlead.router.swap.policy import KeepEverything
from router.dispatch.recorded import FakeNode, RecordedEffects, job, limits, remote_limits

HUGE = Relay("/v1/completions", b"x" * 200)


def admission(*, seats: int, rejects_loading: bool = False) -> JobAdmission:
    """Use a local and a remote node for "m"; "x" could be loaded, and 100 bytes may be queued."""
    nodes = NodePool(Random(0))
    for node, its in ((FakeNode(), limits(2, longest=20)), (FakeNode("far"), remote_limits(2, longest=20))):
        state = nodes.add(*node, its)
        for _ in range(2 - seats):
            state.acquire(0)
    swaps = Swaps(RecordedEffects(), nodes, KeepEverything(), frozenset("x"))
    return JobAdmission(Queue(10, waiting_bytes=100), nodes, swaps, rejects_loading=rejects_loading)


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({}, None),
        ({"prompt": 20, "no_queue": True, "relay": HUGE}, ContextLengthExceeded),
        ({"no_queue": True, "relay": HUGE}, NoQueue),
        ({"relay": HUGE}, QueueFull),
        ({"model": "x", "no_queue": True, "relay": HUGE}, ModelLoading),
        ({"model": "unknown"}, None),
    ],
)
def test_of_several_reasons_the_one_that_waiting_helps_least_is_reported(options, refusal):
    subject = admission(seats=0, rejects_loading=True)
    reported = subject.refusal(job(**options).job)
    assert refusal is (None if reported is None else type(reported))


def test_too_long_wait_is_reported_only_if_there_is_no_other_reason():
    subject, too_long = admission(seats=0), QueueFull("too long")
    assert too_long is subject.refusal(job().job, too_long=too_long)
    assert isinstance(subject.refusal(job(no_queue=True).job, too_long=too_long), NoQueue)


def test_job_with_a_free_seat_is_admitted_even_if_it_may_not_wait():
    too_long = QueueFull("too long")
    assert admission(seats=1).refusal(job(no_queue=True, relay=HUGE).job, too_long=too_long) is None


def test_job_may_wait_for_a_load_if_loading_is_not_rejected():
    assert admission(seats=1).refusal(job(model="x").job) is None
    assert admission(seats=1).must_load(job(model="x").job)
    assert not admission(seats=0).must_load(job(model="m").job)


def test_draining_refuses_jobs_and_load_requests():
    subject = admission(seats=2)
    subject.drain()
    for refusal in (subject.refusal(job().job), subject.load_refusal(LoadRequest("x"))):
        assert isinstance(refusal, Draining)


def test_load_request_needs_a_loadable_model():
    subject = admission(seats=0, rejects_loading=True)
    assert subject.load_refusal(LoadRequest("x")) is None
    assert isinstance(subject.load_refusal(LoadRequest("m")), ModelNotFound)
