"""Teams in the queue: weights, reloads, other dispatchers, and places of newcomers."""

from hypothesis import given
from hypothesis import strategies as st

from fairlead.router.dispatch.job_spec import JobSpec, line_of
from fairlead.router.dispatch.queue import MAX_MOVED_TENANTS, Queue
from fairlead.router.dispatch.tenant_counters import KnownCounters, highest_excess
from fairlead.router.dispatch.ticket import Ticket


def of(tenant: str, team: str = "", *, weight: float = 1.0, cost: float = 1.0, priority: int = 1) -> Ticket:
    spec = JobSpec(request_id="", tenant=tenant, model="m", team=team, team_weight=weight, priority=priority)
    return Ticket(spec, cost=cost)


def leave(queue: Queue, count: int | None = None) -> str:
    """Return the tenants of the next tickets, in the order in which they leave."""
    popped = [queue.pop(lambda _: True) for _ in range(len(queue) if count is None else count)]
    return "".join(ticket.job.tenant for ticket in popped if ticket)


def filled(*tickets: Ticket, **options: float) -> Queue:
    queue = Queue(100, fairness="tokens", **options)  # type: ignore[arg-type]
    for ticket in tickets:
        queue.push(ticket)
    return queue


def test_weights_of_teams_and_of_tenants_inside_them_both_count():
    queue = Queue(100, fairness="tokens", tenant_weights={"A": 3.0})
    for _ in range(12):
        for ticket in (of("A", "red", weight=2.0), of("B", "red", weight=2.0), of("C", "blue"), of("d")):
            queue.push(ticket)
    first = leave(queue, 16)
    assert {tenant: first.count(tenant) for tenant in "ABCd"} == {"A": 6, "B": 2, "C": 4, "d": 4}


def test_new_weight_applies_to_the_next_jobs_and_a_refund_returns_what_was_charged():
    running = of("A", "red", weight=1.0, cost=8.0)
    queue = filled(running, of("low", priority=2))  # the level stays 0
    assert leave(queue, 1) == "A"
    queue.push(of("A", "red", weight=4.0, cost=8.0))
    assert leave(queue, 1) == "A"
    assert queue.counters([line_of("A", "red")]).counters[line_of("", "red")] == 10.0
    queue.refund(running, down_to=0.0)
    assert queue.counters([line_of("A", "red")]).counters[line_of("", "red")] == 2.0


def test_tenant_whose_team_changes_keeps_what_it_has_received():
    queue = filled(of("A", "red", cost=9.0), of("B", "blue", cost=1.0))
    leave(queue)
    for _ in range(3):
        queue.push(of("C", "blue", cost=3.0))
    queue.push(of("A", "blue", cost=3.0))
    assert leave(queue) == "CCCA"
    for _ in range(5):
        queue.push(of("D"))
    queue.push(of("A"))  # and out of any team
    assert leave(queue).index("A") >= 3  # what it was charged after the last turn of C


def test_number_of_tenants_whose_team_is_known_is_bounded():
    queue = Queue(2, fairness="tokens")
    for number in range(MAX_MOVED_TENANTS + 5):
        ticket = of(f"{number}", "red")
        queue.push(ticket)
        queue.remove(ticket)
    assert len(queue._teams) == MAX_MOVED_TENANTS
    queue.push(of("8"))  # long forgotten


def test_next_dispatcher_has_the_counters_of_teams_and_members():
    lines = [line_of("A", "red"), line_of("B", "red"), line_of("C", "blue"), "d"]
    jobs = (("A", "red", 8.0), ("B", "red", 1.5), ("C", "blue", 2.5), ("d", "", 4.0))
    before = filled(*[of(tenant, team, cost=cost) for tenant, team, cost in jobs])
    before.push(of("low", priority=2))  # the level stays 0
    leave(before, len(jobs))
    known = KnownCounters()
    known.update(before.counters(lines))
    after = filled(of("low", priority=2))
    after.restore_counters(highest_excess([known.whole()]))
    orders = []
    for queue in (before, after):
        for tenant, team, _ in jobs:
            for _ in range(10):
                queue.push(of(tenant, team))
        orders.append(leave(queue))
    assert orders[0] == orders[1]


def test_tenant_with_the_spelling_of_a_line_in_a_team_is_in_no_team():
    assert line_of("portal/\0red\0A", "").startswith("portal/")


@given(
    jobs=st.lists(
        st.tuples(st.sampled_from(["A", "B", "C"]), st.sampled_from(["", "red", "blue"]), st.integers(0, 2)),
        max_size=30,
    ),
    newcomer=st.tuples(
        st.sampled_from(["A", "new"]), st.sampled_from(["", "red", "white"]), st.integers(0, 2)
    ),
    served=st.integers(0, 5),
)
def test_place_of_a_newcomer_is_its_place_when_it_comes(jobs, newcomer, served):
    queue = filled(*[of(f"{team}{tenant}", team, priority=priority) for tenant, team, priority in jobs])
    leave(queue, min(served, len(queue)))
    tenant, team, priority = newcomer
    tenant = f"{team}{tenant}"
    queue.order()  # changes nothing
    ahead = queue.ahead_of_newcomer(line_of(tenant, team), priority)
    ticket = of(tenant, team, priority=priority)
    queue.push(ticket)
    assert queue.position(ticket) == len(ahead)


def test_survey_knows_where_a_new_member_of_a_team_would_be():
    queue = filled(*[of("A", "red") for _ in range(6)], *[of("c") for _ in range(6)])
    places = queue.order().newcomers
    member, stranger = places[line_of("", "red"), 1], places[None, 1]
    assert stranger.first == member.first == 2
    assert stranger.second < member.second <= 6  # a team has half of the turns, and a member half of those
    assert places[line_of("A", "red"), 1].first >= 10


def test_tenants_of_a_team_divide_its_part_of_the_seats():
    queue = Queue(100, fairness="tokens", tenant_weights={"A": 3.0})
    for ticket in (of("A", "red", weight=2.0), of("B", "red", weight=2.0), of("C", "blue"), of("d")):
        queue.push(ticket)
    lines = list(queue.lines("m"))
    parts = queue.parts("m", lines)
    assert [parts[line] for line in lines] == [0.375, 0.125, 0.25, 0.25]
    assert queue.parts("m", ["e"]) == {"e": 0.2}
    assert Queue(100).parts("m", [line_of("A", "red"), line_of("B", "red"), "c"])["c"] == 0.5
