"""The quantile estimate: a simulation of the jobs ahead, corrected by past errors."""

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.router.dispatch.estimates import (
    ENOUGH_ERRORS,
    JobSize,
    QuantileEstimate,
    QuantilePrediction,
    RunningJob,
)

SIZES = st.builds(JobSize, st.integers(1, 5000), st.floats(0, 2000))
RUNNING = st.builds(RunningJob, SIZES, st.floats(0, 1000), st.integers(0, 3000))
FINISHED = st.lists(st.tuples(SIZES, st.floats(0, 1000)), max_size=10)
# Scale how much longer than predicted the waits were that were one, two, … rounds away.
FACTORS = st.lists(st.floats(0.01, 100), max_size=5)


def estimate(finished=(), factors=()) -> QuantileEstimate:
    made = QuantileEstimate()
    for size, service_s in finished:
        made.finished(size, service_s)
    for rounds, factor in enumerate(factors, 1):
        for number in range(2 * ENOUGH_ERRORS):
            made.granted(QuantilePrediction(0.0, 0.0, 10.0, rounds), factor * number)
    return made


def trained_estimator(*, prompt_s: float = 0.001, output_s: float = 0.1) -> QuantileEstimate:
    """Return an estimate that has seen jobs with these seconds per token."""
    sizes = [JobSize(prompt, output) for prompt in (100, 200, 1000) for output in (10.0, 50.0)]
    return estimate([(size, prompt_s * size.prompt_tokens + output_s * size.output_tokens) for size in sizes])


def test_estimate_learns_the_time_of_prompt_and_output_tokens():
    job = RunningJob(JobSize(1000, 50.0), running_s=0.0)
    assert pytest.approx(trained_estimator().predict(ahead=[], running=[job], seats=1).wait_s) == 6.0


def test_job_that_generates_has_no_prompt_time_left():
    job = RunningJob(JobSize(1000, 50.0), running_s=3.0, tokens_so_far=20)
    assert pytest.approx(trained_estimator().predict(ahead=[], running=[job], seats=1).wait_s) == 3.0


def test_time_spent_on_the_prompt_shortens_the_rest_of_the_job():
    job = RunningJob(JobSize(1000, 50.0), running_s=0.4)
    assert pytest.approx(trained_estimator().predict(ahead=[], running=[job], seats=1).wait_s) == 5.6


def test_jobs_ahead_take_the_seats_in_turn():
    running = [RunningJob(JobSize(0, tokens), running_s=1.0, tokens_so_far=1) for tokens in (11.0, 31.0)]
    ahead = [JobSize(0, 50.0), JobSize(0, 10.0)]  # 1.0 to 6.0 on the first seat, 3.0 to 4.0 on the second
    predicted = [
        trained_estimator().predict(ahead=ahead[:count], running=running, seats=2) for count in range(3)
    ]
    assert pytest.approx([prediction.wait_s for prediction in predicted]) == [1.0, 3.0, 4.0]


def test_job_behind_short_ones_does_not_wait_for_the_longest_that_runs():
    running = [RunningJob(JobSize(0, tokens), running_s=1.0, tokens_so_far=1) for tokens in (11.0, 1001.0)]
    predicted = trained_estimator().predict(ahead=[JobSize(0, 10.0)], running=running, seats=2)
    assert pytest.approx(predicted.wait_s) == 2.0


def test_correction_goes_over_from_one_class_of_rounds_to_the_next():
    """Past waits within a round were as predicted, and those of the next ones three times as long."""
    made = trained_estimator()
    for rounds, factor in ((1, 1.0), (2, 3.0)):
        for _ in range(2 * ENOUGH_ERRORS):
            made.granted(QuantilePrediction(0.0, 0.0, 10.0, rounds), 10.0 * factor)
    running = [RunningJob(JobSize(0, 101.0), running_s=1.0, tokens_so_far=1)] * 8
    ahead = [JobSize(0, 100.0)] * 32
    scales = []
    for count in range(len(ahead)):
        predicted = made.predict(ahead=ahead[:count], running=running, seats=8)
        scales.append(predicted.wait_s / predicted.work_s)
    assert scales[0] == pytest.approx(1.0, abs=0.01)
    assert scales[20:24] == pytest.approx([3.0] * 4, abs=0.1)
    assert all(-0.05 < further - nearer < 0.35 for nearer, further in pairwise(scales[:24]))


