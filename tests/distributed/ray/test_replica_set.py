"""The number of replicas: its bounds, its damping, and what becomes of replicas that end."""

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from distributed.ray.replica_machine import ReplicaMachine
from fairlead.distributed.ray import replica_set
from fairlead.distributed.ray.replica_set import (
    DrainReplica,
    EndReplica,
    LaunchReplica,
    ModelLoad,
    ReplicaSet,
    ScalingRules,
)
from first_failure import until_first_failure

RULES = ScalingRules(min=1, max=3, target_wait_s=5.0, up_after_s=10.0, down_after_s=60.0)
BUSY = ModelLoad(waiting=4, wait_s=20.0)

ReplicaMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestReplicaMachine = ReplicaMachine.TestCase


def make(rules=RULES):
    return ReplicaSet(rules, itertools.count(1))


def started(rules=RULES, *, up=1):
    replicas = make(rules._replace(min=up))
    for order in replicas.tick(0.0, ModelLoad()):
        replicas.came_up(order.number, 0.0)
    replicas.rules = rules
    return replicas


def ticks(replicas, load, *, begin_s, seconds):
    return [order for second in range(seconds + 1) for order in replicas.tick(begin_s + second, load)]


def test_minimum_is_started_at_once():
    assert make(RULES._replace(min=2)).tick(0.0, ModelLoad()) == [LaunchReplica(1), LaunchReplica(2)]


def test_long_wait_starts_one_replica_after_the_time_and_no_other_before_it_is_up():
    replicas = started()
    assert ticks(replicas, BUSY, begin_s=1.0, seconds=9) == []
    assert replicas.tick(11.0, BUSY) == [LaunchReplica(2)]
    assert ticks(replicas, BUSY, begin_s=12.0, seconds=100) == []
    replicas.came_up(2, 112.0)
    assert ticks(replicas, BUSY, begin_s=113.0, seconds=10) == [LaunchReplica(3)]
    replicas.came_up(3, 124.0)
    assert ticks(replicas, BUSY, begin_s=125.0, seconds=100) == []


def test_interrupted_wait_begins_again():
    replicas = started()
    ticks(replicas, BUSY, begin_s=1.0, seconds=9)
    replicas.tick(10.5, ModelLoad())
    assert ticks(replicas, BUSY, begin_s=11.0, seconds=9) == []


def test_idle_replica_is_drained_and_then_ended():
    replicas = started(up=2)
    load = ModelLoad(busy={1: 1}, seats={1: 4, 2: 4})
    assert ticks(replicas, load, begin_s=1.0, seconds=60) == [DrainReplica(2)]
    assert replicas.drained(2) == [EndReplica(2)]
    replicas.ended(2, 70.0)
    assert ticks(replicas, load, begin_s=71.0, seconds=100) == []


def test_replica_whose_jobs_would_nearly_fill_the_others_stays():
    replicas = started(up=2)
    load = ModelLoad(busy={1: 2, 2: 1}, seats={1: 4, 2: 4})  # 3 of the 4 seats that would be left
    assert ticks(replicas, load, begin_s=1.0, seconds=300) == []


def test_without_a_minimum_the_first_job_starts_a_replica_and_an_idle_one_ends():
    replicas = make(RULES._replace(min=0))
    assert replicas.tick(0.0, ModelLoad(wait_s=30.0)) == []
    assert replicas.tick(1.0, ModelLoad(waiting=1)) == [LaunchReplica(1)]
    replicas.came_up(1, 2.0)
    assert ticks(replicas, ModelLoad(seats={1: 4}), begin_s=3.0, seconds=60) == [DrainReplica(1)]


def test_lost_replica_is_replaced_at_once_after_a_steady_run():
    replicas = started()
    replicas.ended(1, replica_set.STEADY_S)
    assert replicas.tick(replica_set.STEADY_S, ModelLoad()) == [LaunchReplica(2)]


def test_replicas_that_cannot_start_are_started_less_and_less_often():
    replicas, launched_at = make(), []
    for second in range(400):
        for order in replicas.tick(float(second), ModelLoad()):
            launched_at.append(second)
            replicas.ended(order.number, float(second))
    pauses = [later - earlier for earlier, later in itertools.pairwise(launched_at)]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60]


