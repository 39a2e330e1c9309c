"""Models that go although nobody wanted it: killed, stuck, or not able to come back."""

import os
import signal
from pathlib import Path

import msgspec
import pytest
import trio

from fairlead.config import HealthConfig, LruSwap
from fairlead.errors import NodeFailed
from fairlead.job import Sampling
from fairlead.nodes.fleet import Fleet
from fairlead.nodes.pulse import Pulse
from fairlead.worker.watchdog import Watchdog
from nodes.garage import Garage, command, engine, free_port, garage, question, sleeper
from nodes.listening import relayed_job
from nodes.stub_server import text


def endless():
    """A stream that cannot be told again: it fails with its node."""
    return msgspec.structs.replace(
        question(stream=True), sampling=Sampling(max_tokens=100_000, ignore_eos=True)
    )


async def begin(opened: Garage, clients: trio.Nursery) -> None:
    """Have an endless answer begun."""
    begun = trio.Event()
    clients.start_soon(opened.ask_and_keep_error, endless(), begun)
    with trio.fail_after(60):
        await begun.wait()


def held(monkeypatch, owner: type, name: str) -> trio.Event:
    """Have a method wait until that event is set, before it does anything."""
    may_begin, method = trio.Event(), getattr(owner, name)

    async def later(*arguments):
        await may_begin.wait()
        return await method(*arguments)

    monkeypatch.setattr(owner, name, later)
    return may_begin


async def test_a_dead_model_fails_what_cannot_be_repeated_and_comes_back_by_itself():
    async with garage(engine(behaviour="delay_ms=2", preload=True)) as opened:
        first = opened.pid()
        async with trio.open_nursery() as clients:
            await begin(opened, clients)
            os.kill(first, signal.SIGKILL)
        (error,) = opened.errors
        assert isinstance(error, NodeFailed)
        assert "SIGKILL" in error.message
        await opened.until(lambda: opened.status().state == "ready" and opened.status().restarts == 1)
        assert first != opened.pid()
        assert (True, None, {}) == (opened.fleet.is_ready, opened.status().problem, opened.fleet.problems)
        assert await opened.ask(question())


async def test_the_seat_of_a_dead_model_is_given_to_nobody_and_its_next_life_begins_at_once_for_who_waits():
    async with garage(engine(behaviour="delay_ms=2,slots=1")) as opened:
        answers = []

        async def ask() -> None:
            answers.append(await opened.ask(question()))

        async with trio.open_nursery() as clients:
            await begin(opened, clients)
            for _ in range(3):
                clients.start_soon(ask)
            await opened.until(lambda: opened.desk.statistics().waiting == 3)
            os.kill(opened.pid(), signal.SIGKILL)
        assert ["node_failed"] == [error.code for error in opened.errors]
        assert (1, 3) == (len(set(answers)), len(answers))


async def test_a_model_that_died_is_no_problem_of_the_servers_but_it_is_not_ready():
    async with garage(engine()) as opened:
        await opened.ask(question())
        os.kill(opened.pid(), signal.SIGKILL)
        await opened.until(lambda: not opened.fleet.is_ready)
        assert {} == opened.fleet.problems
        await opened.until(lambda: opened.fleet.is_ready)


async def test_a_stuck_model_is_told_of_until_it_is_back(tmp_path: Path, monkeypatch):
    # Such a short patience must not begin before it is stuck: a busy machine lets it wait as long.
    is_stuck = held(monkeypatch, Watchdog, "stuck")
    mark = tmp_path / "mark"
    options = f"stuck_once=3;{mark}"
    async with garage(engine(behaviour=options, watchdog_s=0.5, preload=True)) as opened:
        first = opened.pid()
        assert {} == opened.fleet.problems
        async with trio.open_nursery() as clients:
            await begin(opened, clients)
            await opened.until(mark.exists)
            is_stuck.set()
            await opened.until(lambda: bool(opened.errors))
            reason = "the model's process made no progress for 0.5 s and is started again"
            assert ({"m": reason}, reason) == (opened.fleet.problems, opened.status().problem)
            assert not opened.fleet.is_ready
        await opened.until(lambda: opened.fleet.is_ready)
        assert ({}, None) == (opened.fleet.problems, opened.status().problem)
        assert first != opened.pid()
        assert (1, 1) == (opened.status().restarts, opened.status().stuck)


