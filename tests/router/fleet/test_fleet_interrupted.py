"""The only model is unloaded, changed or removed during its first load, or the server stops."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from fairlead.base.config import Config, HealthConfig, ModelConfig, NodeConfig
from fairlead.base.errors import (
    Draining,
    FairleadError,
    LoadCancelled,
    LoadFailed,
    ModelNotFound,
    ModelUnloaded,
)
from fairlead.router.fleet.fleet import Fleet
from fairlead.router.fleet.local_models import LocalModels
from nodes.listening import stub
from router.fleet.running_fleet import RunningFleet, engine, question, read_fake, running_fleet, sleeper

NEVER_LOADED = engine(behaviour="slow_load", preload=True)
LOADED = engine(preload=True)
QUICK = HealthConfig(interval_s=0.05, failures=3, timeout_s=60.0)

MOMENTS = {
    "it has an instance": lambda opened: True,
    "its process has started": lambda opened: opened.fleet._local["m"].pid is not None,
    "it has reported progress": lambda opened: opened.status().load.progress > 0,
}


@asynccontextmanager
async def loading(moment: str, **settings: object) -> AsyncIterator[RunningFleet]:
    """Run a fleet to that moment in the first load of its only model. If it ended, the test would fail."""
    async with running_fleet(NEVER_LOADED, waits=False, **settings) as opened:
        await opened.state("m", "loading")
        await opened.until(lambda: MOMENTS[moment](opened))
        assert not opened.fleet.is_ready
        yield opened


async def is_over(opened: RunningFleet) -> None:
    """Wait until the fleet has finished preloading."""
    await opened.until(lambda: opened.fleet._is_preloaded)


async def becomes(opened: RunningFleet, model: ModelConfig) -> None:
    """Replace the model's configuration from its next load on."""
    managed_model = opened.fleet._local["m"]
    managed_model.config, managed_model.text = model, await read_fake(model)


async def serves_again(opened: RunningFleet) -> None:
    """Make the model loadable, load it by a job, and check that the server is ready then."""
    await becomes(opened, LOADED)
    assert await opened.run_job(question())
    assert opened.fleet.is_ready


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("force", [False, True])
async def test_server_is_not_ready_after_its_only_model_is_unloaded_during_load(moment, force):
    async with loading(moment) as opened:
        await opened.fleet.unload("m", force=force)
        await is_over(opened)
        assert (opened.status().state, opened.status().problem) == ("stopped", None)
        assert not opened.fleet.is_ready
        await serves_again(opened)


async def test_server_is_not_ready_after_an_early_unload_and_a_failed_load():
    async with loading("it has an instance") as opened:
        await opened.fleet.unload("m")
        await becomes(opened, engine(behaviour="fail_load", preload=True))
        with pytest.raises(LoadFailed, match="no such fake model"):
            await opened.run_job(question())
        assert (opened.status().state, opened.fleet.is_ready) == ("failed", False)
        await serves_again(opened)


@pytest.mark.parametrize(("wait", "expected"), [(False, (ModelUnloaded, 409)), (True, (LoadCancelled, 502))])
async def test_caller_that_waits_for_the_load_gets_an_error_after_an_unload(wait, expected):
    async with loading("its process has started") as opened, trio.open_nursery() as callers:
        errors = []

        async def load() -> None:
            try:
                await opened.fleet.load("m")
            except FairleadError as error:
                errors.append(error)

        callers.start_soon(load)
        await trio.testing.wait_all_tasks_blocked()
        await opened.fleet.unload("m", wait=wait)
        await opened.until(lambda: bool(errors))
        assert [(type(error), error.status) for error in errors] == [expected]


@pytest.mark.parametrize("moment", MOMENTS)
async def test_server_is_ready_after_its_only_model_is_removed_during_load(moment):
    async with loading(moment) as opened:
        await opened.fleet.reload(Config(models=()))
        await is_over(opened)
        await opened.until(lambda: not opened.fleet.models())
        assert opened.fleet.is_ready
        with pytest.raises(ModelNotFound):
            await opened.fleet.load("m")


@pytest.mark.parametrize("moment", MOMENTS)
async def test_only_model_changed_during_load_loads_with_its_new_settings(moment):
    async with loading(moment) as opened:
        await opened.fleet.reload(Config(models=(LOADED,)))
        await opened.until(lambda: opened.fleet.is_ready)
        assert (opened.status().state, opened.status().counts.loads) == ("ready", 1)
        assert await opened.run_job(question())


async def test_server_is_ready_when_its_loading_model_is_no_longer_preloaded():
    async with loading("it has an instance") as opened:
        await opened.fleet.reload(Config(models=(engine(),)))
        await opened.until(lambda: opened.fleet.is_ready)
        await opened.state("m", "stopped")


