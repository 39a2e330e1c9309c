"""Teams take turns with each other, and the members of a team among themselves."""

import random
import tracemalloc

import pytest

from cext.fair_queue_oracle import FairQueueOracle, counts
from fairlead._cext.fairqueue import FairQueue

both = pytest.mark.parametrize("new_queue", [FairQueue, FairQueueOracle], ids=["kernel", "oracle"])
fairnesses = pytest.mark.parametrize("fairness", ["roundRobin", "tokens"])


def named(letters):
    """Return tenants: A1 is the member 1 of the team A, and lower-case letters have no team."""
    return [word if word.islower() else (word[0], word[1:]) for word in letters.split()]


def order(queue, letters, **options):
    """Push entries of these tenants, and return the tenants in the order in which the entries leave."""
    words = {
        queue.push(tenant, **options): word
        for tenant, word in zip(named(letters), letters.split(), strict=True)
    }
    return " ".join(words[queue.pop()] for _ in range(len(queue)))


@both
@fairnesses
def test_teams_share_first_and_their_members_share_the_teams_turns(new_queue, fairness):
    queue = new_queue(capacity=20, fairness=fairness)
    assert order(queue, "A1 A1 A1 A2 A2 A3 B1 B1 B1 c c") == "A1 B1 c A2 B1 c A3 B1 A1 A2 A1"


@both
@fairnesses
def test_a_team_of_one_is_served_like_a_tenant(new_queue, fairness):
    with_teams = order(new_queue(capacity=9, fairness=fairness), "A1 A1 A1 A1 B1 B1 c")
    without = order(new_queue(capacity=9, fairness=fairness), "a a a a b b c")
    assert with_teams.replace("1", "").lower() == without


@both
def test_team_with_a_larger_weight_gets_more_turns(new_queue):
    queue = new_queue(capacity=20, fairness="tokens")
    for _ in range(6):
        queue.push(("A", "1"), 2.0, team_cost=1.0)
        queue.push(("B", "1"), 2.0, team_cost=2.0)
    left = [queue.entry(handle).tenant[0] for handle in queue.ahead(None)[:6]]
    assert left.count("A") == 4
    assert queue.team_counter("A") == queue.team_counter("B") == 0.0


@both
def test_charges_and_refunds_count_for_the_tenant_and_its_team(new_queue):
    queue = new_queue(capacity=9, fairness="tokens")
    queue.push("other")
    tenant = ("A", "1")
    queue.push(tenant, 4.0, team_cost=2.0)
    queue.push(("A", "2"))
    queue.pop()
    queue.pop()
    queue.charge(tenant, 4.0, team_cost=2.0)
    assert (queue.counter(tenant), queue.counter(("A", "2")), queue.team_counter("A")) == (8.0, 0.0, 4.0)
    queue.refund(tenant, 2.0, team_cost=1.0)
    assert (queue.counter(tenant), queue.team_counter("A")) == (6.0, 3.0)
    queue.charge(tenant, 0.0, team_cost=7.0)
    assert (queue.counter(tenant), queue.team_counter("A")) == (6.0, 10.0)


@both
def test_team_gets_the_refund_of_a_member_that_is_forgotten(new_queue):
    queue = new_queue(capacity=9, fairness="tokens")
    queue.push(("A", "1"), 5.0)
    queue.push(("A", "2"), 9.0)
    queue.push(("A", "2"), 9.0)
    queue.pop()
    queue.pop()
    queue.discard(queue.push(("A", "1")))  # in vain: it is at the level, and is forgotten
    queue.refund(("A", "1"), 4.0)
    assert queue.team_counter("A") == 10.0


@both
def test_full_queue_takes_from_the_team_with_the_most(new_queue):
    queue = new_queue(capacity=9)
    tenants = {queue.push(tenant): tenant for tenant in named("A1 A1 A2 A2 A2 b b")}
    assert tenants[queue.displace("c")] == ("A", "2")
    assert tenants[queue.displace(("B", "1"))] == ("A", "2")
    assert queue.displace("b") is None  # two wait, and three of the team
    assert tenants[queue.displace(("A", "9"))] == ("A", "1")


@both
def test_members_of_a_team_make_room_for_each_other(new_queue):
    queue = new_queue(capacity=9)
    tenants = {queue.push(tenant): tenant for tenant in named("A1 A1 A1 A2 b b b b")}
    assert queue.displace("b") is None
    assert tenants[queue.displace(("A", "2"))] == ("A", "1")
    assert queue.displace(("A", "2")) is None  # the lines are two and one
    assert tenants[queue.displace(("A", "3"))] == ("A", "1")


@both
def test_number_of_tenants_counts_members_and_no_teams(new_queue):
    queue = new_queue(capacity=9)
    for tenant in named("A1 A1 A2 B1 c"):
        queue.push(tenant)
    assert (queue.tenants, queue.waiting(("A", "1")), queue.waiting(("A", "9"))) == (4, 2, 0)
    queue.clear()
    assert queue.tenants == 0


