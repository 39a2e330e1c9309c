"""A Hypothesis state machine of a model's replicas, and a plain statement of the rules that hold for them."""

import itertools

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fairlead.distributed.ray.replica_set import (
    DrainReplica,
    EndReplica,
    LaunchReplica,
    ModelLoad,
    ReplicaSet,
    ScalingRules,
)

TARGET_S, UP_AFTER_S, DOWN_AFTER_S = 5.0, 3.0, 20.0
SEATS = 4


class ReplicaMachine(RuleBasedStateMachine):
    """Loads, ticks and the ends of replicas in any order. `make` makes the machine under test."""

    make = ReplicaSet

    @initialize(low=st.integers(0, 3), extra=st.integers(0, 3))
    def begin(self, low, extra):
        self.rules = ScalingRules(low, max(low + extra, 1), TARGET_S, UP_AFTER_S, DOWN_AFTER_S)
        self.set = self.make(self.rules, itertools.count(1))
        self.now_s = 0.0
        self.load = ModelLoad()
        self.history = []  # (time, load, whether a replica was up, whether one was starting)
        self.was_up, self.is_drained = set(), set()
        self.launched, self.draining, self.ending = set(), set(), set()
        self.changed_at = {1: -1000.0, -1: -1000.0}

    # The load ----------------------------------------------------------------------------------------

    @rule(waiting=st.integers(0, 3), wait_s=st.sampled_from([0.0, 1.0, 5.0, 6.0, 60.0]))
    def change_load(self, waiting, wait_s):
        self.load = self.load._replace(waiting=waiting, wait_s=wait_s)

    @rule(data=st.data())
    def change_busy(self, data):
        up = self.set.numbers("up")
        busy = {number: data.draw(st.integers(0, SEATS)) for number in up}
        self.load = self.load._replace(busy=busy)

    @rule(past_s=st.sampled_from([0.5, 1.0, 3.0, 10.0]), ticks=st.integers(1, 8))
    def tick(self, past_s, ticks):
        for _ in range(ticks):
            self.now_s += past_s
            self._tick()

    def _tick(self):
        up, starting = self.set.numbers("up"), self.set.numbers("starting")
        load = self.load._replace(seats=dict.fromkeys(up, SEATS))
        before, running = self.set.wanted, len(up) + len(starting)
        self.history.append((self.now_s, load, bool(up), bool(starting)))
        orders = self.set.tick(self.now_s, load)
        change = self.set.wanted - before
        assert abs(change) <= 1
        if change:
            self._check_change(change, before)
        launches = [order.number for order in orders if isinstance(order, LaunchReplica)]
        assert len(launches) <= max(self.set.wanted - running, 0)
        self._note(orders)

    def _check_change(self, change, before):
        held_s = UP_AFTER_S if change > 0 else DOWN_AFTER_S
        if before or change < 0:
            assert self.now_s - self.changed_at[change] >= held_s
        self.changed_at[change] = self.now_s
        began_s = self.now_s - held_s
        recent = [entry for entry in self.history if entry[0] > began_s]
        for _, load, was_up, was_starting in recent if before or change < 0 else recent[-1:]:
            if change > 0:
                assert not was_starting
                assert load.wait_s > TARGET_S if was_up else load.waiting
            else:
                assert not load.waiting

    def _note(self, orders):
        for order in orders:
            match order:
                case LaunchReplica(number):
                    self.launched.add(number)
                case DrainReplica(number):
                    assert number in self.was_up
                    self.draining.add(number)
                case EndReplica(number):
                    # Drained first, unless it never had a job.
                    assert number not in self.was_up or number in self.is_drained
                    self.ending.add(number)

    # What happens to replicas ------------------------------------------------------------------------

    @precondition(lambda self: self.launched - self.was_up)
    @rule(data=st.data())
    def come_up(self, data):
        number = data.draw(st.sampled_from(sorted(self.launched - self.was_up)))
        self.set.came_up(number, self.now_s)
        if self.set.state(number) == "up":
            self.was_up.add(number)

    @precondition(lambda self: self.draining)
    @rule(data=st.data())
    def finish_draining(self, data):
        number = data.draw(st.sampled_from(sorted(self.draining)))
        self.draining.discard(number)
        self.is_drained.add(number)
        self._note(self.set.drained(number))

    @precondition(lambda self: self.launched)
    @rule(data=st.data())
    def end(self, data):
        """A replica ends: because it was ordered to, or because its machine is lost."""
        number = data.draw(st.sampled_from(sorted(self.ending) or sorted(self.launched)))
        self.set.ended(number, self.now_s)
        for group in (self.launched, self.draining, self.ending):
            group.discard(number)

    @precondition(lambda self: self.set.numbers("up"))
    @rule(data=st.data())
    def remove_node(self, data):
        """An operator removes the node of a replica."""
        number = data.draw(st.sampled_from(self.set.numbers("up")))
        self.is_drained.add(number)
        self._note(self.set.drained(number))

    # Rules -------------------------------------------------------------------------------------------

    @invariant()
    def number_is_within_its_bounds(self):
        if hasattr(self, "set"):
            assert self.rules.min <= self.set.wanted <= self.rules.max
            assert len(self.set) == len(self.launched) <= self.rules.max

    def teardown(self):
        """What is ordered happens, and nothing else: then all that are wanted are up."""
        if not hasattr(self, "set"):
            return
        self.load = ModelLoad()
        for _ in range(12):
            for number in sorted(self.draining):
                self.finish_draining_of(number)
            for number in sorted(self.ending):
                self.end_of(number)
            self.now_s += 10.0
            self._tick()
            for number in sorted(self.launched - self.ending - self.was_up):
                self.set.came_up(number, self.now_s)
                self.was_up.add(number)
        for number in sorted(self.draining):
            self.finish_draining_of(number)
        for number in sorted(self.ending):
            self.end_of(number)
        assert len(self.set.numbers("up")) == len(self.set) == self.set.wanted

    def finish_draining_of(self, number):
        self.draining.discard(number)
        self.is_drained.add(number)
        self._note(self.set.drained(number))

    def end_of(self, number):
        self.set.ended(number, self.now_s)
        for group in (self.launched, self.draining, self.ending):
            group.discard(number)