@pytest.mark.parametrize("moment", MOMENTS)
async def test_failed_reload_does_not_affect_the_first_load(moment, monkeypatch):
    async with loading(moment) as opened:
        instance = opened.fleet._local["m"].instance

        async def unreadable(_model) -> None:
            raise LoadFailed("the new model cannot be read")

        monkeypatch.setattr(opened.fleet.catalog, "_read", unreadable)
        with pytest.raises(LoadFailed, match="cannot be read"):
            await opened.fleet.reload(Config(models=(NEVER_LOADED, engine("new"))))
        assert opened.fleet._local["m"].instance is instance
        assert opened.status().state == "loading"
        await opened.fleet.unload("m")
        await serves_again(opened)


@pytest.mark.parametrize("moment", MOMENTS)
async def test_removed_node_does_not_affect_the_first_load(moment):
    async with stub() as server:
        nodes = (NodeConfig(id="far", url=server.url),)
        async with loading(moment, nodes=nodes, health_check=QUICK) as opened:
            await opened.fleet.remove_node("far")
            assert [node.id for node in opened.fleet.nodes()] == ["engine:m"]
            assert opened.status().state == "loading"
            await opened.fleet.unload("m")
            await is_over(opened)
            await serves_again(opened)


@pytest.mark.parametrize("moment", MOMENTS)
async def test_server_that_is_to_stop_while_its_only_model_loads_waits_for_no_load(moment):
    async with loading(moment) as opened:
        opened.dispatcher.scheduler.drain()
        await is_over(opened)
        with pytest.raises(Draining):
            await opened.fleet.load("m")


async def test_process_killed_by_the_stop_signal_is_not_a_failed_start():
    async with loading("its process has started") as opened:
        opened.dispatcher.scheduler.drain()  # a service manager signals all processes at once
        os.kill(opened.pid(), signal.SIGTERM)
        await is_over(opened)
        await opened.state("m", "failed")


async def test_start_still_fails_when_the_only_model_is_killed():
    async def lose_it() -> None:
        async with loading("its process has started") as opened:
            os.kill(opened.pid(), signal.SIGKILL)
            await trio.sleep(60)

    with pytest.raises(ExceptionGroup) as raised:
        await lose_it()
    assert raised.group_contains(LoadFailed, match="SIGKILL")


async def test_killed_model_does_not_restart_after_an_unload(monkeypatch):
    monkeypatch.setattr("fairlead.router.fleet.instance.FIRST_BACKOFF_S", 0.2)
    async with running_fleet(sleeper("m")) as opened:
        await opened.fleet.load("m")
        first = opened.pid()
        os.kill(first, signal.SIGKILL)
        await opened.state("m", "failed")
        await opened.fleet.unload("m")
        await opened.until(lambda: not opened.fleet._nursery.child_tasks)
        assert (opened.status().counts.loads, opened.fleet._local["m"].instance) == (1, None)
        assert not Path(f"/proc/{first}").exists()
        assert opened.fleet.is_ready


async def test_killed_model_stays_unloaded_after_a_later_load_and_unload(monkeypatch):
    monkeypatch.setattr("fairlead.router.fleet.instance.FIRST_BACKOFF_S", 0.2)
    async with running_fleet(sleeper("m")) as opened:
        await opened.fleet.load("m")
        os.kill(opened.pid(), signal.SIGKILL)
        await opened.state("m", "failed")
        await opened.fleet.load("m")
        await opened.fleet.unload("m")
        await opened.until(lambda: not opened.fleet._nursery.child_tasks)
        assert (opened.status().counts.loads, opened.status().state) == (2, "stopped")


@pytest.mark.parametrize(
    ("owner", "task"),
    [
        (LocalModels, "_measure"),
        (LocalModels, "_restart"),
        (LocalModels, "retire"),
        (Fleet, "_replace"),
        (Fleet, "_load_in_background"),
    ],
)
async def test_failed_background_task_affects_nothing_else(owner, task, monkeypatch):
    failures = []

    async def fail(*_arguments) -> None:
        failures.append(KeyError("a bug"))
        raise failures[-1]

    monkeypatch.setattr(owner, task, fail)
    async with stub() as server, running_fleet(sleeper("x"), sleeper("y"), health_check=QUICK) as opened:
        await opened.fleet.load("x")
        os.kill(opened.pid("x"), signal.SIGKILL)
        await opened.until(
            lambda: opened.status("x").state == "failed" or opened.status("x").counts.loads == 2
        )
        nodes = (NodeConfig(id="far", url=server.url),)
        models = (sleeper("y"), sleeper("new", preload=True))
        await opened.fleet.reload(Config(models=models, nodes=nodes, health_check=QUICK))
        await opened.until(lambda: bool(failures))
        await opened.fleet.load("y")
        assert opened.status("y").state == "ready"
