"""Who is refused at once, and for which reason first."""

from random import Random

import pytest

from dispatch.recorded import FakeNode, elsewhere, job, limits
from fairlead.dispatch.admission import Admission
from fairlead.dispatch.places import Places
from fairlead.dispatch.queue import Queue
from fairlead.dispatch.swaps import Swaps
from fairlead.dispatch.ticket import Wish
from fairlead.errors import ContextLengthExceeded, Draining, ModelLoading, ModelNotFound, NoQueue, QueueFull
from fairlead.job import Relay
from fairlead.swap.policy import KeepEverything

HUGE = Relay("/v1/completions", b"x" * 200)


def admission(*, seats: int, rejects_loading: bool = False) -> Admission:
    """Over one node for "m" and one elsewhere; "x" could be loaded, and 100 bytes may wait."""
    places = Places(Random(0))
    for node, its in ((FakeNode(), limits(2, longest=20)), (FakeNode("far"), elsewhere(2, longest=20))):
        place = places.add(node, its)
        for _ in range(2 - seats):
            place.take(0)
    swaps = Swaps(places, KeepEverything(), frozenset("x"))
    return Admission(Queue(10, waiting_bytes=100), places, swaps, rejects_loading=rejects_loading)


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
def test_of_several_reasons_the_one_is_told_that_waiting_would_help_least(options, refusal):
    subject = admission(seats=0, rejects_loading=True)
    told = subject.refusal(job(**options).job)
    assert refusal is (None if told is None else type(told))


def test_that_the_wait_would_be_too_long_is_told_last():
    subject, too_long = admission(seats=0), QueueFull("too long")
    assert too_long is subject.refusal(job().job, too_long=too_long)
    assert isinstance(subject.refusal(job(no_queue=True).job, too_long=too_long), NoQueue)


def test_who_finds_a_free_seat_is_let_in_whether_it_could_wait_or_not():
    too_long = QueueFull("too long")
    assert admission(seats=1).refusal(job(no_queue=True, relay=HUGE).job, too_long=too_long) is None


def test_a_job_waits_for_a_load_unless_loads_are_not_waited_for():
    assert admission(seats=1).refusal(job(model="x").job) is None
    assert admission(seats=1).must_load(job(model="x").job)
    assert not admission(seats=0).must_load(job(model="m").job)


def test_nobody_is_let_in_when_the_server_stops():
    subject = admission(seats=2)
    subject.drain()
    for refusal in (subject.refusal(job().job), subject.refusal_of_wish(Wish("x"))):
        assert isinstance(refusal, Draining)


def test_a_wish_is_for_what_could_be_loaded():
    subject = admission(seats=0, rejects_loading=True)
    assert subject.refusal_of_wish(Wish("x")) is None
    assert isinstance(subject.refusal_of_wish(Wish("m")), ModelNotFound)
