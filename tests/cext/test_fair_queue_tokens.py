"""Token fairness: the tenant that used least goes first, and idling earns no credit."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cext.fair_queue_oracle import FairQueueOracle, counts
from fairlead._cext.fairqueue import FairQueue

both = pytest.mark.parametrize("new_queue", [FairQueue, FairQueueOracle], ids=["kernel", "oracle"])


def push_all(queue, names, **options):
    return {queue.push(name, **options): name for name in names}


def pop_all(queue, names):
    return "".join(names[queue.pop()] for _ in range(len(queue)))


@both
@pytest.mark.parametrize("arrival", ["AAAAABB", "ABABAAA", "ABBAAAA", "AABAAAB"])
def test_equal_costs_give_the_order_of_round_robin(new_queue, arrival):
    queue = new_queue(capacity=7, fairness="tokens")
    assert pop_all(queue, push_all(queue, arrival)) == "ABABAAA"


@both
def test_idling_earns_no_credit(new_queue):
    queue = new_queue(capacity=20, fairness="tokens")
    names = push_all(queue, "AAAAAA")
    for _ in range(4):
        queue.pop()
    names |= push_all(queue, "BBB")
    assert pop_all(queue, names) == "BABAB"


@both
def test_unused_part_of_the_estimate_is_refunded(new_queue):
    queue = new_queue(capacity=20, fairness="tokens")
    names = {queue.push("A", 9.0): "A", queue.push("A", 1.0): "A", queue.push("B", 2.0): "B"}
    queue.push("B", 2.0)
    queue.pop()
    assert queue.counter("A") == 9.0
    queue.refund("A", 8.0)
    assert (queue.counter("A"), names[queue.pop()]) == (1.0, "B")
    assert names[queue.pop()] == "A"


@pytest.mark.parametrize(
    "query",
    [
        lambda queue: queue.charge("A", 2.0),
        lambda queue: queue.refund("A", 0.5),
        lambda queue: queue.counter("A"),
        lambda queue: queue.counter("new"),
        lambda queue: queue.waiting("A"),
        lambda queue: bool(queue.push("A", 1.0)),
        lambda queue: bool(queue.push("new", 1.0)),
        lambda queue: bool(queue.push("new", 1.0, retried=True)),
        lambda queue: bool(queue.displace("new")),
        lambda queue: bool(queue and queue.pop()),
        lambda queue: bool(queue and queue.pop(lambda _: True)),
        lambda queue: len(queue.pop_many(2, 0)),
        counts,
        lambda queue: queue.clear(),
    ],
)
@pytest.mark.parametrize("others", [[("B", 5.0), ("C", 9.0)], []], ids=["others wait", "nobody waits"])
def test_counters_are_correct_right_after_the_lowest_tenant_is_discarded(query, others):
    queues = [new(capacity=20, fairness="tokens") for new in (FairQueue, FairQueueOracle)]
    seen = []
    for queue in queues:
        tenants = [("A", 1.0), *others]
        handles = [queue.push(tenant, cost) for tenant, cost in tenants * 3]
        names = {handle: index for index, handle in enumerate(handles)}
        left = [names[queue.pop()] for _ in tenants]
        for handle in handles[len(tenants) :: len(tenants)]:
            assert queue.discard(handle)
        result = query(queue)
        counters = [queue.counter(tenant) for tenant in ("A", "B", "C", "new")]
        left += [names.get(queue.pop(), "another") for _ in range(len(queue))]
        seen.append((result, counters, left, counts(queue)))
    assert seen[1] == seen[0]


@both
def test_round_robin_keeps_no_counters(new_queue):
    queue = new_queue(capacity=1)
    queue.charge("A", 5.0)
    queue.refund("A", 1.0)
    queue.push("A", 7.0)
    queue.pop()
    assert queue.counter("A") == 0.0


@both
@pytest.mark.parametrize("method", ["charge", "refund"])
@pytest.mark.parametrize(
    ("error", "tenant", "amount"),
    [(TypeError, None, 1.0), (TypeError, "A", "1"), (ValueError, "A", -1.0), (ValueError, "A", float("inf"))],
)
def test_invalid_amount_is_refused(new_queue, method, error, tenant, amount):
    with pytest.raises(error):
        getattr(new_queue(capacity=1, fairness="tokens"), method)(tenant, amount)


def test_counter_stays_finite_after_any_charge():
    queue = FairQueue(capacity=3, fairness="tokens")
    queue.push("A", 1e308)
    queue.pop()
    queue.charge("A", 1e308)
    queue.push("B")
    assert (queue.counter("A"), queue.counter("B")) == (1e300, 0.0)


@pytest.mark.parametrize("estimate", ["exact", "constant", "nothing"])
@pytest.mark.parametrize("seats", [1, 4, 16])
def test_counters_of_backlogged_tenants_differ_by_a_bounded_amount(estimate, seats):
    """Differ by at most the largest estimate plus the largest underestimate for each running entry."""
    chance = random.Random(f"{estimate}{seats}")
    means = {"A": 15.0, "B": 3.0, "C": 8.0}
    queue = FairQueue(capacity=1000, fairness="tokens")
    actual, running = {}, []
    largest_estimate = largest_underestimate = 0.0
    for _ in range(3000):
        for tenant, mean in means.items():
            while queue.waiting(tenant) < 3:
                cost = chance.uniform(0.1, 2) * mean
                guess = {"exact": cost, "constant": 5.0, "nothing": 0.0}[estimate]
                actual[queue.push(tenant, guess)] = (tenant, cost, guess)
                largest_estimate = max(largest_estimate, guess)
                largest_underestimate = max(largest_underestimate, cost - guess)
        running.append(actual.pop(queue.pop()))
        if len(running) == seats:
            tenant, cost, guess = running.pop(chance.randrange(seats))
            if cost > guess:
                queue.charge(tenant, cost - guess)
            else:
                queue.refund(tenant, guess - cost)
        counters = [queue.counter(tenant) for tenant in means if queue.waiting(tenant)]
        assert max(counters) - min(counters) <= largest_estimate + seats * largest_underestimate + 1e-6


@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from("ABCD"), st.integers(0, 2), st.sampled_from([0.0, 1.0, 3.0])), max_size=60
    ),
    min_share=st.sampled_from([0.0, 0.3]),
    fairness=st.sampled_from(["roundRobin", "tokens"]),
)
def test_positions_predict_the_pop_order(arrivals, min_share, fairness):
    queue = FairQueue(capacity=60, fairness=fairness, min_share=min_share)
    handles = [queue.push(tenant, cost, priority=priority) for tenant, priority, cost in arrivals]
    handle_at = {len(queue.ahead(handle)): handle for handle in handles}
    assert [handle_at.get(place) for place in range(len(handles))] == [queue.pop() for _ in handles]
