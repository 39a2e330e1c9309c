"""Shares and times of the last minutes, hour and day: what counts in which window, and quantiles."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.generation.metrics.activity import (
    LINES_AT_MOST,
    TENANTS_AT_MOST,
    WINDOWS,
    Activity,
    Ring,
    Sketch,
)
from fairlead.generation.metrics.job_metrics import OTHER
from generation.metrics.board_values import ended, running, waiting

NOW = 100_000.0


@given(st.lists(st.floats(0.001, 10_000.0), min_size=1), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_quantile_is_right_to_5_percent(durations, part):
    sketch = Sketch()
    for seconds in durations:
        sketch.add(seconds)
    exact = sorted(durations)[max(0, -(-int(part * 1000) * len(durations) // 1000) - 1)]
    assert sketch.quantile(part) == pytest.approx(exact, rel=0.05)


def test_quantile_of_nothing_is_none():
    assert Sketch().quantile(0.5) is None


def test_seats_count_in_the_buckets_in_which_they_were_held():
    ring = Ring(600.0, 60)
    ring.add(ended(ended_at=63.0, took_s=6.0, wait_s=1.0, seats=2))  # from 58 to 63 s
    assert {index: bucket.seat_s["ana"] for index, bucket in ring.buckets(63.0)} == {5: 4.0, 6: 6.0}
    assert ring.seat_s(600.0, 63.0, []) == {"ana": 10.0}
    assert ring.seat_s(10.0, 70.0, []) == {"ana": 6.0}


def test_seats_of_running_requests_count_as_far_as_they_are_in_the_window():
    ring = Ring(600.0, 60)
    jobs = [running("ana", age_s=100.0, wait_s=20.0), running("ben", seats=3), waiting("carl")]
    assert ring.seat_s(60.0, NOW, jobs) == {"ana": 60.0, "ben": 12.0}
    assert ring.seat_s(600.0, NOW, jobs) == {"ana": 80.0, "ben": 12.0}


def test_old_requests_are_forgotten():
    ring = Ring(600.0, 60)
    ring.add(ended(ended_at=NOW))
    ring.add(ended("ben", ended_at=NOW - 601, took_s=1.0))
    ring.add(ended("carl", ended_at=NOW - 10_000))
    assert set(ring.seat_s(600.0, NOW, [])) == {"ana"}
    ring.add(ended("dora", ended_at=NOW + 700))
    assert set(ring.seat_s(600.0, NOW + 700, [])) == {"dora"}


def test_names_in_a_bucket_are_bounded():
    ring = Ring(600.0, 60)
    for number in range(TENANTS_AT_MOST + 10):
        ring.add(ended(f"t{number}", model=f"m{number}"))
    for _, bucket in ring.buckets(1000.0):
        assert len(bucket.seat_s) <= TENANTS_AT_MOST + 1
        assert len(bucket.times) <= LINES_AT_MOST + 1
    assert ring.seat_s(600.0, 1000.0, [])[OTHER] == pytest.approx(90.0)


@pytest.mark.parametrize("window", WINDOWS)
def test_timings_have_a_value_for_each_step(window):
    activity = Activity([ended(ended_at=NOW), ended(ended_at=NOW, priority=0, outcome="node_failed")])
    found = activity.timings(window, NOW)
    duration_s, count = WINDOWS[window]
    assert found.step_s * count == duration_s
    assert found.starts[-1] <= NOW < found.starts[-1] + found.step_s
    assert [series.priority for series in found.series] == [None, 0, 1]
    assert all(len(series.wait) == len(found.starts) == count for series in found.series)
    assert found.series[0].wait[-1].count == 2
    assert {name: counts[-1] for name, counts in found.outcomes.items()} == {"success": 1, "node_failed": 1}
    assert found.series[1].first_token[-1].p50 == pytest.approx(2.0, rel=0.05)
    assert found.series[0].first_token[0].p50 is None


def test_rows_are_of_all_models_and_of_each_that_the_caller_sees():
    activity = Activity([ended(model="a", first_token_s=1.0), ended(model="b", first_token_s=3.0)])
    rows = activity.timings("1h", 1000.0).rows
    assert {(row.model, row.priority): row.first_token.count for row in rows} == {
        ("", None): 2,
        ("", 1): 2,
        ("a", None): 1,
        ("a", 1): 1,
        ("b", None): 1,
        ("b", 1): 1,
    }
    seen = activity.timings("1h", 1000.0, frozenset({"a"})).rows
    assert {row.model for row in seen} == {"", "a"}


def test_request_without_tokens_has_only_a_wait():
    activity = Activity([ended(first_token_s=None, token_gap_s=None)])
    (row, _, _, _) = activity.timings("1h", 1000.0).rows
    assert (row.first_token.count, row.token_gap.count, row.wait.count) == (0, 0, 1)
