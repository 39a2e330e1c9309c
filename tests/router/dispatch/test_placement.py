"""Which node gets a job: the pool, which looks at few nodes, decides as a plain comparison of all does."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fairlead.router.dispatch import node_pool as module
from fairlead.router.dispatch.job_spec import JobSpec
from fairlead.router.dispatch.node_pool import CACHE_BONUS, NodePool
from fairlead.router.dispatch.node_state import NodeState
from fairlead.router.dispatch.prefixes import LENGTHS
from fairlead.router.dispatch.ticket import Ticket
from router.dispatch.recorded import limits, remote_limits

PREFIXES = st.sampled_from([(), (1,), (1, 2), (1, 2, 3), (1, 2, 4), (5,)])
JOBS = st.builds(
    JobSpec,
    request_id=st.just("r"),
    tenant=st.sampled_from("AB"),
    model=st.sampled_from("mn"),
    prefixes=PREFIXES,
    body_bytes=st.sampled_from([None, 10]),
    needs_own_node=st.booleans(),
)
LIMITS = st.builds(
    lambda local, seats, load, cache: replace(
        limits(seats, cache_tokens=cache) if local else remote_limits(seats), load=load
    ),
    st.booleans(),
    st.integers(0, 3),
    st.sampled_from([None, 0.0, 0.5, 1.0]),
    st.sampled_from([None, 10]),
)
NODES = st.sampled_from("abcdef")
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), NODES, st.sampled_from(["m", "mn", "n"]), LIMITS),
        st.tuples(st.just("add"), NODES, st.sampled_from(["m", "mn", "n"]), LIMITS),
        st.tuples(st.just("change"), NODES, st.sampled_from(["m", "mn", "n"]), LIMITS),
        st.tuples(st.just("remove"), NODES),
        st.tuples(st.just("release"), st.integers(0, 99)),
        st.tuples(st.sampled_from(["draining", "has_failed"]), NODES, st.booleans()),
        st.tuples(st.just("leave"), NODES),
        *[st.tuples(st.just("assign"), JOBS, st.sampled_from([0, 4]), st.booleans())] * 4,
    ),
    max_size=40,
)


class Plain:
    """All nodes, each looked at for each job. `prompts`: the prefixes that each has had."""

    def __init__(self) -> None:
        self.prompts: dict[NodeState, set[int]] = {}

    def accepting(self, pool: NodePool, ticket: Ticket) -> list[NodeState]:
        accepting = [node for node in pool.values() if node.accepts(ticket.job)]
        return [node for node in accepting if node is not ticket.failed_at] or accepting

    def fits(self, pool: NodePool, ticket: Ticket) -> bool | None:
        free = [node.has_cache_for(ticket.tokens) for node in self.accepting(pool, ticket) if node.free > 0]
        return any(free) if free else None

    def best(self, pool: NodePool, ticket: Ticket) -> list[NodeState]:
        accepting = self.accepting(pool, ticket)
        free = [node for node in accepting if node.free > 0 and node.has_cache_for(ticket.tokens)]
        scores = {node: self.score(node, ticket.job) for node in free}
        return [node for node, score in scores.items() if score == min(scores.values())]

    def score(self, node: NodeState, job: JobSpec) -> tuple[bool, bool, float]:
        has_failed, is_busy, score = node.score
        return has_failed, is_busy, score - CACHE_BONUS * self.share(node, job)

    def share(self, node: NodeState, job: JobSpec) -> float:
        for index in reversed(range(len(job.prefixes))):
            if job.prefixes[index] in self.prompts.get(node, ()):
                return LENGTHS[index] / LENGTHS[len(job.prefixes) - 1]
        return 0.0

    def remember(self, node: NodeState, job: JobSpec) -> None:
        self.prompts.setdefault(node, set()).update(job.prefixes)


@given(events=EVENTS, compared=st.sampled_from([0, 1, 16]), seed=st.integers(0, 9))
def test_pool_decides_as_a_comparison_of_all_nodes_does(events, compared, seed):
    pool, plain, seated = NodePool(Random(seed)), Plain(), []
    kept, module.COMPARED_HOLDERS = module.COMPARED_HOLDERS, compared
    try:
        for kind, *arguments in events:
            apply(kind, arguments, pool, plain, seated)
            idle = {node for node in pool.values() if node.leaving and not node.busy}
            assert set(pool.idle_and_leaving()) == idle
    finally:
        module.COMPARED_HOLDERS = kept


def apply(kind: str, arguments: list, pool: NodePool, plain: Plain, seated: list[Ticket]) -> None:
    match kind, arguments:
        case (("add" | "change"), (name, models, its)):
            getattr(pool, kind)(name, frozenset(models), its)
        case "remove", (name,):
            pool.remove(name)
        case "leave", (name,):
            if name in pool:
                pool.leave(pool[name])
        case "release", (number,) if seated:
            pool.release(seated.pop(number % len(seated)))
        case "release", _:
            pass
        case "assign", (spec, tokens, has_failed):
            assign(Ticket(spec, tokens=tokens), pool, plain, seated, has_failed=has_failed)
        case _, (name, value):
            if name in pool:
                setattr(pool[name], kind, value)


def assign(ticket: Ticket, pool: NodePool, plain: Plain, seated: list[Ticket], *, has_failed: bool) -> None:
    if has_failed and pool:
        ticket.failed_at = next(iter(pool.values()))
    fits = plain.fits(pool, ticket)
    assert pool.fits(ticket) is fits
    has_seat = any(node.free > 0 and node.accepts(ticket.job) for node in pool.values())
    assert pool.has_seat_for(ticket.job) == has_seat
    assert bool(pool.kinds_with_free_seat() >> pool.kind(ticket.job).number & 1) == has_seat
    if fits:
        best = plain.best(pool, ticket)
        had_others = len(pool) > 1
        pool.assign(ticket)
        assert ticket.node in best
        if had_others:  # with one node, there is nothing to choose
            plain.remember(ticket.node, ticket.job)
        seated.append(ticket)
