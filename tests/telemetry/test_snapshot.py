"""A snapshot says what everything stateful says of itself, and how fast the tokens come."""

import msgspec
import pytest
import trio

from fairlead.nodes.status import NodeStatus
from fairlead.telemetry.snapshot import REJECTIONS, Overview, Snapshot
from telemetry.sources import FakeSources, engine, journey


async def test_a_snapshot_has_the_queue_the_models_and_the_nodes_as_they_are():
    sources = FakeSources()
    sources.fleet.statuses = [engine()]
    sources.fleet.node_statuses = [
        NodeStatus(id="n", kind="remote", url="http://n", models=("m",), seats=4, busy=1, state="up")
    ]
    now = Overview(sources).snapshot()
    assert (2, 1, 100, 1, 0.5) == (
        now.queue.waiting,
        now.queue.running,
        now.queue.capacity,
        now.queue.seats,
        now.queue.mean_wait_s,
    )
    assert (True, "m", "n") == (now.ready, now.models[0].model, now.nodes[0].id)
    assert now == msgspec.json.decode(msgspec.json.encode(now), type=Snapshot)


async def test_jobs_that_were_turned_away_are_rejected_and_all_other_errors_failed():
    sources = FakeSources(refused={"rate_limited": 3, "invalid_request": 7})
    for outcome in ("success", "success", "client_left", "queue_full", "queue_timeout", "node_failed"):
        sources.gateway.tally.add(journey(outcome=outcome))
    now = Overview(sources, sources.refusals).snapshot()
    assert 2 == now.answered
    assert {"queue_full": 1, "queue_timeout": 1, "rate_limited": 3} == {
        code: number for code, number in now.rejected.items() if number
    }
    assert set(REJECTIONS) == set(now.rejected)
    assert {"node_failed": 1, "invalid_request": 7} == now.failed


async def test_tokens_a_second_are_those_of_the_last_seconds(autojump_clock):
    sources = FakeSources()
    running = journey(ended_s=None, tokens=0)
    sources.gateway.under_way = [running]
    overview = Overview(sources)
    assert 0.0 == overview.snapshot().tokens.generated_per_s
    rates = []
    for tokens_a_second in (100, 100, 100, 100, 0, 0, 0, 0):
        for _ in range(4):  # as often as the dashboard looks
            await trio.sleep(0.25)
            running.tokens += tokens_a_second // 4
            rates.append(overview.snapshot().tokens.generated_per_s)
    assert pytest.approx([100.0] * 16) == rates[:16]
    assert 0.0 == rates[-1]
    assert sorted(rates[16:], reverse=True) == rates[16:]


async def test_many_who_look_at_once_do_not_change_the_rate(autojump_clock):
    sources = FakeSources()
    running = journey(ended_s=None, tokens=0)
    sources.gateway.under_way = [running]
    overview = Overview(sources)
    overview.snapshot()
    await trio.sleep(1)
    running.tokens = 50
    assert {50.0} == {overview.snapshot().tokens.generated_per_s for _ in range(100)}


async def test_whoever_looks_again_after_a_long_time_is_told_the_mean_since_then(autojump_clock):
    sources = FakeSources()
    running = journey(ended_s=None, tokens=0)
    sources.gateway.under_way = [running]
    overview = Overview(sources)
    overview.snapshot()
    await trio.sleep(100)
    running.tokens = 50
    assert 0.5 == overview.snapshot().tokens.generated_per_s


async def test_cache_usage_is_that_of_all_blocks_of_loaded_models_and_nothing_without_any():
    sources = FakeSources()
    overview = Overview(sources)
    assert overview.snapshot().cache_usage is None
    sources.fleet.statuses = [
        engine("a", cache_usage=1.0, blocks_total=100),
        engine("b", cache_usage=0.0, blocks_total=300),
        engine("c", state="loading"),
        engine("d", kind="remote"),
    ]
    assert 0.25 == overview.snapshot().cache_usage
