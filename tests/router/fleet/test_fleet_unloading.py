"""Models are unloaded, on request or after their time, with real processes and dispatcher."""

import os
import signal
from pathlib import Path

import pytest
import trio

from fairlead.base.errors import FairleadError, LoadFailed, ModelUnloaded, NodeFailed
from nodes.listening import relayed_job
from router.fleet.running_fleet import (
    ONE_AT_A_TIME,
    command,
    engine,
    free_port,
    question,
    running_fleet,
    sleeper,
)


async def test_unloading_waits_for_the_jobs_it_runs_and_returns_when_the_process_is_gone():
    async with running_fleet(engine()) as opened:
        await opened.fleet.load("m")
        pid = opened.pid()
        async with trio.open_nursery() as clients:
            os.kill(pid, signal.SIGSTOP)  # else the job might end before its state is read
            clients.start_soon(opened.run_job_and_return_error, question(tokens=100))
            await opened.until(lambda: opened.status().busy == 1)
            clients.start_soon(opened.fleet.unload, "m")
            await opened.state("m", "draining")
            os.kill(pid, signal.SIGCONT)
            await opened.fleet.unload("m")
        assert opened.errors == []
        assert not Path(f"/proc/{pid}").exists()
        assert opened.status().state == "stopped"
        await opened.fleet.unload("m")  # it is stopped already
        assert await opened.run_job(question())


async def test_forced_unload_fails_running_jobs():
    async with running_fleet(engine(behaviour="delay_ms=2")) as opened:
        begun = trio.Event()
        async with trio.open_nursery() as clients:
            clients.start_soon(opened.run_job_and_return_error, question(tokens=100_000), begun)
            await begun.wait()
            await opened.fleet.unload("m", force=True)
        (error,) = opened.errors
        assert isinstance(error, NodeFailed)
        assert (opened.dispatcher.statistics().running, opened.status().state) == (0, "stopped")


async def test_unload_fails_jobs_and_loads_that_wait_for_the_model():
    async with running_fleet(engine("x", "slow_load"), sleeper("y"), swap=ONE_AT_A_TIME) as opened:
        async with trio.open_nursery() as clients:
            clients.start_soon(opened.run_job_and_return_error, question("x"))
            clients.start_soon(load_and_keep_error, opened, "x")
            await opened.until(lambda: opened.fleet._local["x"].pid is not None)
            clients.start_soon(opened.fleet.load, "y")  # waits until x has made room, and is not affected
            await trio.testing.wait_all_tasks_blocked()
            await opened.fleet.unload("x")
        assert [ModelUnloaded, ModelUnloaded] == [type(error) for error in opened.errors]
        assert [(error.status, error.code) for error in opened.errors] == [(409, "unloaded")] * 2
        assert [status.state for status in opened.fleet.models()] == ["stopped", "ready"]
        assert opened.dispatcher.statistics().waiting == 0


async def test_unload_of_a_model_queued_for_loading_fails_its_jobs():
    models = engine("y", "slow_load"), engine("z")
    async with running_fleet(*models, swap=ONE_AT_A_TIME) as opened, trio.open_nursery() as clients:
        clients.start_soon(opened.run_job_and_return_error, question("y"))
        await opened.state("y", "loading")
        clients.start_soon(opened.run_job_and_return_error, question("z"))
        await opened.until(lambda: opened.dispatcher.statistics().waiting == 2)
        await opened.fleet.unload("z")
        await opened.until(lambda: bool(opened.errors))
        assert [ModelUnloaded] == [type(error) for error in opened.errors]
        assert opened.dispatcher.statistics().waiting == 1
        clients.cancel_scope.cancel()


async def load_and_keep_error(opened, model: str) -> None:
    try:
        await opened.fleet.load(model)
    except FairleadError as error:
        opened.errors.append(error)


async def test_unload_with_wait_keeps_queued_jobs_and_the_model_loads_again():
    port = free_port()
    async with running_fleet(command("x", port, "--healthy-after", "1000")) as opened:
        async with trio.open_nursery() as unloading:
            unloading.start_soon(_unload_when_loading, opened)
            with pytest.raises(LoadFailed, match="unloaded before it was ready"):
                await opened.fleet.load("x")
        assert opened.status("x").state == "stopped"
        async with trio.open_nursery() as clients:
            clients.start_soon(opened.run_job_and_return_error, relayed_job(model="x"))
            await _unload_when_loading(opened, next_config=command("x", port))
        assert (opened.errors, opened.status("x").counts.loads) == ([], 1)


async def _unload_when_loading(opened, next_config=None) -> None:
    await opened.state("x", "loading")
    await opened.until(lambda: opened.fleet._local["x"].pid is not None)
    if next_config is not None:
        opened.fleet._local["x"].config = next_config
    await opened.fleet.unload("x", wait=True)


async def test_unused_model_is_unloaded_after_its_ttl():
    async with running_fleet(
        engine("x", ttl_s=0.05), engine("y", ttl_s=0.05, preload=True), engine("z")
    ) as opened:
        await opened.run_job(question("x"))
        await opened.run_job(question("z"))
        await opened.state("x", "stopped")
        await opened.state("y", "stopped")  # although it never had a job
        assert opened.status("z").state == "ready"


async def test_model_is_kept_as_long_as_requested_until_its_next_load():
    async with running_fleet(engine("x", ttl_s=600.0), engine("y")) as opened:
        await opened.run_job(question("x"))
        assert 0 < opened.fleet.expires_in_s("x") <= 600.0
        opened.fleet.keep("x", 0.0)
        await opened.state("x", "stopped")
        await opened.run_job(question("x"))
        assert 1.0 < opened.fleet.expires_in_s("x") <= 600.0
        await opened.run_job(question("y"))
        assert opened.fleet.expires_in_s("y") == float("inf")
        opened.fleet.keep("y", 0.05)
        await opened.state("y", "stopped")
        opened.fleet.keep("elsewhere", 0.0)  # a model that is not here
        assert opened.fleet.gpu_bytes("x") == 0