async def test_a_stuck_model_has_no_seats_although_it_has_not_ended_and_nobody_waits(monkeypatch):
    monkeypatch.setattr("fairlead.worker.client.END_WAIT_S", 1.0)
    is_stuck = held(monkeypatch, Watchdog, "stuck")
    async with garage(engine(watchdog_s=0.2, preload=True)) as opened:
        first, node_down, seen = opened.pid(), opened.desk.node_down, []

        def look(node) -> None:
            # Here, and not a little later: it may be killed and come back before a task has another turn.
            node_down(node)
            seats, problem = opened.desk.statistics().seats, opened.fleet.problems.get("m", "")
            seen.append((seats, Path(f"/proc/{first}").exists(), "made no progress" in problem))

        monkeypatch.setattr(opened.desk, "node_down", look)
        async with trio.open_nursery() as clients:
            await begin(opened, clients)
            os.kill(first, signal.SIGSTOP)
            is_stuck.set()
        await opened.until(lambda: opened.fleet.is_ready)
        assert [(0, True, True)] == seen
        assert not Path(f"/proc/{first}").exists()


async def test_a_stuck_model_that_does_not_load_again_stays_a_problem(tmp_path: Path, monkeypatch):
    is_stuck = held(monkeypatch, Watchdog, "stuck")
    mark = tmp_path / "mark"
    options = f"stuck_once=1,fail_again;{mark}"
    async with garage(engine(behaviour=options, watchdog_s=0.2, preload=True)) as opened:
        async with trio.open_nursery() as clients:
            clients.start_soon(opened.ask_and_keep_error, endless())
            await opened.until(mark.exists)
            is_stuck.set()
        await opened.until(lambda: opened.status().load_failures > 0)
        assert "made no progress for 0.4 s" in opened.fleet.problems["m"]
        assert not opened.fleet.is_ready


@pytest.mark.parametrize("busy", [True, False])
async def test_a_command_that_is_stopped_is_given_up_and_its_job_done_by_its_next_life(monkeypatch, busy):
    is_stopped = held(monkeypatch, Pulse, "stopped")
    job = relayed_job(stub={"delay_s": 0.1})
    job = msgspec.structs.replace(job, sampling=Sampling(max_tokens=10, temperature=0))
    health = HealthConfig(interval_s=0.1, failures=3, timeout_s=0.2)
    async with garage(command("m", free_port()), health_check=health) as opened:
        await opened.fleet.load("m")
        opened.fleet._residents["m"].health = HealthConfig()  # of its next life, which may be slow
        first, answers = opened.pid(), []
        async with trio.open_nursery() as clients:

            async def ask() -> None:
                answers.append(await opened.ask(job))

            if busy:
                clients.start_soon(ask)
                await opened.until(lambda: opened.desk.statistics().running == 1)
            os.kill(first, signal.SIGSTOP)
            is_stopped.set()
            await opened.until(lambda: opened.status().stuck == 1)
        reason = "m did not answer /health 3 times in a row, and did nothing else and is started again"
        assert reason in (opened.status().problem, reason if opened.fleet.is_ready else None)
        await opened.until(lambda: opened.fleet.is_ready)
        assert first != opened.pid()
        assert not Path(f"/proc/{first}").exists()
        assert [text()] * busy == answers
        assert ({}, None) == (opened.fleet.problems, opened.status().problem)


@pytest.mark.parametrize("makes_room", [True, False])
async def test_what_died_comes_back_only_where_it_evicts_nothing(monkeypatch, makes_room):
    monkeypatch.setattr("fairlead.nodes.resident.FIRST_BACKOFF_S", 0.05)
    may_come_back = held(monkeypatch, Fleet, "_revive")
    swap = LruSwap(max_loaded=1 if makes_room else 2)
    async with garage(sleeper("x"), sleeper("y"), swap=swap) as opened:
        await opened.fleet.load("x")
        os.kill(opened.pid("x"), signal.SIGKILL)
        await opened.state("x", "failed")
        await opened.fleet.load("y")
        may_come_back.set()
        if makes_room:
            await opened.until(lambda: "x" in opened.desk._upkeep._wishes)
            assert ("failed", "ready") == (opened.status("x").state, opened.status("y").state)
            assert opened.fleet.is_ready, "its room is another's now"
            await opened.fleet.unload("y")
        await opened.state("x", "ready")
        assert 1 == opened.status("x").restarts
