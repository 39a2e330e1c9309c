"""Models that are killed, get stuck, or fail to load again."""

import os
import signal
from pathlib import Path

import msgspec
import pytest
import trio

from fairlead.base.config import HealthConfig, LruSwap
from fairlead.base.errors import NodeFailed
from fairlead.base.job import Sampling
from fairlead.nodes.engines.watchdog import Watchdog
from fairlead.nodes.processes.liveness import LivenessProbe
from fairlead.router.fleet.local_models import LocalModels
from nodes.listening import relayed_job
from nodes.stub_server import text
from router.fleet.running_fleet import (
    RunningFleet,
    command,
    engine,
    free_port,
    question,
    running_fleet,
    sleeper,
)


def endless():
    """Return a job with a stream that cannot be replayed, so it fails with its node."""
    return msgspec.structs.replace(
        question(stream=True), sampling=Sampling(max_tokens=100_000, ignore_eos=True)
    )


async def begin(opened: RunningFleet, clients: trio.Nursery) -> None:
    """Start an endless response, and wait until it has begun."""
    begun = trio.Event()
    clients.start_soon(opened.run_job_and_return_error, endless(), begun)
    with trio.fail_after(60):
        await begun.wait()


def block_method(monkeypatch, owner: type, name: str) -> trio.Event:
    """Make a method wait for the returned event before it runs."""
    may_begin, method = trio.Event(), getattr(owner, name)

    async def later(*arguments):
        await may_begin.wait()
        return await method(*arguments)

    monkeypatch.setattr(owner, name, later)
    return may_begin


async def test_killed_model_fails_jobs_that_cannot_be_replayed_and_restarts():
    async with running_fleet(engine(behaviour="delay_ms=2", preload=True)) as opened:
        first = opened.pid()
        async with trio.open_nursery() as clients:
            await begin(opened, clients)
            os.kill(first, signal.SIGKILL)
        (error,) = opened.errors
        assert isinstance(error, NodeFailed)
        assert "SIGKILL" in error.message
        await opened.until(lambda: opened.status().state == "ready" and opened.status().counts.restarts == 1)
        assert first != opened.pid()
        assert (opened.fleet.is_ready, opened.status().problem, opened.fleet.problems) == (True, None, {})
        assert await opened.run_job(question())


async def test_queued_jobs_of_a_killed_model_run_after_its_restart():
    async with running_fleet(engine(behaviour="delay_ms=2,slots=1")) as opened:
        answers = []

        async def run_job() -> None:
            answers.append(await opened.run_job(question()))

        async with trio.open_nursery() as clients:
            await begin(opened, clients)
            for _ in range(3):
                clients.start_soon(run_job)
            await opened.until(lambda: opened.dispatcher.statistics().waiting == 3)
            os.kill(opened.pid(), signal.SIGKILL)
        assert [error.code for error in opened.errors] == ["node_failed"]
        assert (len(set(answers)), len(answers)) == (1, 3)


async def test_server_with_a_killed_model_is_not_ready_but_has_no_problem():
    async with running_fleet(engine()) as opened:
        await opened.run_job(question())
        os.kill(opened.pid(), signal.SIGKILL)
        await opened.until(lambda: not opened.fleet.is_ready)
        assert opened.fleet.problems == {}
        await opened.until(lambda: opened.fleet.is_ready)


async def test_stuck_model_is_reported_until_it_is_ready_again(tmp_path: Path, monkeypatch):
    # So short a timeout must not start before the model is stuck: a busy machine may delay it as long.
    is_stuck = block_method(monkeypatch, Watchdog, "stuck")
    mark = tmp_path / "mark"
    options = f"stuck_once=3;{mark}"
    async with running_fleet(engine(behaviour=options, watchdog_s=0.5, preload=True)) as opened:
        first = opened.pid()
        assert opened.fleet.problems == {}
        async with trio.open_nursery() as clients:
            await begin(opened, clients)
            await opened.until(mark.exists)
            is_stuck.set()
            await opened.until(lambda: bool(opened.errors))
            reason = "the model's process made no progress for 0.5 s and is started again"
            assert ({"m": reason}, reason) == (opened.fleet.problems, opened.status().problem)
            assert not opened.fleet.is_ready
        await opened.until(lambda: opened.fleet.is_ready)
        assert (opened.fleet.problems, opened.status().problem) == ({}, None)
        assert first != opened.pid()
        assert (opened.status().counts.restarts, opened.status().counts.stuck) == (1, 1)


