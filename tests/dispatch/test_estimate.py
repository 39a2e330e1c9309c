"""The mean estimate, and when a refused client should come back."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.dispatch.estimate import KEPT_JOBS, MeanEstimate, retry_after_s


def test_three_waiting_jobs_of_ten_seconds_and_one_seat_make_thirty():
    estimate = MeanEstimate()
    for _ in range(5):
        estimate.finished(10.0)
    assert 30 == estimate.wait_s(ahead=3, seats=1, oldest_running_s=0.0)


def test_two_seats_halve_it():
    estimate = MeanEstimate()
    estimate.finished(10.0)
    assert 15 == estimate.wait_s(ahead=3, seats=2, oldest_running_s=0.0)


def test_only_the_last_hundred_jobs_count():
    estimate = MeanEstimate()
    estimate.finished(1000.0)
    for _ in range(KEPT_JOBS):
        estimate.finished(2.0)
    assert 2.0 == estimate.mean_service_s


def test_before_any_job_has_finished_the_oldest_running_one_stands_in():
    assert 12 == MeanEstimate().wait_s(ahead=3, seats=1, oldest_running_s=4.0)


@pytest.mark.parametrize("seats", [0, 1])
def test_with_nothing_known_it_is_zero(seats):
    assert 0 == MeanEstimate().wait_s(ahead=3, seats=seats, oldest_running_s=0.0)


@given(estimated=st.integers(0, 10_000), seed=st.integers())
def test_retry_after_is_a_whole_number_from_one_to_sixty(estimated, seed):
    seconds = retry_after_s(estimated, Random(seed))
    assert isinstance(seconds, int)
    assert 1 <= seconds <= 60


def test_retry_after_spreads_over_the_upper_half_of_the_estimate():
    random = Random(1)
    seconds = [retry_after_s(40, random) for _ in range(1000)]
    assert (21, 40) == (min(seconds), max(seconds))
