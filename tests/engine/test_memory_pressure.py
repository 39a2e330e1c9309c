"""A smaller version of `bench/admission.py`, in simulated time: results are the same on every machine."""

from functools import cache

import pytest

from simulation.memory_pressure import Figures, Now, Oracle, WorstCase, simulate

SEEDS = (1, 2)


@cache
def figures(rule: type | None) -> list[Figures]:
    return [simulate(seed, rule, steps=2000) for seed in SEEDS]


def tokens_per_s(rule: type | None) -> float:
    return sum(run.tokens_per_s for run in figures(rule))


def test_throughput_is_at_least_95_percent_of_an_oracles():
    assert tokens_per_s(None) >= 0.95 * tokens_per_s(Oracle)


def test_preemptions_and_recomputed_tokens_are_few():
    for run in figures(None):
        assert run.preemptions <= 25
        assert run.recomputed <= 0.015


def test_oracle_never_preempts():
    assert [0.0] * len(SEEDS) == [run.preemptions for run in figures(Oracle)]


def test_reserving_the_worst_case_loses_throughput_and_reserving_nothing_causes_preemptions():
    assert tokens_per_s(WorstCase) < 0.6 * tokens_per_s(None)
    assert all(run.preemptions > 100 for run in figures(Now))


WINDOWS = [(512,), (None, 512)]


@pytest.mark.parametrize("windows", WINDOWS)
def test_blocks_that_slid_out_of_a_window_delay_and_preempt_nobody(windows):
    """They can be evicted, so with other contents in each prompt everything is as without a prefix cache."""
    runs = [simulate(1, steps=600, windows=windows, prefix_cache=cached) for cached in (False, True)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("windows", WINDOWS)
def test_shared_beginning_longer_than_the_window_raises_throughput(windows):
    runs = [
        simulate(1, steps=600, windows=windows, shared=900, prefix_cache=cached) for cached in (False, True)
    ]
    assert runs[1].tokens_per_s > 1.2 * runs[0].tokens_per_s
    assert runs[1].preemptions <= runs[0].preemptions
