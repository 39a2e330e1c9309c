"""The fairness goals, on short runs of the benchmark's simulations: the real scheduler in virtual time."""

import json
from functools import cache
from pathlib import Path

import pytest

import fairness
from fairlead.base.config import QueueConfig
from simulation import contention
from simulation.backlog import backlog
from simulation.contention import overload, share_after_idling
from simulation.forecasts import forecasts
from simulation.placing import by_old_reports, by_own_counts
from simulation.swapping import BOUND_S, LOAD_S, LONGEST_S, swapping

flood = cache(contention.flood)
KEPT = Path(fairness.__file__).with_name("results") / "fairness.json"


def test_by_tokens_the_gap_between_backlogged_tenants_stays_within_its_bound():
    for seed in (1, 2, 3):
        by_tokens = backlog("tokens", length_s=200.0, seed=seed)
        assert by_tokens.gap <= 10_000
        assert by_tokens.gap <= by_tokens.bound


def test_by_turns_the_gap_between_backlogged_tenants_grows_with_time():
    short, long = (backlog("roundRobin", length_s=length_s).gap for length_s in (100.0, 200.0))
    assert long > 1.8 * short
    assert short > 50_000


def test_by_tokens_a_light_tenant_hardly_waits_and_throughput_is_kept():
    by_turns, by_tokens = backlog("roundRobin"), backlog("tokens")
    assert by_tokens.light_p99_s <= 2.5
    assert by_tokens.throughput >= 0.97 * by_turns.throughput


@pytest.mark.slow
def test_flood_causes_no_refusals_for_other_tenants():
    assert flood("stubborn", seeds=(1,)).refused <= 0.001
    assert flood("flood", seeds=(1,)).refused <= 0.001
    assert flood("stubborn", seeds=(1,), displacing=False).refused > 0.05


@pytest.mark.slow
def test_flood_makes_the_others_wait_no_longer_than_one_greedy_tenant_does():
    assert flood("stubborn", seeds=(1,)).p99_s <= 1.2 * flood("greedy", seeds=(1,)).p99_s


def test_idle_tenant_gains_no_extra_share():
    assert 0.45 <= share_after_idling(lifting=True, idle_s=60.0, burst_s=30.0) <= 0.55
    assert share_after_idling(lifting=False, idle_s=60.0, burst_s=30.0) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("order", ["roundRobin", "tokens"])
def test_quantile_estimate_and_its_p90_are_accurate(order):
    result = forecasts(order, length_s=4000.0, load=0.75)
    assert result.quantile <= 0.20
    assert result.quantile < result.by_fair_position < result.by_arrival
    assert 0.88 <= result.p90_coverage <= 0.95


@pytest.mark.parametrize("order", ["roundRobin", "tokens"])
def test_default_estimate_is_the_one_that_the_kept_measurement_finds_better(order):
    rows = json.loads(KEPT.read_text(encoding="utf-8"))["rows"]
    measured = {row["what"]: row["measured"] for row in rows}
    errors = {
        "mean": measured[f"{order}: wait, median error, mean by arrival | by fair position"],
        "quantile": measured[f"{order}: wait, median error, mean by arrival | quantile"],
    }
    assert QueueConfig().estimate == min(errors, key=errors.__getitem__)


def test_our_own_counts_always_find_the_idle_node():
    ours, usual = by_own_counts(length_s=900.0), by_old_reports(length_s=900.0)
    assert ours.idle_hit == 1.0
    assert ours.p99_s <= 6.0
    assert usual.idle_hit < 0.9
    assert usual.p99_s > 2 * ours.p99_s


def test_with_more_seats_per_node_the_idle_node_still_comes_first():
    assert by_own_counts(load=0.4, seats=2, length_s=300.0).idle_hit == 1.0


def test_clients_that_disconnect_under_overload_waste_no_seat():
    assert overload(retrying_timeouts=False, length_s=300.0).answers >= 1 / 2.25


def test_under_overload_refusing_long_waits_leaves_few_timeouts_and_answers_about_as_many():
    admitting = overload(retrying_timeouts=False, length_s=300.0)
    refusing = overload(retrying_timeouts=False, refused_above_s=30.0, length_s=300.0)
    assert admitting.timeouts > 0.1
    assert refusing.timeouts <= 0.05
    assert refusing.answers >= 0.9 * admitting.answers


def test_same_seed_has_the_same_result():
    assert backlog("tokens", length_s=50.0) == backlog("tokens", length_s=50.0)
    assert backlog("tokens", length_s=50.0) != backlog("tokens", length_s=50.0, seed=2)


@pytest.mark.parametrize(
    ("least", "most", "met", "words"),
    [
        (None, 2.0, False, "<= 2"),
        (3.0, None, True, ">= 3"),
        (1.0, 5.0, True, "1 to 5"),
        (None, None, None, ""),
    ],
)
def test_table_row_reports_whether_its_goal_is_met(least, most, met, words):
    row = fairness.Row("what", 1.0, 3.0, least, most)
    assert (met, words) == (row.met, fairness.goal(row))


def test_service_of_each_tenant_is_drawn(tmp_path):
    plot = tmp_path / "service.png"
    runs = {order: backlog(order, length_s=20.0) for order in ("roundRobin", "tokens")}
    fairness.draw(runs, plot)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_swaps_are_few_and_no_wait_exceeds_the_bound_plus_a_drain_and_a_load():
    for seed in (1, 2):
        strict, ours = swapping(strict=True, seed=seed), swapping(strict=False, seed=seed)
        assert ours.swaps_an_hour <= 0.65 * strict.swaps_an_hour
        assert ours.served > strict.served
        assert max(ours.rare_waits_s) <= BOUND_S + LONGEST_S + LOAD_S
        assert len(ours.rare_waits_s) > 80