def test_if_prompts_and_answers_grow_together_the_time_is_attributed_to_the_answers():
    made = estimate([(JobSize(10 * tokens, tokens), 0.1 * tokens) for tokens in (10, 20, 30)])
    job = RunningJob(JobSize(1, 20.0), running_s=0.0)
    assert pytest.approx(made.predict(ahead=[], running=[job], seats=1).wait_s) == 2.0


def test_before_any_job_has_finished_the_age_of_the_oldest_running_one_is_used():
    running = [RunningJob(JobSize(9, 9.0), running_s=4.0), RunningJob(JobSize(9, 9.0), running_s=1.0)]
    predicted = QuantileEstimate().predict(ahead=[JobSize(9, 9.0)], running=running, seats=2)
    assert pytest.approx(predicted.wait_s) == 4.0


def test_until_errors_are_known_the_p90_is_about_twice_the_wait():
    job = RunningJob(JobSize(0, 101.0), running_s=1.0, tokens_so_far=1)
    predicted = trained_estimator().predict(ahead=[], running=[job], seats=1)
    assert pytest.approx((predicted.wait_s, predicted.p90_s)) == (10.0, 20.25)


def test_past_errors_correct_the_estimate():
    made = trained_estimator()
    job = RunningJob(JobSize(0, 101.0), running_s=1.0, tokens_so_far=1)
    random = Random(1)
    for _ in range(1000):  # the actual wait is three times as long, within a factor of two
        predicted = made.predict(ahead=[], running=[job], seats=1)
        made.granted(predicted, 30.0 * 2.0 ** random.uniform(-1, 1))
    predicted = made.predict(ahead=[], running=[job], seats=1)
    assert pytest.approx(predicted.wait_s, rel=0.1) == 30.0
    assert pytest.approx(predicted.p90_s, rel=0.1) == 30.0 * 2.0**0.8


def test_job_that_did_not_wait_does_not_change_the_estimate():
    made = trained_estimator()
    free = made.predict(ahead=[], running=[], seats=1)
    for _ in range(100):
        made.granted(free, 50.0)
    job = RunningJob(JobSize(0, 101.0), running_s=1.0, tokens_so_far=1)
    assert pytest.approx(made.predict(ahead=[], running=[job], seats=1).wait_s) == 10.0


def test_first_jobs_to_end_after_a_node_is_removed_free_no_seat():
    running = [
        RunningJob(JobSize(0, tokens), running_s=1.0, tokens_so_far=1) for tokens in (11.0, 31.0, 51.0)
    ]
    assert pytest.approx(trained_estimator().predict(ahead=[], running=running, seats=2).wait_s) == 3.0


@given(FINISHED, FACTORS, st.lists(RUNNING, max_size=5), st.integers(0, 3), st.lists(SIZES, max_size=5))
def test_with_a_free_seat_the_wait_is_zero(finished, factors, running, more_free, ahead):
    seats = len(running) + len(ahead) + 1 + more_free
    predicted = estimate(finished, factors).predict(ahead=ahead, running=running, seats=seats)
    assert (predicted.wait_s, predicted.p90_s) == (0.0, 0.0)


@given(
    finished=FINISHED,
    factors=FACTORS,
    running=st.lists(RUNNING, max_size=5),
    seats=st.integers(0, 6),
    ahead=st.lists(SIZES, max_size=40),
)
def test_wait_is_never_negative_and_never_shorter_further_back(finished, factors, running, seats, ahead):
    made = estimate(finished, factors)
    predicted = [
        made.predict(ahead=ahead[:count], running=running, seats=seats) for count in range(len(ahead) + 1)
    ]
    for nearer, further in pairwise(predicted):
        assert 0.0 <= nearer.wait_s <= further.wait_s
        assert nearer.p90_s <= further.p90_s
    assert all(each.wait_s <= each.p90_s for each in predicted)


def test_corrected_estimate_is_never_before_a_running_job_ends():
    estimate = QuantileEstimate()
    estimate.finished(JobSize(0, 100), 10.0)
    for _ in range(100):  # past waits were far shorter than predicted
        estimate.granted(QuantilePrediction(100.0, 100.0, 100.0, 1), 1.0)
    running = [RunningJob(JobSize(0, 100), running_s=3.0, tokens_so_far=30)]
    assert estimate.predict(ahead=[], running=running, seats=1).wait_s == pytest.approx(7.0)