@pytest.mark.parametrize("estimate", ["exact", "constant", "nothing"])
@pytest.mark.parametrize("seats", [1, 4, 16])
@both
def test_service_of_backlogged_teams_and_members_differs_by_a_bounded_amount(new_queue, seats, estimate):
    """Theorem 4.8 of VTC at both levels, with weights.

    The counters of two teams that wait, and of two members of a team that wait, differ by at most the largest
    estimate and the largest underestimate of each running entry, both by weight. What they have received, by
    weight, differs by at most twice that, over any time.
    """
    chance = random.Random(f"{estimate}{seats}")
    means = dict(zip(named("A1 A2 A3 B1 c"), [15.0, 3.0, 8.0, 5.0, 11.0], strict=True))
    team_weights, weights = {"A": 2.0, "B": 1.0}, {("A", "2"): 3.0}
    queue = new_queue(capacity=1000, fairness="tokens")
    actual, running = {}, []
    received = {"own": dict.fromkeys(means, 0.0), "team": {"A": 0.0, "B": 0.0, "c": 0.0}}
    largest = {"own": [0.0, 0.0], "team": [0.0, 0.0]}  # estimate, underestimate
    spread = {"own": 0.0, "team": 0.0}
    for _ in range(3000 if new_queue is FairQueue else 300):
        for tenant, mean in means.items():
            while queue.waiting(tenant) < 3:
                cost = chance.uniform(0.1, 2) * mean
                guess = {"exact": cost, "constant": 5.0, "nothing": 0.0}[estimate]
                shares = {"own": weights.get(tenant, 1.0), "team": team_weights.get(tenant[0], 1.0)}
                handle = queue.push(tenant, guess / shares["own"], team_cost=guess / shares["team"])
                actual[handle] = (tenant, cost, guess, shares)
                for level, share in shares.items():
                    bound = largest[level]
                    bound[0] = max(bound[0], guess / share)
                    bound[1] = max(bound[1], (cost - guess) / share)
        running.append(actual.pop(queue.pop()))
        if len(running) == seats:
            tenant, cost, guess, shares = running.pop(chance.randrange(seats))
            correct = queue.charge if cost > guess else queue.refund
            difference = abs(cost - guess)
            correct(tenant, difference / shares["own"], team_cost=difference / shares["team"])
            received["own"][tenant] += cost / shares["own"]
            received["team"][tenant[0]] += cost / shares["team"]
        counters = {
            "own": [queue.counter(("A", name)) for name in "123"],
            "team": [queue.team_counter("A"), queue.team_counter("B"), queue.counter("c")],
        }
        services = {
            "own": [received["own"]["A", name] for name in "123"],
            "team": list(received["team"].values()),
        }
        for level, (most, underestimate) in largest.items():
            bound = most + seats * underestimate + 1e-6
            assert max(counters[level]) - min(counters[level]) <= bound, level
            spread[level] = max(spread[level], max(services[level]) - min(services[level]))
            # What runs is charged and not yet received.
            assert spread[level] <= 2 * (bound + seats * (most + underestimate)), level
    assert min(received["own"].values()) > 0


@fairnesses
def test_memory_of_teams_with_many_members_is_bounded(fairness):
    queue = FairQueue(capacity=10, fairness=fairness)
    queue.push("waiting", priority=7)
    queue.push(("team", "waiting"), priority=7)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(20_000):
            queue.push(("team", number))
            queue.pop()
        for number in range(20_000):
            queue.push((number % 3, number))
            queue.pop()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 5 * 2_500_000  # for each team 2048 members, and as many free rows again
    assert queue.tenants == 2


@fairnesses
def test_team_without_members_is_forgotten(fairness):
    queue = FairQueue(capacity=10, fairness=fairness)
    tracemalloc.start()
    try:
        for number in range(20_000):
            queue.discard(queue.push((number, "never served")))
            queue.clear()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after < 200_000


def test_push_for_a_new_team_without_memory_changes_nothing():
    testcapi = pytest.importorskip("_testcapi", reason="only CPython's own test module can take memory away")
    for fairness in ("roundRobin", "tokens"):
        queue = FairQueue(capacity=1000, fairness=fairness)
        for number in range(32):  # the next push must grow the arrays
            queue.push(f"{number}")
        before = counts(queue)
        failures = 0
        for allocations in range(50):
            handle = None
            testcapi.set_nomemory(allocations, allocations + 1)
            try:
                handle = queue.push(("new team", "one more"))
            except MemoryError:
                failures += 1
            finally:
                testcapi.remove_mem_hooks()
            if handle is not None:
                break
            assert before == counts(queue)
        assert failures >= 4
        assert queue.tenants == 33
        assert [queue.entry(waiting).tenant for waiting in queue.ahead(None)][-1] == ("new team", "one more")
        queue.clear()
        assert queue.tenants == 0
