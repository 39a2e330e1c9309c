"""A snapshot has the state of the queue, models and nodes, the outcomes of jobs, and token rates."""

import msgspec
import pytest
import trio

from fairlead.generation.metrics.snapshot import REJECTIONS, Snapshot
from fairlead.router.fleet.status import NodeStatus, RemoteDetails
from generation.metrics.sources import FakeSources, engine, engine_status, timeline


async def test_snapshot_has_the_state_of_the_queue_models_and_nodes():
    sources = FakeSources()
    sources.fleet.statuses = [engine()]
    sources.fleet.node_statuses = [
        NodeStatus(
            id="n",
            kind="remote",
            models=("m",),
            seats=4,
            busy=1,
            state="up",
            remote=RemoteDetails(url="http://n"),
        )
    ]
    now = sources.overview().snapshot()
    assert (
        now.queue.waiting,
        now.queue.running,
        now.queue.capacity,
        now.queue.seats,
        now.queue.mean_wait_s,
    ) == (2, 1, 100, 1, 0.5)
    assert (now.ready, now.models[0].model, now.nodes[0].id) == (True, "m", "n")
    assert now == msgspec.json.decode(msgspec.json.encode(now), type=Snapshot)


async def test_refused_jobs_count_as_rejected_and_all_other_errors_as_failed():
    sources = FakeSources(refused={"rate_limited": 3, "invalid_request": 7})
    for outcome in ("success", "success", "client_left", "queue_full", "queue_timeout", "node_failed"):
        sources.gateway.metrics.add(timeline(outcome=outcome))
    now = sources.overview().snapshot()
    assert now.answered == 2
    assert {code: number for code, number in now.rejected.items() if number} == {
        "queue_full": 1,
        "queue_timeout": 1,
        "rate_limited": 3,
    }
    assert set(REJECTIONS) == set(now.rejected)
    assert now.failed == {"node_failed": 1, "invalid_request": 7}


async def test_token_rate_covers_the_last_seconds(autojump_clock):
    sources = FakeSources()
    running = timeline(ended_s=None, tokens=0)
    sources.gateway.under_way = [running]
    overview = sources.overview()
    assert overview.snapshot().tokens.generated_per_s == 0.0
    rates = []
    for tokens_a_second in (100, 100, 100, 100, 0, 0, 0, 0):
        for _ in range(4):  # as often as `/events` looks for changes
            await trio.sleep(0.25)
            running.tokens += tokens_a_second // 4
            rates.append(overview.snapshot().tokens.generated_per_s)
    assert pytest.approx([100.0] * 16) == rates[:16]
    assert rates[-1] == 0.0
    assert sorted(rates[16:], reverse=True) == rates[16:]


async def test_concurrent_snapshots_have_the_same_rate(autojump_clock):
    sources = FakeSources()
    running = timeline(ended_s=None, tokens=0)
    sources.gateway.under_way = [running]
    overview = sources.overview()
    overview.snapshot()
    await trio.sleep(1)
    running.tokens = 50
    assert {overview.snapshot().tokens.generated_per_s for _ in range(100)} == {50.0}


async def test_rate_after_a_long_pause_is_the_mean_since_the_last_snapshot(autojump_clock):
    sources = FakeSources()
    running = timeline(ended_s=None, tokens=0)
    sources.gateway.under_way = [running]
    overview = sources.overview()
    overview.snapshot()
    await trio.sleep(100)
    running.tokens = 50
    assert overview.snapshot().tokens.generated_per_s == 0.5


async def test_cache_usage_is_over_all_blocks_of_loaded_models_or_none():
    sources = FakeSources()
    overview = sources.overview()
    assert overview.snapshot().cache_usage is None
    sources.fleet.statuses = [
        engine("a", engine=engine_status(cache_usage=1.0, blocks_total=100)),
        engine("b", engine=engine_status(cache_usage=0.0, blocks_total=300)),
        engine("c", state="loading"),
        engine("d", kind="remote"),
    ]
    assert overview.snapshot().cache_usage == 0.25