async def test_stuck_model_loses_its_seats_before_its_process_ends(monkeypatch):
    monkeypatch.setattr("fairlead.nodes.engines.client.END_WAIT_S", 1.0)
    is_stuck = block_method(monkeypatch, Watchdog, "stuck")
    async with running_fleet(engine(watchdog_s=0.2, preload=True)) as opened:
        scheduler = opened.dispatcher.scheduler
        first, node_down, seen = opened.pid(), scheduler.node_down, []

        def record_state(node_id) -> None:
            # Check here: the model may be killed and loaded again before another task runs.
            node_down(node_id)
            seats, problem = opened.dispatcher.statistics().seats, opened.fleet.problems.get("m", "")
            seen.append((seats, Path(f"/proc/{first}").exists(), "made no progress" in problem))

        monkeypatch.setattr(scheduler, "node_down", record_state)
        async with trio.open_nursery() as clients:
            await begin(opened, clients)
            os.kill(first, signal.SIGSTOP)
            is_stuck.set()
        await opened.until(lambda: opened.fleet.is_ready)
        assert seen == [(0, True, True)]
        assert not Path(f"/proc/{first}").exists()


async def test_stuck_model_that_fails_to_load_again_stays_reported(tmp_path: Path, monkeypatch):
    is_stuck = block_method(monkeypatch, Watchdog, "stuck")
    mark = tmp_path / "mark"
    options = f"stuck_once=1,fail_again;{mark}"
    async with running_fleet(engine(behaviour=options, watchdog_s=0.2, preload=True)) as opened:
        async with trio.open_nursery() as clients:
            clients.start_soon(opened.run_job_and_return_error, endless())
            await opened.until(mark.exists)
            is_stuck.set()
        await opened.until(lambda: opened.status().counts.load_failures > 0)
        assert "made no progress for 0.4 s" in opened.fleet.problems["m"]
        assert not opened.fleet.is_ready


@pytest.mark.parametrize("busy", [True, False])
async def test_suspended_command_is_restarted_and_its_job_completed(monkeypatch, busy):
    is_stopped = block_method(monkeypatch, LivenessProbe, "stopped")
    job = relayed_job(stub={"delay_s": 0.1})
    job = msgspec.structs.replace(job, sampling=Sampling(max_tokens=10, temperature=0))
    health = HealthConfig(interval_s=0.1, failures=3, timeout_s=0.2)
    async with running_fleet(command("m", free_port()), health_check=health) as opened:
        await opened.fleet.load("m")
        opened.fleet._local["m"]._health = HealthConfig()  # for its next process, which may be slow
        first, answers = opened.pid(), []
        async with trio.open_nursery() as clients:

            async def run_job() -> None:
                answers.append(await opened.run_job(job))

            if busy:
                clients.start_soon(run_job)
                await opened.until(lambda: opened.dispatcher.statistics().running == 1)
            os.kill(first, signal.SIGSTOP)
            is_stopped.set()
            await opened.until(lambda: opened.status().counts.stuck == 1)
        reason = "m did not answer /health 3 times in a row, and did nothing else and is started again"
        assert reason in (opened.status().problem, reason if opened.fleet.is_ready else None)
        await opened.until(lambda: opened.fleet.is_ready)
        assert first != opened.pid()
        assert not Path(f"/proc/{first}").exists()
        assert [text()] * busy == answers
        assert (opened.fleet.problems, opened.status().problem) == ({}, None)


@pytest.mark.parametrize("makes_room", [True, False])
async def test_killed_model_restarts_only_if_it_evicts_nothing(monkeypatch, makes_room):
    monkeypatch.setattr("fairlead.router.fleet.instance.FIRST_BACKOFF_S", 0.05)
    may_come_back = block_method(monkeypatch, LocalModels, "_restart")
    swap = LruSwap(max_loaded=1 if makes_room else 2)
    async with running_fleet(sleeper("x"), sleeper("y"), swap=swap) as opened:
        await opened.fleet.load("x")
        os.kill(opened.pid("x"), signal.SIGKILL)
        await opened.state("x", "failed")
        await opened.fleet.load("y")
        may_come_back.set()
        if makes_room:
            await opened.until(lambda: "x" in opened.dispatcher.models._loads)
            assert (opened.status("x").state, opened.status("y").state) == ("failed", "ready")
            assert opened.fleet.is_ready, "another model has taken its place"
            await opened.fleet.unload("y")
        await opened.state("x", "ready")
        assert opened.status("x").counts.restarts == 1
