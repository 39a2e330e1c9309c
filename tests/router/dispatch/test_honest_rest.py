"""What runs has a rest that follows from its age: also beyond all history, and without tokens."""

from random import Random
from statistics import median

import pytest
import trio

from fairlead.router.dispatch.estimates import JobSize, MeanEstimate, QuantileEstimate, RunningJob
from router.dispatch.recorded import job
from router.dispatch.test_wait_estimator import end_job, estimator, submit_job

SHORT_S = 0.5
LONG_S = 14.0


def test_job_older_than_all_others_runs_as_long_again():
    estimate = MeanEstimate()
    for service_s in (1.0, 2.0, 3.0):
        estimate.finished(service_s)
    assert [estimate.rest_s(age_s) for age_s in (0.0, 2.0, 2.5, 3.0, 8.0)] == [2.0, 1.0, 0.5, 3.0, 8.0]
    assert estimate.wait_s(ahead=0, seats=1, running_s=[6.5]) == 7


def test_job_that_shows_no_token_after_its_time_is_late_by_as_much_again():
    estimate = QuantileEstimate()
    for tokens in (10, 20, 30) * 10:
        estimate.finished(JobSize(tokens, tokens), 0.1 * tokens)
    size = JobSize(20, 20)
    rests = [estimate.remaining_s(RunningJob(size, age_s)) for age_s in (0.0, 1.0, 2.0, 6.0)]
    assert rests == sorted(rests)
    assert rests[0] == pytest.approx(2.0)
    assert rests[-1] == pytest.approx(6.0)


def test_rule_of_doubling_is_right_half_of_the_time_whatever_the_scale():
    """A duration of unknown scale is as likely to end before twice its age as after it."""
    chance = Random(0)
    ends = []
    for _ in range(4000):
        whole_s = 10 ** chance.uniform(-3, 3)
        age_s = whole_s * chance.random()  # seen at any moment
        ends.append(whole_s - age_s <= MeanEstimate().rest_s(age_s))
    assert 0.47 < sum(ends) / len(ends) < 0.53


@pytest.mark.parametrize("estimate", ["mean", "quantile"])
@pytest.mark.parametrize("reports_tokens", [True, False])
async def test_wait_behind_a_job_longer_than_all_history_is_promised_honestly(
    autojump_clock, estimate, reports_tokens
):
    """Whenever one arrives behind it, the promise is in the order of the wait: it was 1 s."""
    subject, to = estimator(estimate=estimate)

    def begin(waiter):
        began = trio.current_time()
        waiter.count_generated = lambda: int(20 * (trio.current_time() - began)) if reports_tokens else 0
        to.first_delta(waiter.ticket)
        return waiter

    for _ in range(40):
        short = begin(submit_job(subject, to, job(max_tokens=400).job))
        await trio.sleep(SHORT_S)
        end_job(subject, to, short)
    long = begin(submit_job(subject, to, job(max_tokens=400).job))
    ratios = []
    for _ in range(12):
        await trio.sleep(LONG_S / 14)
        promised_s = subject.for_newcomer("m", "B", 1).estimated_wait_s
        assert promised_s is not None
        left_s = LONG_S - (trio.current_time() - began_at(subject, long))
        ratios.append(promised_s / left_s)
    assert 0.5 <= median(ratios) <= 2.0, ratios
    end_job(subject, to, long)


def began_at(subject, waiter):
    return next(entry[0] for run, entry in subject._running.items() if run.ticket is waiter.ticket)


async def test_jobs_ahead_of_a_node_without_tokens_take_as_long_as_those_before(autojump_clock):
    subject, to = estimator(estimate="quantile")
    for _ in range(5):
        served = submit_job(subject, to, job(prompt=90).job)
        to.first_delta(served.ticket)
        await trio.sleep(4.0)
        end_job(subject, to, served)
    for _ in range(4):
        submit_job(subject, to, job(prompt=5).job)
    await trio.sleep(1.0)
    assert subject.for_newcomer("m", "A", 1).estimated_wait_s == 3 + 3 * 4
