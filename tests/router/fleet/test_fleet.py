"""Models are loaded and evicted, with real processes and dispatcher. Crashes: see `test_fleet_deaths`."""

import sys
from pathlib import Path

import pytest
import trio

from fairlead.base.config import GroupConfig, GroupSwap, LruSwap, MatrixSwap, QueueConfig
from fairlead.base.errors import Draining, LoadFailed, ModelLoading, ModelNotFound
from nodes.listening import relayed_job
from nodes.stub_server import text
from router.fleet.running_fleet import (
    ONE_AT_A_TIME,
    OpenFiles,
    command,
    engine,
    free_port,
    memory_bytes,
    question,
    running_fleet,
    sleeper,
)


async def test_model_is_loaded_by_its_first_job_and_makes_room_when_its_last_process_is_gone():
    # On one port: the second server could not listen if the first one still ran.
    port = free_port()
    async with running_fleet(command("x", port), command("y", port), swap=ONE_AT_A_TIME) as opened:
        assert [status.state for status in opened.fleet.models()] == ["stopped", "stopped"]
        pids = []
        for model in ("x", "y", "x"):
            assert await opened.run_job(relayed_job(model=model, request_id=model)) == text()
            assert opened.status(model).state == "ready"
            pids.append(opened.pid(model))
            assert [pids[-1]] == [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        assert (
            opened.status("x").counts.loads,
            opened.status("y").counts.loads,
            opened.status("x").counts.evictions,
            opened.status("x").counts.restarts,
        ) == (2, 1, 1, 0)


async def test_no_model_is_evicted_without_a_swap_section():
    async with running_fleet(engine("x"), engine("y")) as opened:
        for model in "xyx":
            assert await opened.run_job(question(model))
        assert [(status.state, status.counts.loads) for status in opened.fleet.models()] == [
            ("ready", 1),
            ("ready", 1),
        ]
        assert [(node.id, node.state) for node in opened.fleet.nodes()] == [
            ("engine:x", "up"),
            ("engine:y", "up"),
        ]


async def test_failed_load_reports_the_reason_and_the_next_job_retries(tmp_path: Path):
    mark = tmp_path / "mark"
    script = (
        f"import os, sys, time; os.path.exists({str(mark)!r}) or sys.exit('no such file'); time.sleep(99)"
    )
    async with running_fleet(sleeper("x", cmd=(sys.executable, "-c", script))) as opened:
        # A model without a health check is ready at once. Use a server, as the load itself must fail.
        opened.fleet._local["x"].config = command("x", free_port(), "--exit-after", "0")
        with pytest.raises(LoadFailed, match="while loading"):
            await opened.run_job(relayed_job(model="x"))
        failed = opened.status("x")
        assert (failed.state, failed.counts.load_failures) == ("failed", 1)
        assert "while loading" in str(failed.problem)
        opened.fleet._local["x"].config = command("x", free_port())
        assert await opened.run_job(relayed_job(model="x")) == text()
        assert (opened.status("x").state, opened.status("x").problem) == ("ready", None)


async def test_jobs_that_wait_while_it_loads_join_that_load():
    async with running_fleet(engine(behaviour="slots=8")) as opened, trio.open_nursery() as clients:
        for _ in range(5):
            clients.start_soon(opened.run_job, question())
    assert opened.status().counts.loads == 1


async def test_preloaded_models_are_loaded_before_the_server_is_ready():
    async with running_fleet(engine("x", preload=True), engine("y"), waits=False) as opened:
        assert not opened.fleet.is_ready
        await opened.until(lambda: opened.fleet.is_ready)
        assert [status.state for status in opened.fleet.models()] == ["ready", "stopped"]


async def test_start_fails_when_the_only_model_fails_to_preload():
    with pytest.raises(ExceptionGroup) as raised:
        async with running_fleet(engine(behaviour="fail_load", preload=True)):
            raise AssertionError("it was not ready")
    assert raised.group_contains(LoadFailed, match="no such fake model")


async def test_failed_preload_does_not_affect_other_models():
    async with running_fleet(engine("x", "fail_load", preload=True), engine("y", preload=True)) as opened:
        assert opened.fleet.is_ready
        assert [status.state for status in opened.fleet.models()] == ["failed", "ready"]
        assert opened.fleet.problems == {}


async def test_explicit_load_shares_a_load_and_returns_when_the_model_is_ready():
    async with running_fleet(engine("x"), engine("y"), swap=ONE_AT_A_TIME) as opened:
        async with trio.open_nursery() as callers:
            for _ in range(3):
                callers.start_soon(opened.fleet.load, "x")
        assert (opened.status("x").state, opened.status("x").counts.loads) == ("ready", 1)
        await opened.fleet.load("y")
        assert [status.state for status in opened.fleet.models()] == ["stopped", "ready"]
        with pytest.raises(ModelNotFound):
            await opened.fleet.load("z")


async def test_explicit_load_does_not_interrupt_running_jobs():
    async with running_fleet(engine("x", "delay_ms=2"), engine("y"), swap=ONE_AT_A_TIME) as opened:
        begun = trio.Event()
        async with trio.open_nursery() as clients:
            clients.start_soon(opened.run_job_and_return_error, question("x", tokens=150), begun)
            await begun.wait()
            await opened.fleet.load("y")
            assert opened.status("x").busy == 0
        assert (opened.errors, opened.status("x").state) == ([], "stopped")


async def test_job_rejected_while_loading_still_starts_the_load():
    async with running_fleet(engine(), while_loading="reject") as opened:
        with pytest.raises(ModelLoading) as refused:
            await opened.run_job(question())
        assert refused.value.retry_after_s is not None
        await opened.state("m", "ready")
        assert await opened.run_job(question())
    assert opened.status().counts.loads == 1


async def test_model_loads_even_without_a_queue():
    async with running_fleet(engine(), queue=QueueConfig(capacity=0)) as opened:
        await opened.run_job_and_return_error(question())
        assert [error.status for error in opened.errors] == [429]
        await opened.state("m", "ready")
        assert await opened.run_job(question())


async def test_groups_swap_within_and_leave_what_is_persistent_alone():
    groups = GroupSwap(
        {
            "pair": GroupConfig(members=("x", "y")),
            "kept": GroupConfig(members=("z",), persistent=True, exclusive=False),
        }
    )
    async with running_fleet(*map(sleeper, "xyz"), swap=groups) as opened:
        for model in ("z", "x", "y"):
            await opened.fleet.load(model)
        assert [status.state for status in opened.fleet.models()] == ["stopped", "ready", "ready"]


async def test_matrix_evicts_the_model_with_the_lowest_cost():
    sets = MatrixSwap({"small": "x & y", "large": "x & z"}, evict_costs={"x": 10})
    async with running_fleet(*map(sleeper, "xyz"), swap=sets) as opened:
        for model in "xyz":
            await opened.fleet.load(model)
        assert [status.state for status in opened.fleet.models()] == ["ready", "stopped", "ready"]


MEMORY_FILLER_SCRIPT = (
    "import time; kept = bytearray({mib} << 20); print('full', flush=True); time.sleep(999)"
)


def memory_filler(name: str, mib: int, **settings: object):
    """Return a command that takes that much memory and a little more."""
    return sleeper(name, cmd=(sys.executable, "-c", MEMORY_FILLER_SCRIPT.format(mib=mib)), **settings)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux reports the memory of processes")
async def test_as_many_models_stay_as_fit_by_declared_or_measured_memory():
    models = (memory_filler("x", 60), memory_filler("y", 60), sleeper("z", memory_mb=100))
    async with running_fleet(*models, swap=LruSwap(memory_mb=200)) as opened:
        await opened.fleet.load("x")
        await opened.until(lambda: bool(opened.status("x").output))
        await opened.fleet._local["x"].measure()
        opened.fleet._local._memory.measured("x", opened.status("x").memory_bytes)
        assert 60 <= opened.fleet._local._memory.memory_mb["x"] <= 99
        await opened.fleet.load("z")
        assert [status.state for status in opened.fleet.models()] == ["ready", "stopped", "ready"]
        await opened.fleet.load("y")  # its memory is unknown, so it is loaded alone
        assert [status.state for status in opened.fleet.models()] == ["stopped", "ready", "stopped"]


async def test_memory_of_a_model_is_measured_after_its_load():
    async with running_fleet(engine()) as opened:
        await opened.fleet.load("m")
        await opened.until(lambda: opened.status().memory_bytes > 2**20)
        assert opened.fleet._local._memory.memory_mb["m"] == opened.status().memory_bytes / 2**20


async def test_fast_alternation_of_models_leaks_no_process_file_or_memory():
    async with running_fleet(*map(sleeper, "xy"), swap=ONE_AT_A_TIME) as opened:
        for model in "xyx":  # imports and one-time objects exist after this
            await opened.fleet.load(model)
        files, before_bytes, pids = OpenFiles(), memory_bytes(), set()
        for _ in range(25):
            for model in "yx":
                await opened.fleet.load(model)
                pids.add(opened.pid(model))
        assert [opened.pid("x")] == [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        await files.are_no_more()
        assert memory_bytes() - before_bytes < 5 * 2**20
        assert opened.status("y").counts.evictions == 26
        assert len(opened.dispatcher.scheduler._nodes) == 1


async def test_stopping_server_starts_no_loads():
    async with running_fleet(engine()) as opened:
        opened.dispatcher.scheduler.drain()
        with pytest.raises(Draining):
            await opened.fleet.load("m")
