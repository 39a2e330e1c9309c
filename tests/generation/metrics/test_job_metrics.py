"""Totals over jobs: each counts once, with its times; the number of names is bounded."""

import msgspec
import pytest

from fairlead.generation.metrics.job_metrics import OTHER, DurationHistogram, JobMetrics
from fairlead.generation.timeline import LEFT, SUCCESS, RequestTimeline
from fake_nodes import job


def timeline(
    tenant: str = "A",
    *,
    outcome: str = SUCCESS,
    granted_s: float | None = 1.0,
    first_delta_s: float | None = 3.0,
    ended_s: float | None = 7.0,
    tokens: int = 5,
    n: int = 1,
    attempts: int = 1,
    finish_reasons: tuple[str, ...] = ("stop",),
) -> RequestTimeline:
    """Return the timeline of a job that waited 1 s; its first token came after 3 s and its last after 7 s."""
    finished = RequestTimeline(job(tenant, n=n), arrived_s=0.0, began_at_ns=0)
    finished.granted_s, finished.first_delta_s, finished.ended_s = granted_s, first_delta_s, ended_s
    finished.tokens, finished.attempts, finished.finish_reasons = tokens, attempts, finish_reasons
    finished.outcome, finished.node = outcome, "node"
    return finished


def test_value_on_a_bound_counts_below_it():
    histogram = DurationHistogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.add(value)
    counted = histogram.statistics()
    assert counted.counts == (2, 2, 1)
    assert (counted.count, counted.total) == (5, 7.5)


def test_complete_answer_is_in_each_histogram():
    metrics = JobMetrics()
    metrics.add(timeline())
    durations = metrics.statistics().models["m"].durations
    totals = {name: getattr(durations, name).total for name in durations.__struct_fields__}
    expected = {"queue": 1.0, "first_token": 3.0, "prefill": 2.0, "decode": 4.0, "end_to_end": 7.0}
    assert expected | {"token_gap": 4.0} == totals
    assert durations.token_gap.count == 4  # five tokens have four gaps, of one second each


def test_gaps_between_tokens_are_measured_in_each_choice():
    metrics = JobMetrics()
    metrics.add(timeline(n=2, tokens=10))
    gaps = metrics.statistics().models["m"].durations.token_gap
    assert (gaps.count, gaps.total) == (8, 8.0)  # two choices of five tokens in the same four seconds


def test_job_without_a_seat_is_in_no_histogram_and_has_no_prompt_tokens():
    metrics = JobMetrics()
    metrics.add(timeline(outcome="queue_full", granted_s=None, first_delta_s=None, tokens=0))
    model = metrics.statistics().models["m"]
    assert model.outcomes == {"queue_full": 1}
    assert sum(getattr(model.durations, name).count for name in model.durations.__struct_fields__) == 0
    assert (model.prompt_tokens, model.finish_reasons) == (0, {})


def test_failed_answer_counts_tokens_and_first_token_but_no_duration():
    metrics = JobMetrics()
    metrics.add(timeline(outcome="node_failed", tokens=3))
    metrics.add(timeline(outcome=LEFT, tokens=2))
    model = metrics.statistics().models["m"]
    assert (model.durations.first_token.count, model.durations.end_to_end.count) == (2, 0)
    assert (model.prompt_tokens, model.generated_tokens) == (6, 5)
    assert model.finish_reasons == {"abort": 1}


def test_answer_counts_as_truncated_if_any_choice_is():
    metrics = JobMetrics()
    metrics.add(timeline(n=2, finish_reasons=("stop", "length")))
    metrics.add(timeline(n=2, finish_reasons=("stop", "stop")))
    assert metrics.statistics().models["m"].finish_reasons == {"length": 1, "stop": 1}


def test_unfinished_jobs_count_as_waiting_or_running_with_their_tokens():
    metrics = JobMetrics()
    metrics.add(timeline())
    waiting = timeline(granted_s=None, first_delta_s=None, ended_s=None, tokens=0)
    running = timeline(ended_s=None, tokens=2)
    model = metrics.statistics([waiting, running]).models["m"]
    assert (model.waiting, model.running) == (1, 1)
    assert (model.prompt_tokens, model.generated_tokens) == (6, 7)
    assert model.outcomes == {SUCCESS: 1}


def test_token_count_never_decreases_when_an_answer_is_restarted():
    metrics = JobMetrics()
    running = timeline(ended_s=None, tokens=9)
    assert metrics.statistics([running]).models["m"].generated_tokens == 9
    running.tokens = 0
    assert metrics.statistics([running]).models["m"].generated_tokens == 9
    running.tokens = 12
    assert metrics.statistics([running]).models["m"].generated_tokens == 12
    metrics.add(running)
    assert metrics.statistics().models["m"].generated_tokens == 12


def test_tenants_beyond_a_thousand_share_one_name():
    metrics = JobMetrics()
    for number in range(5000):
        metrics.add(timeline(f"tenant {number}"))
    metrics.add(timeline("tenant 3"))
    tenants = metrics.statistics().tenants
    assert len(tenants) == 1001
    assert (tenants[OTHER].jobs, tenants["tenant 999"].jobs, tenants["tenant 3"].jobs) == (4000, 1, 2)
    assert sum(tenant.jobs for tenant in tenants.values()) == 5001


@pytest.mark.parametrize("are_running", [False, True])
def test_names_of_models_are_bounded_with_running_jobs(are_running):
    metrics = JobMetrics(labels_at_most=2)
    timelines = []
    for name in ("a", "b", "c", "d"):
        finished = timeline(ended_s=None if are_running else 7.0)
        finished.job = msgspec.structs.replace(finished.job, model=name)
        timelines.append(finished)
    if not are_running:
        for finished in timelines:
            metrics.add(finished)
    models = metrics.statistics(timelines if are_running else ()).models
    assert {name: each.generated_tokens for name, each in models.items()} == {"a": 5, "b": 5, OTHER: 10}


def test_attempts_beyond_the_first_are_retries():
    metrics = JobMetrics()
    metrics.add(timeline(attempts=2))
    metrics.add(timeline(attempts=0, outcome=LEFT, granted_s=None, first_delta_s=None))
    assert metrics.statistics().models["m"].retries == 1
