"""A fleet with real processes and dispatcher uses another configuration."""

import os
import signal
from pathlib import Path

import pytest
import trio

from fairlead.base.config import Config
from fairlead.base.errors import InvalidRequest, LoadFailed, ModelNotFound
from router.fleet.running_fleet import engine, question, running_fleet, sleeper


async def test_reload_keeps_unchanged_models_running():
    async with running_fleet(*map(sleeper, "xyz"), sleeper("w", aliases=("v",))) as opened:
        for model in "xyz":
            await opened.fleet.load(model)
        x, y = opened.pid("x"), opened.pid("y")
        with trio.fail_after(60):
            changes = await opened.fleet.reload(
                Config(
                    models=(sleeper("x"), sleeper("y", cmd=("sleep", "2000")), sleeper("new", aliases=("n",)))
                )
            )
        assert (
            changes.models_added,
            changes.models_changed,
            changes.models_removed,
        ) == (("new",), ("y",), ("z", "w"))
        assert opened.fleet.catalog.aliases == {"n": "new"}
        assert list(map(opened.fleet.has, ("x", "new", "z"))) == [True, True, False]
        await opened.until(lambda: len(opened.fleet.models()) == 3)
        await opened.state("y", "stopped")
        await opened.fleet.load("y")
        await opened.fleet.load("new")
        assert x == opened.pid("x")
        assert y != opened.pid("y")
        assert b"2000" in Path(f"/proc/{opened.pid('y')}/cmdline").read_bytes()


async def test_removed_model_finishes_running_jobs_and_fails_queued_ones():
    async with running_fleet(engine(behaviour="slots=1")) as opened:
        await opened.fleet.load("m")
        pid = opened.pid()
        async with trio.open_nursery() as clients:
            answers = []

            async def run_job() -> None:
                answers.append(await opened.run_job(question(tokens=60)))

            os.kill(pid, signal.SIGSTOP)  # else the first job might end before the second is queued
            clients.start_soon(run_job)
            await opened.until(lambda: opened.status().busy == 1)
            clients.start_soon(opened.run_job_and_return_error, question())
            await opened.until(lambda: opened.dispatcher.statistics().waiting == 1)
            await opened.fleet.reload(Config(models=()))
            os.kill(pid, signal.SIGCONT)
        assert list(map(bool, answers)) == [True]
        assert [ModelNotFound] == list(map(type, opened.errors))
        await opened.until(lambda: not opened.fleet.models())
        assert opened.fleet.catalog.texts == {}


async def test_failed_reload_changes_nothing():
    async with running_fleet(sleeper("x")) as opened:

        async def unreadable(_model):
            raise LoadFailed("no tokenizer")

        opened.fleet.catalog._read = unreadable
        with pytest.raises(LoadFailed):
            await opened.fleet.reload(Config(models=(engine("y"),)))
        assert [status.model for status in opened.fleet.models()] == ["x"]
        assert (await opened.fleet.reload(Config(models=(sleeper("x"), sleeper("y"))))).models_added == ("y",)


async def test_concurrent_second_reload_is_refused():
    async with running_fleet(sleeper("x")) as opened:
        release_memory = trio.Event()

        async def slow(_model):
            await release_memory.wait()
            raise LoadFailed("no")

        opened.fleet.catalog._read = slow
        async with trio.open_nursery() as nursery:

            async def first() -> None:
                with pytest.raises(LoadFailed):
                    await opened.fleet.reload(Config(models=(engine("y"),)))

            nursery.start_soon(first)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(InvalidRequest, match="another reload"):
                await opened.fleet.reload(Config(models=()))
            release_memory.set()