def test_lower_maximum_drains_what_is_too_much():
    replicas = started(up=3)
    replicas.rules = RULES._replace(max=1)
    assert replicas.tick(1.0, ModelLoad()) == [DrainReplica(3), DrainReplica(2)]


def test_adopted_replicas_count_as_wanted():
    replicas = make()
    for number in (7, 8):
        replicas.adopt(number)
        replicas.came_up(number, 0.0)
    assert replicas.tick(1.0, ModelLoad(busy={7: 4, 8: 4}, seats={7: 4, 8: 4})) == []
    assert replicas.wanted == 2


def settle(replicas, *, jobs, seats, seconds=800):
    """Run so many jobs at all times; return the wanted numbers, without repetitions."""
    wanted = [replicas.wanted]
    for second in range(seconds):
        up = replicas.numbers("up")
        busy = {number: jobs // len(up) + (index < jobs % len(up)) for index, number in enumerate(up)}
        busy = {number: min(count, seats) for number, count in busy.items()}
        is_full = jobs >= seats * len(up)
        load = ModelLoad(max(0, jobs - seats * len(up)), 20.0 * is_full, busy, dict.fromkeys(up, seats))
        for order in replicas.tick(float(second), load):
            match order:
                case LaunchReplica(number):
                    replicas.came_up(number, float(second))
                case DrainReplica(number):
                    replicas.drained(number)
                    replicas.ended(number, float(second))
        if replicas.wanted != wanted[-1]:
            wanted.append(replicas.wanted)
    return wanted


@given(
    jobs=st.integers(0, 40),
    seats=st.integers(1, 8),
    low=st.integers(0, 2),
    first=st.integers(1, 6),
    last=st.integers(2, 6),
)
def test_number_settles_at_a_constant_load(jobs, seats, low, first, last):
    replicas = started(RULES._replace(min=low, max=last), up=min(first, last))
    wanted = settle(replicas, jobs=jobs, seats=seats)
    assert wanted in (sorted(wanted), sorted(wanted, reverse=True))
    assert wanted[-1] == last or jobs < seats * wanted[-1] or not jobs


# Mutants -------------------------------------------------------------------------------------------


class WithoutDraining(ReplicaSet):
    def _retire(self, number):
        self._replicas[number].state = "ending"
        return EndReplica(number)


class WithoutMaximum(ReplicaSet):
    def _bounded(self, wanted):
        return max(wanted, self.rules.min)

    def tick(self, now_s, load):
        self.rules = self.rules._replace(max=9)
        return super().tick(now_s, load)


class WithoutMinimum(ReplicaSet):
    def _scale(self, now_s, load):
        self.rules, rules = self.rules._replace(min=0), self.rules
        super()._scale(now_s, load)
        self.rules = rules


class WithoutPatience(ReplicaSet):
    def __init__(self, rules, numbers):
        super().__init__(rules._replace(up_after_s=0.0), numbers)


class Impatient(ReplicaSet):
    def __init__(self, rules, numbers):
        super().__init__(rules._replace(down_after_s=5.0), numbers)


class WithoutReplacement(ReplicaSet):
    def ended(self, number, now_s):
        super().ended(number, now_s)
        self._retry_at_s = float("inf")


class Forgetful(ReplicaSet):
    """Counts a replica that drains as gone."""

    def tick(self, now_s, load):
        kept = {number: self._replicas.pop(number) for number in self.numbers("draining", "ending")}
        orders = super().tick(now_s, load)
        self._replicas = kept | self._replicas
        return orders


@pytest.mark.parametrize(
    "mutant",
    [
        WithoutDraining,
        WithoutMaximum,
        WithoutMinimum,
        WithoutPatience,
        Impatient,
        WithoutReplacement,
        Forgetful,
    ],
    ids=lambda mutant: mutant.__name__,
)
def test_machine_catches_the_mistake(mutant):
    machine = type("Machine", (ReplicaMachine,), {"make": mutant})
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        run_state_machine_as_test(
            machine,
            settings=until_first_failure(
                settings(stateful_step_count=40, suppress_health_check=list(HealthCheck)), max_examples=2000
            ),
        )


def test_constant_load_catches_a_missing_hysteresis(monkeypatch):
    monkeypatch.setattr(replica_set, "FULL_ENOUGH", 1.0)
    wanted = settle(started(), jobs=4, seats=4)
    assert wanted[:4] == [1, 2, 1, 2]
