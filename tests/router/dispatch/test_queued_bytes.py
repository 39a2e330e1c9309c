"""Queued requests for remote nodes are bounded in bytes, and large ones never keep ordinary ones out."""

from hypothesis import given
from hypothesis import strategies as st

from fairlead.base.errors import QueueFull
from fairlead.base.job import Relay
from fairlead.router.dispatch.queued_bytes import QueuedBytes
from fairlead.router.dispatch.ticket import TicketState
from router.dispatch.recorded import FakeNode, job, remote_limits, scheduler, submit


def sized(length: int | None, tenant: str = "A"):
    return job(tenant, relay=None if length is None else Relay("/v1/completions", b"x" * length))


def test_request_beyond_the_byte_bound_is_refused_and_ordinary_ones_wait():
    subject, effects = scheduler(capacity=10, waiting_bytes=1000)  # 50 for each job, and 500 to share
    subject.node_up(*FakeNode("far"), remote_limits(1))
    running, large, larger, small = submit(subject, sized(900), sized(450), sized(151), sized(50, "B"))
    assert [running] == effects.granted
    assert [larger] == list(effects.refused)
    assert isinstance(effects.refused[larger], QueueFull)
    assert {TicketState.QUEUED} == {large.state, small.state}
    subject.leave(large)
    (later,) = submit(subject, sized(550))
    assert TicketState.QUEUED is later.state
    for ticket in (running, small, later):
        subject.leave(ticket)
    (again,) = submit(subject, sized(10**6))
    assert again is effects.granted[-1], "a request with a free seat may be of any size"


@given(
    most=st.integers(0, 300),
    jobs=st.integers(1, 6),
    requests=st.lists(st.tuples(st.integers(0, 200), st.booleans()), max_size=20),
)
def test_queued_bodies_never_exceed_their_byte_bound(most, jobs, requests):
    bodies, waiting = QueuedBytes(most, jobs), []
    for length, leaves in requests:
        if leaves and waiting:
            bodies.remove(waiting.pop(0))
        if len(waiting) < jobs and bodies.has_room(length):
            bodies.add(length)
            waiting.append(length)
        assert sum(waiting) <= most
        assert bodies.has_room(None), "a job without a body"
