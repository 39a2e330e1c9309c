"""Drives any queue and the oracle through the same life, and compares whatever can be seen of them."""

from collections import defaultdict

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from cext.fair_queue_oracle import FairQueueOracle

MACHINE_SETTINGS = settings(
    max_examples=300,
    stateful_step_count=40,
    deadline=None,  # a loaded machine is not a bug
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)

tenants = st.sampled_from(["ann", "bob", "1", 1, -(2**70)])
priorities = st.sampled_from([1, 1, 1, 0, 7])
costs = st.floats(min_value=0, max_value=1e9)
impossible_arguments = st.sampled_from(
    [
        {"tenant": True},
        {"tenant": None},
        {"tenant": 1.0},
        {"cost": -1},
        {"cost": float("inf")},
        {"cost": float("nan")},
        {"cost": "1"},
        {"priority": 8},
        {"priority": -1},
        {"priority": 2**70},
        {"priority": 1.5},
    ]
)


class FairQueueMachine(RuleBasedStateMachine):
    """`new_queue` is what a subclass puts to the test.

    Handles of the queue are told from the oracle's by `twins`, which remembers every one ever given out.
    """

    new_queue = FairQueueOracle
    handles = Bundle("handles")

    @initialize(capacity=st.sampled_from([0, 1, 3, 1000, 1000]))
    def begin(self, capacity):
        self.capacity = capacity
        self.queue = self.new_queue(capacity=capacity)
        self.oracle = FairQueueOracle(capacity=capacity)
        self.twins = {}
        self.retried = set()
        self.leads = defaultdict(int)

    @rule(target=handles, tenant=tenants, cost=costs, priority=priorities)
    def push(self, tenant, cost, priority):
        return self.enter("push", tenant, cost, priority)

    @rule(target=handles, tenant=tenants, cost=costs, priority=priorities)
    def push_front(self, tenant, cost, priority):
        handle = self.enter("push_front", tenant, cost, priority)
        self.retried.add(handle)
        return handle

    @rule(target=handles, crowd=st.lists(tenants, min_size=2, max_size=40), priority=priorities)
    def push_a_crowd(self, crowd, priority):
        admitted = crowd[: max(self.capacity - len(self.oracle), 0)]
        return multiple(*[self.enter("push", tenant, 1.0, priority) for tenant in admitted])

    @rule(arguments=impossible_arguments, method=st.sampled_from(["push", "push_front"]))
    def push_what_cannot_be(self, arguments, method):
        arguments = {"tenant": "ann", "cost": 1.0, "priority": 1} | arguments
        expected = outcome(getattr(self.oracle, method), **arguments)
        assert "raised" == expected[0]
        assert expected == outcome(getattr(self.queue, method), **arguments)

    @rule()
    def pop(self):
        expected = outcome(self.oracle.pop)
        actual = outcome(self.queue.pop)
        if expected[0] == "raised":
            assert expected == actual
            return
        assert "returned" == actual[0]
        self.check_turns(actual[1])
        assert expected[1] == self.twins[actual[1]][0]

    @rule(handle=handles)
    def discard(self, handle):
        twin = self.twins[handle][0]
        assert self.oracle.discard(twin) == self.queue.discard(handle)
        assert handle not in self.queue

    @rule(handle=handles)
    def look(self, handle):
        twin = self.twins[handle][0]
        assert (twin in self.oracle) == (handle in self.queue)
        for question in ("position", "tenant", "cost"):
            assert outcome(getattr(self.oracle, question), twin) == outcome(
                getattr(self.queue, question), handle
            )

    @rule(handle=handles, offset=st.sampled_from([1, -1, 1 << 32, -1 << 32, 1 << 63, 1 << 64]))
    def discard_a_forgery(self, handle, offset):
        if handle + offset not in self.twins:
            assert handle + offset not in self.queue
            assert not self.queue.discard(handle + offset)

    @rule()
    def clear(self):
        self.oracle.clear()
        self.queue.clear()

    def teardown(self):
        """The order in which all that is left would leave is the last thing to compare."""
        while len(self.oracle):
            self.pop()

    @invariant()
    def all_that_can_be_counted_is_equal(self):
        statistics = self.queue.statistics()
        assert self.oracle.statistics() == statistics
        assert statistics.length == len(self.queue)
        assert statistics.pushed == statistics.length + statistics.popped + statistics.discarded
        for tenant in ("ann", "bob", "1", 1, -(2**70), "nobody"):
            assert self.oracle.waiting(tenant) == self.queue.waiting(tenant)

    @invariant()
    def only_retries_exceed_the_capacity(self):
        retries_waiting = sum(handle in self.queue for handle in self.retried)
        assert len(self.queue) <= self.capacity + retries_waiting

    @invariant()
    def leads_are_counted_while_both_wait(self):
        """Of two tenants that both wait all the while, neither is ever served twice more than the other."""
        for key in list(self.leads):
            priority, *pair = key
            if not self.oracle.rings[priority].keys() >= set(pair):
                del self.leads[key]

    def enter(self, method, tenant, cost, priority):
        expected = outcome(getattr(self.oracle, method), tenant, cost, priority=priority)
        actual = outcome(getattr(self.queue, method), tenant, cost, priority=priority)
        assert expected[0] == actual[0]
        if expected[0] == "raised":
            assert expected == actual
            return multiple()
        handle = actual[1]
        assert handle not in self.twins, "a handle was given out twice"
        self.twins[handle] = (expected[1], tenant, priority)
        return handle

    def check_turns(self, popped):
        _twin, served, priority = self.twins[popped]
        for other in self.oracle.rings[priority].keys() - {served}:
            self.leads[priority, served, other] += 1
            self.leads[priority, other, served] -= 1
            assert self.leads[priority, served, other] <= 1


def outcome(call, *arguments, **options):
    """What a call comes to, in a form that can be compared."""
    try:
        return "returned", call(*arguments, **options)
    except Exception as error:  # noqa: BLE001  (whatever it raises is the outcome)
        return "raised", type(error)
