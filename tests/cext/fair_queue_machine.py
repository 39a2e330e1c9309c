"""Run random operations on a queue and on its oracle, and compare everything observable."""

from collections import defaultdict

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from cext.fair_queue_oracle import SLACK, FairQueueOracle, Team, counts

MACHINE_SETTINGS = settings(
    stateful_step_count=40,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)

# The tenants of a run. Those of a run without teams are together five, so that they often meet.
RED, BLUE = "ann", 1  # teams, of which tenants have the names, too
NAMES = {
    "none": ("ann", "bob", "1", 1, -(2**70)),
    "some": ("ann", 1, (RED, "ann"), (RED, "bob"), (BLUE, "ann")),
    "all": ((RED, "ann"), (RED, "bob"), (RED, 1), (BLUE, "bob"), (BLUE, -(2**70))),
}
tenants = st.integers(0, 4)  # an index into the names of the run
priorities = st.sampled_from([1, 1, 1, 0, 7])
plain_costs = st.sampled_from([1.0, 1.0, 1.0, 0.0, 2.0, 5.5])
costs = st.one_of(plain_costs, plain_costs, plain_costs, st.floats(min_value=0, max_value=1e9))
team_costs = st.one_of(st.none(), st.none(), plain_costs)
sizes = st.sampled_from([0, 1, 2, 3, 2**48 - 1])
kinds = st.sampled_from([0, 0, 1, 63])
tried_kinds = st.sampled_from([*[None] * 9, 0, 1, 2, 1 << 63])
fit_results = st.lists(st.sampled_from([True, False, None]), min_size=1, max_size=7)
impossible_arguments = st.sampled_from(
    [
        {"tenant": True},
        {"tenant": None},
        {"tenant": 1.0},
        {"tenant": ("ann",)},
        {"tenant": ("ann", None)},
        {"tenant": (True, "ann")},
        {"tenant": ("ann", "ann", "ann")},
        {"team_cost": -1},
        {"team_cost": float("nan")},
        {"team_cost": "1"},
        {"cost": -1},
        {"cost": float("inf")},
        {"cost": float("nan")},
        {"cost": "1"},
        {"priority": 8},
        {"priority": -1},
        {"priority": 2**70},
        {"priority": 1.5},
        {"size": -1},
        {"size": 2**48},
        {"size": 2**70},
        {"size": 1.5},
        {"kind": -1},
        {"kind": 64},
        {"kind": 1.5},
        {"count": 0},
        {"count": -1},
        {"count": 2**31},
        {"count": 1.5},
    ]
)


# The calls that may come first after entries were discarded.
NEXT_CALLS = {
    "push": None,
    "push retried": None,
    "pop": lambda machine, *_: machine.pop(),
    "pop fitting": lambda machine, *_: machine.pop_fitting([True, False, None]),
    "pop_many": lambda machine, *_: machine.pop_many(3, 5),
    "entry": lambda machine, *_: machine.check_all(machine.look_up),
    "ahead": lambda machine, *_: machine.check_all(machine.check_ahead),
    "displace": lambda machine, _, tenant, priority: machine.check_displaced(tenant, priority),
    "clear": lambda machine, *_: machine.call_both("clear"),
    "charge": lambda machine, _, tenant, __: machine.call_both("charge", tenant, 2.0),
    "refund": lambda machine, _, tenant, __: machine.call_both("refund", tenant, 2.0),
    "counts": lambda machine, *_: machine.counts_are_equal(),
}


