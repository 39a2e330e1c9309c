"""A smaller version of bench/admission.py: counts and simulated time, the same on every machine."""

from functools import cache

from simulation.memory_pressure import Figures, Now, Oracle, WorstCase, simulate

SEEDS = (1, 2)


@cache
def figures(rule: type | None) -> list[Figures]:
    return [simulate(seed, rule, steps=2000) for seed in SEEDS]


def tokens_per_s(rule: type | None) -> float:
    return sum(run.tokens_per_s for run in figures(rule))


def test_throughput_comes_near_to_that_of_an_oracle():
    assert tokens_per_s(None) >= 0.95 * tokens_per_s(Oracle)


def test_few_are_preempted_and_little_is_computed_twice():
    for run in figures(None):
        assert run.preemptions <= 25
        assert run.recomputed <= 0.015


def test_the_oracle_preempts_nobody():
    assert [0.0] * len(SEEDS) == [run.preemptions for run in figures(Oracle)]


def test_reserving_the_worst_case_costs_half_of_the_throughput_and_reserving_nothing_much_work_twice():
    assert tokens_per_s(WorstCase) < 0.6 * tokens_per_s(None)
    assert all(run.preemptions > 100 for run in figures(Now))
