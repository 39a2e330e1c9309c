"""Several free seats of the only node are granted in one call of the kernel, in the order of single calls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.router.dispatch.node_pool import NodePool
from fairlead.router.dispatch.scheduler import Scheduler
from fairlead.router.dispatch.ticket import LoadRequest
from fairlead.router.swap.policy import KeepEverything
from router.dispatch.recorded import FakeNode, job, limits, scheduler, submit

JOBS = st.tuples(
    st.sampled_from("ABC"),
    st.integers(0, 2),
    st.integers(0, 12),
    st.floats(0, 8),
)


class Counted:
    """Records the calls that pop jobs from a kernel's queue."""

    def __init__(self, line) -> None:
        self._line = line
        self.calls: list[str] = []

    def pop(self, fits, **options):
        self.calls.append("pop")
        return self._line.pop(fits, **options)

    def pop_many(self, max_count, memory_budget):
        self.calls.append(f"pop_many {max_count}")
        return self._line.pop_many(max_count, memory_budget)

    def __getattr__(self, name):
        return getattr(self._line, name)

    def __contains__(self, handle):
        return handle in self._line


def counted(subject: Scheduler) -> list[str]:
    line = subject._queue._kernel = Counted(subject._queue._kernel)
    return line.calls


def test_seats_of_a_node_that_comes_up_are_granted_in_one_call():
    subject, effects = scheduler()
    calls = counted(subject)
    tickets = submit(subject, *[job(tenant) for tenant in "AAAAABB"])
    subject.node_up(*FakeNode(), limits(5))
    assert calls == ["pop_many 5"]
    assert [ticket.job.tenant for ticket in effects.granted] == list("ABABA")
    assert [ticket.charged for ticket in effects.granted] == 5 * [1.0]
    assert subject.position(tickets[4]) == 1


def test_with_a_limited_cache_the_first_job_is_granted_alone_and_the_others_together():
    subject, effects = scheduler()
    calls = counted(subject)
    submit(subject, job(tokens=90), job(tokens=4), job(tokens=7), job(tokens=6))
    subject.node_up(*FakeNode(), limits(5, cache_tokens=100))
    assert calls == ["pop", "pop_many 4", "pop_many 2"]
    assert [ticket.tokens for ticket in effects.granted] == [90, 4, 6]


@pytest.mark.parametrize("other", ["node", "model"])
def test_jobs_are_popped_one_by_one_if_not_all_could_have_every_seat(other):
    subject, effects = scheduler(policy=KeepEverything(), loadable=frozenset("x"))
    calls = counted(subject)
    submit(subject, job(), job())
    if other == "model":
        subject.request_load(LoadRequest("x"))
    else:
        subject.node_up(*FakeNode("other", "n"), limits(1))
    subject.node_up(*FakeNode(), limits(3))
    assert len(effects.granted) == 2
    assert {call.split()[0] for call in calls} == {"pop"}


@pytest.mark.parametrize("fairness", ["roundRobin", "tokens"])
@given(
    jobs=st.lists(JOBS, min_size=4, max_size=25),
    seats=st.lists(st.integers(2, 8), min_size=1, max_size=4),
    cache_tokens=st.none() | st.integers(10, 40),
    min_share=st.sampled_from([0.0, 0.2]),
)
def test_batched_grants_keep_the_order_of_single_grants(fairness, jobs, seats, cache_tokens, min_share):
    def granted() -> list[tuple[int, float]]:
        subject, effects = scheduler(fairness=fairness, min_share=min_share)
        tickets = [
            job(tenant, priority=priority, tokens=tokens, cost=cost)
            for tenant, priority, tokens, cost in jobs
        ]
        submit(subject, *tickets)
        node = FakeNode()
        subject.node_up(*node, limits(0, cache_tokens=cache_tokens))
        for now in seats:
            subject.seats_changed(*node, limits(now, cache_tokens=cache_tokens))
            if effects.granted and len(effects.granted) % 2:
                subject.leave(effects.granted[-1])
        return [(tickets.index(ticket), ticket.charged) for ticket in effects.granted]

    together = granted()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NodePool, "with_several_seats", lambda _: None)
        assert together == granted()
