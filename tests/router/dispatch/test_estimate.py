"""The mean estimate, and when a refused client should retry."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.router.dispatch.estimates import KEPT_JOBS, MeanEstimate, retry_after_s


def test_three_waiting_jobs_of_ten_seconds_and_one_seat_make_thirty():
    estimate = MeanEstimate()
    for _ in range(5):
        estimate.finished(10.0)
    assert estimate.wait_s(ahead=3, seats=1, running_s=[0.0]) == 30


def test_two_seats_halve_it():
    estimate = MeanEstimate()
    estimate.finished(10.0)
    assert estimate.wait_s(ahead=3, seats=2, running_s=[0.0]) == 15


def test_only_the_last_hundred_jobs_count():
    estimate = MeanEstimate()
    estimate.finished(1000.0)
    for _ in range(KEPT_JOBS):
        estimate.finished(2.0)
    assert estimate.mean_service_s == 2.0


def test_before_any_job_has_finished_the_age_of_the_oldest_running_one_is_used():
    assert MeanEstimate().wait_s(ahead=3, seats=1, running_s=[4.0]) == 12


@pytest.mark.parametrize("seats", [0, 1])
def test_without_any_measurement_the_wait_is_zero(seats):
    assert MeanEstimate().wait_s(ahead=3, seats=seats, running_s=[0.0]) == 0


@given(estimated=st.integers(0, 10_000), seed=st.integers())
def test_retry_after_is_a_whole_number_from_one_to_sixty(estimated, seed):
    seconds = retry_after_s(estimated, Random(seed))
    assert isinstance(seconds, int)
    assert 1 <= seconds <= 60


def test_retry_after_spreads_over_the_upper_half_of_the_estimate():
    random = Random(1)
    seconds = [retry_after_s(40, random) for _ in range(1000)]
    assert (min(seconds), max(seconds)) == (21, 40)


def test_first_in_line_waits_for_the_rest_of_the_running_job():
    estimate = MeanEstimate()
    estimate.finished(10.0)
    assert estimate.wait_s(ahead=0, seats=1, running_s=[3.0]) == 7


def test_each_job_in_line_waits_for_a_seat_of_its_own():
    estimate = MeanEstimate()
    estimate.finished(10.0)
    waits = [estimate.wait_s(ahead=ahead, seats=3, running_s=[9.0, 5.0, 1.0]) for ahead in range(4)]
    assert waits == [1, 5, 9, 10]


def test_job_older_than_the_mean_is_estimated_from_jobs_that_ran_even_longer():
    estimate = MeanEstimate()
    for service_s in (2.0, 2.0, 20.0):
        estimate.finished(service_s)
    assert estimate.wait_s(ahead=0, seats=1, running_s=[10.0]) == 10


def test_with_a_free_seat_the_wait_is_zero():
    estimate = MeanEstimate()
    estimate.finished(10.0)
    assert estimate.wait_s(ahead=0, seats=2, running_s=[1.0]) == 0


@given(
    services_s=st.lists(st.floats(0.1, 1000.0), min_size=1, max_size=20),
    running_s=st.lists(st.floats(0.0, 1000.0), min_size=1, max_size=8),
    ahead=st.integers(0, 20),
)
def test_estimate_is_never_below_the_rest_of_the_running_job(services_s, running_s, ahead):
    estimate = MeanEstimate()
    for service_s in services_s:
        estimate.finished(service_s)
    running_s.sort(reverse=True)
    age_s = running_s[min(ahead, len(running_s) - 1)]
    longer = [service_s for service_s in services_s if service_s > age_s]
    rest_s = sum(longer) / len(longer) - age_s if longer else 0.0
    assert estimate.wait_s(ahead=ahead, seats=len(running_s), running_s=running_s) >= rest_s - 1e-6