class FairQueueMachine(RuleBasedStateMachine):
    """Subclasses set `new_queue` to the implementation under test.

    `oracle_handles`: for each handle that the queue ever returned, the oracle's handle, tenant and class.
    `comparisons` counts how often the two queues were found equal, over all runs.
    """

    new_queue = FairQueueOracle
    fixed_options = {}  # noqa: RUF012
    comparisons = 0
    handles = Bundle("handles")

    @initialize(
        capacity=st.sampled_from([0, 1, 3, 6, 6, *[1000] * 5]),
        fairness=st.sampled_from(["roundRobin", "tokens"]),
        min_share=st.sampled_from([0.0, 0.0, 0.1, 0.4]),
        bypass=st.sampled_from([0, 1, 2, 8]),
        teams=st.sampled_from(list(NAMES)),
    )
    def begin(self, teams, **options):
        options |= self.fixed_options
        self.names = NAMES[options.pop("teams", teams)]
        self.capacity = options["capacity"]
        self.in_rounds = options["fairness"] == "roundRobin"
        self.queue = self.new_queue(**options)
        self.oracle = FairQueueOracle(**options)
        self.oracle_handles = {}
        self.retried = set()
        self.begun = set()  # pushed so
        self.leads = defaultdict(int)

    # Adding entries

    @rule(
        target=handles,
        tenant=tenants,
        cost=costs,
        priority=priorities,
        size=sizes,
        kind=kinds,
        team_cost=team_costs,
    )
    def push(self, tenant, cost, priority, size, kind, team_cost):
        return self.push_to_both(self.names[tenant], cost, priority, size, kind, team_cost=team_cost)

    @rule(target=handles, tenant=tenants, cost=costs, priority=priorities, size=sizes, kind=kinds)
    def push_retried(self, tenant, cost, priority, size, kind):
        return self.push_to_both(self.names[tenant], cost, priority, size, kind, retried=True)

    @rule(
        target=handles,
        tenant=tenants,
        priority=priorities,
        cost=plain_costs,
        kind=kinds,
        count=st.integers(1, 5),
        how=st.sampled_from([{}, {}, {"begun": True}, {"retried": True}, {"begun": True, "retried": True}]),
    )
    def push_for_several_pops(self, tenant, priority, cost, kind, count, how):
        return self.push_to_both(self.names[tenant], cost, priority, kind=kind, count=count, **how)

    @rule(
        target=handles,
        entries=st.lists(st.tuples(tenants, kinds), min_size=2, max_size=40),
        priority=priorities,
        size=sizes,
    )
    def push_several(self, entries, priority, size):
        admitted = entries[: max(self.capacity - len(self.oracle), 0)]
        return multiple(
            *[self.push_to_both(self.names[tenant], 1.0, priority, size, kind) for tenant, kind in admitted]
        )

    @rule(arguments=impossible_arguments, retried=st.booleans())
    def push_invalid_entry(self, arguments, retried):
        arguments = {"tenant": "ann", "retried": retried} | arguments
        expected = outcome(self.oracle.push, **arguments)
        assert expected[0] == "raised"
        assert expected == outcome(self.queue.push, **arguments)

    # Removing entries

    @rule(kinds=tried_kinds)
    def pop(self, kinds=None):
        expected = outcome(self.oracle.pop, kinds=kinds)
        actual = outcome(self.queue.pop, kinds=kinds)
        if expected[0] == "raised":
            assert expected == actual
            return
        assert actual[0] == "returned"
        if kinds is None:
            self.check_turns(actual[1])
        else:
            self.leads.clear()
        assert expected[1] == self.oracle_handles[actual[1]][0]

    @rule(count=st.integers(2, 9))
    def pop_several(self, count):
        for _ in range(count):
            self.pop()

    @rule(fit_results=fit_results, kinds=tried_kinds)
    def pop_fitting(self, fit_results, kinds=None):
        expected_calls, actual_calls = [], []

        def fits_the_oracle(oracle_handle):
            expected_calls.append(oracle_handle)
            return fit_results[oracle_handle % len(fit_results)]

        def fits(handle):
            oracle_handle = self.oracle_handles[handle][0]
            actual_calls.append(oracle_handle)
            return fit_results[oracle_handle % len(fit_results)]

        expected = outcome(self.oracle.pop, fits_the_oracle, kinds=kinds)
        actual = outcome(self.queue.pop, fits, kinds=kinds)
        assert expected == self.translated(actual)
        assert expected_calls == actual_calls
        self.leads.clear()

    @rule(max_count=st.integers(0, 5), memory_budget=st.sampled_from([0, 1, 2, 3, 5, 2**70]))
    def pop_many(self, max_count, memory_budget):
        expected = self.oracle.pop_many(max_count, memory_budget)
        actual = self.queue.pop_many(max_count, memory_budget)
        assert expected == [self.oracle_handles[handle][0] for handle in actual]
        self.leads.clear()

    @rule(handle=handles)
    def discard(self, handle):
        self.discard_from_both(handle)

    @rule(
        target=handles,
        discards=st.lists(handles, min_size=2, max_size=9),
        next_call=st.sampled_from(list(NEXT_CALLS)),
        tenant=tenants,
        priority=priorities,
    )
    def discard_and_call(self, discards, next_call, tenant, priority):
        """Discard without a call in between. The first call afterwards finds all of them gone."""
        for handle in discards:
            self.discard_from_both(handle)
            assert not self.queue.discard(handle)
        if next_call in ("push", "push retried"):
            retried = next_call == "push retried"
            return self.push_to_both(self.names[tenant], retried=retried, priority=priority)
        NEXT_CALLS[next_call](self, discards[0], self.names[tenant], priority)
        return multiple()

    @rule(
        target=handles,
        tenant=tenants,
        priority=priorities,
        count=st.sampled_from([127, 128, 129, 300]),
        enabled=st.sampled_from([False, False, False, True]),
    )
    def push_and_discard(self, tenant, priority, count, enabled):
        """Push and discard until a one-byte counter wraps. Entries that wait meanwhile must stay valid."""
        if not enabled or len(self.oracle) >= self.capacity:
            return multiple()
        name = self.names[tenant]
        added = [self.push_to_both(name, priority=priority)]
        for _ in range(count):
            self.discard_from_both(added[-1])
            added.append(self.push_to_both(name, priority=priority))
        assert not any(self.queue.discard(handle) for handle in added[:-1])
        for handle, (oracle_handle, _tenant, _priority) in self.oracle_handles.items():
            assert (oracle_handle in self.oracle) == (handle in self.queue)
        return multiple(added[0], added[-1])

    @rule(
        target=handles,
        tenant=tenants,
        priority=priorities,
        entries=st.lists(st.tuples(tenants, priorities), min_size=6, max_size=6),
    )
    def displace(self, tenant, priority, entries):
        """Displace an entry. Callers do this when the queue is full, so a small queue is filled first."""
        free_places = max(self.capacity - len(self.oracle), 0)
        admitted = entries[:free_places] if self.capacity <= len(entries) else []
        added = [self.push_to_both(self.names[name], priority=other) for name, other in admitted]
        self.check_displaced(self.names[tenant], priority)
        return multiple(*added)

    @rule(handle=handles, enabled=st.sampled_from([False, False, False, False, True]))
    def clear(self, handle, enabled):
        """Clear rarely, so that entries can wait for many operations."""
        if enabled and handle in self.queue:
            self.oracle.clear()
            self.queue.clear()

    # Counters

    @rule(tenant=tenants, method=st.sampled_from(["charge", "refund"]), cost=costs, team_cost=team_costs)
    def correct(self, tenant, method, cost, team_cost):
        self.check_counters(method, self.names[tenant], cost, team_cost)

    # Queries

    @rule(handle=handles)
    def look_up(self, handle):
        oracle_handle = self.oracle_handles[handle][0]
        assert (oracle_handle in self.oracle) == (handle in self.queue)
        assert outcome(self.oracle.entry, oracle_handle) == outcome(self.queue.entry, handle)
        self.check_ahead(handle)

    @rule(handle=handles, offset=st.sampled_from([1, -1, 1 << 32, -1 << 32, 1 << 63, 1 << 64]))
    def discard_unknown_handle(self, handle, offset):
        if handle + offset not in self.oracle_handles:
            assert handle + offset not in self.queue
            assert not self.queue.discard(handle + offset)

    def teardown(self):
        """Pop all remaining entries, to compare their order."""
        ahead = [self.oracle_handles.get(handle, (None,))[0] for handle in self.queue.ahead(None)]
        assert self.oracle.ahead(None) == ahead
        assert self.oracle_handles.get(self.queue.peek(), (None,))[0] == next(iter(ahead), None)
        while len(self.oracle):
            self.pop()

    @invariant()
    def counts_are_equal(self):
        assert counts(self.oracle) == counts(self.queue)
        for tenant in (*self.names, "nobody", (RED, "nobody"), ("nobody", "ann")):
            assert self.oracle.waiting(tenant) == self.queue.waiting(tenant)
            assert self.oracle.counter(tenant) == self.queue.counter(tenant)
        for team in (RED, BLUE, "nobody"):
            assert self.oracle.team_counter(team) == self.queue.team_counter(team)
        type(self).comparisons += 1

    @invariant()
    def only_retries_exceed_the_capacity(self):
        exempt = sum(handle in self.queue for handle in self.retried | self.begun)
        assert len(self.queue) <= self.capacity + exempt

    @invariant()
    def leads_are_counted_while_both_wait(self):
        """Drop the leads of those who left. While two of a group wait, neither leads by two turns."""
        for key in list(self.leads):
            group, priority, *pair = key
            if not self.lines_of(group, priority).keys() >= set(pair):
                del self.leads[key]

    def lines_of(self, group, priority):
        """Return the lines of a class: of the top group (None), or of the members of a team."""
        if group is None:
            return self.oracle.top.lines[priority]
        return self.oracle.groups[group].lines[priority] if group in self.oracle.groups else {}

    def push_to_both(
        self,
        tenant,
        cost=1.0,
        priority=1,
        size=0,
        kind=0,
        *,
        count=1,
        retried=False,
        begun=False,
        team_cost=None,
    ):
        options = {"priority": priority, "size": size, "kind": kind, "count": count}
        options |= {"retried": retried, "begun": begun}
        options |= {} if team_cost is None else {"team_cost": team_cost}
        expected = outcome(self.oracle.push, tenant, cost, **options)
        actual = outcome(self.queue.push, tenant, cost, **options)
        assert expected[0] == actual[0]
        if expected[0] == "raised":
            assert expected == actual
            return multiple()
        handle = actual[1]
        assert handle not in self.oracle_handles, "a handle was returned twice"
        self.oracle_handles[handle] = (expected[1], tenant, priority)
        if retried:
            self.retried.add(handle)
        elif begun:
            self.begun.add(handle)
        return handle

    def discard_from_both(self, handle):
        oracle_handle = self.oracle_handles[handle][0]
        assert self.oracle.discard(oracle_handle) == self.queue.discard(handle)
        assert handle not in self.queue

    def check_turns(self, popped):
        assert popped in self.oracle_handles, "a handle was popped that no push returned"
        _oracle_handle, served, priority = self.oracle_handles[popped]
        if not self.in_rounds or popped in self.retried:
            return
        path = [(None, served)]
        if type(served) is tuple:
            path = [(None, Team(served[0])), (served[0], served)]
        for group, member in path:
            for other in self.lines_of(group, priority).keys() - {member}:
                self.leads[group, priority, member, other] += 1
                self.leads[group, priority, other, member] -= 1
                assert self.leads[group, priority, member, other] <= 1

    def check_ahead(self, handle):
        kind, value = outcome(self.queue.ahead, handle)
        ahead = [self.oracle_handles[other][0] for other in value] if kind == "returned" else value
        assert outcome(self.oracle.ahead, self.oracle_handles[handle][0]) == (kind, ahead)

    def check_all(self, look_up):
        for handle, (oracle_handle, _tenant, _priority) in self.oracle_handles.items():
            if oracle_handle in self.oracle:
                look_up(handle)

    def call_both(self, method, *arguments):
        getattr(self.oracle, method)(*arguments)
        getattr(self.queue, method)(*arguments)

    def check_displaced(self, tenant, priority):
        before = {name: self.oracle.waiting(name) for name in self.names}
        before |= {Team(name): self.oracle.waiting_in(Team(name)) for name in (RED, BLUE)}
        expected = self.oracle.displace(tenant, priority=priority)
        actual = self.queue.displace(tenant, priority=priority)
        if actual is None:
            assert expected is None
            return
        oracle_handle, displaced_tenant, displaced_priority = self.oracle_handles[actual]
        assert actual not in self.retried | self.begun
        loser, newcomer = self.oracle.path(displaced_tenant), self.oracle.path(tenant)
        # Those who share a team are compared within it, all others as members of the top group.
        level = -1 if loser[0] == newcomer[0] else 0
        assert displaced_priority > priority or (
            displaced_priority == priority and before[loser[level][1]] >= before[newcomer[level][1]] + SLACK
        )
        assert expected == oracle_handle

    def check_counters(self, method, tenant, amount, team_amount=None):
        """Only the tenant with a refund, and its team, may then have a lower counter in line."""
        before = {name: self.queue.counter(name) for name in self.names if self.oracle.is_in_line(name)}
        teams = {team: self.queue.team_counter(team) for team in (RED, BLUE)}
        options = {} if team_amount is None else {"team_cost": team_amount}
        getattr(self.oracle, method)(tenant, amount, **options)
        getattr(self.queue, method)(tenant, amount, **options)
        for name, counter in before.items():
            assert counter <= self.queue.counter(name) or (method, name) == ("refund", tenant)
        for team, counter in teams.items():
            if method == "charge":
                assert counter <= self.queue.team_counter(team)

    def translated(self, actual):
        kind, value = actual
        return (kind, self.oracle_handles[value][0]) if kind == "returned" else actual


def outcome(call, *arguments, **options):
    """Return the result of a call, or the type of its exception, for comparison."""
    try:
        return "returned", call(*arguments, **options)
    except Exception as error:  # noqa: BLE001  (any exception is an outcome)
        return "raised", type(error)
