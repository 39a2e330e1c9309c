"""Fronts that attach to a real child process with a fake model, in one Trio program."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from engine.worker import fake_child
from engine.worker.children import (
    COMMAND,
    ENDLESS,
    TIMEOUT_S,
    Stream,
    failure_of,
    running,
    running_until_failure,
    wait_for_counts,
)
from fairlead.base import messages
from fairlead.base.errors import FairleadError, LoadFailed, NodeFailed, StaleGrant
from fairlead.base.frames import encode_frame
from fairlead.base.grant import Grant
from fairlead.base.job import Sampling
from fairlead.nodes.engines import attachment
from fairlead.nodes.engines.attachment import Attachment
from fairlead.nodes.engines.client import Worker


@asynccontextmanager
async def attached(path: Path, name: str = "front") -> AsyncIterator[Attachment]:
    """Attach; leaving the block detaches."""
    tested = Attachment(str(path), name=name)
    async with trio.open_nursery() as nursery:
        await nursery.start(tested.run)
        yield tested
        nursery.cancel_scope.cancel()


def submit(front: Attachment, prompt: list[int], sampling: Sampling, grant: Grant) -> Stream:
    stream = Stream()
    front.sequences.submit(prompt, sampling, stream, grant=grant)
    return stream


def listening(tmp_path: Path, options: str = "", **limits: object) -> tuple[Path, Worker]:
    path = tmp_path / "engine.sock"
    spec = messages.WorkerSpec(path=f"fake:{options}", listen=str(path), **limits)
    return path, Worker(spec, command=COMMAND)


@pytest.mark.parametrize("options", ["slots=8", "slots=8,overlap"])
async def test_four_fronts_get_the_answers_to_their_own_sequences(tmp_path, options):
    path, parent = listening(tmp_path, options)
    async with running(parent) as ready, trio.open_nursery() as nursery:

        async def use(name: int) -> None:
            async with attached(path, f"front {name}") as front:
                prompts = [[10 * name + number] for number in range(1, 6)]
                streams = [
                    submit(front, prompt, Sampling(max_tokens=30), Grant(1, 100 * name + prompt[0]))
                    for prompt in prompts
                ]
                for prompt, stream in zip(prompts, streams, strict=True):
                    await stream.ended.wait()
                    assert (stream.token_ids, stream.ends) == (fake_child.answer(prompt, 30), ["length"])
                assert front.sequences.statistics.blocks_total == ready.blocks_total

        for name in range(4):
            nursery.start_soon(use, name)


async def test_parent_has_fresh_statistics_of_a_child_to_which_it_submits_nothing(tmp_path):
    path, parent = listening(tmp_path, "slots=4", watchdog_s=0.3)
    async with running(parent), attached(path) as front:
        streams = [submit(front, [number], ENDLESS, Grant(1, number)) for number in range(3)]
        await streams[2].begun.wait()
        await wait_for_counts(parent, running=3)
        later = parent.statistics.steps + 10
        while parent.statistics.steps < later:
            await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("options", ["slots=2", "slots=2,overlap"])
async def test_suspended_sequence_pauses_without_failing_the_watchdog_and_goes_on(tmp_path, options):
    path, parent = listening(tmp_path, f"{options},delay_ms=1", watchdog_s=0.3)
    async with running(parent), attached(path) as front:
        stream, unsuspended = Stream(), Stream()
        key = front.sequences.submit([5], Sampling(max_tokens=300), stream, grant=Grant(1, 1))
        await stream.begun.wait()
        front.sequences.suspend(key)
        front.sequences.suspend(key + 7)
        front.sequences.resume(key + 7)
        await wait_for_counts(parent, running=0, suspended=1, slots_free=2)
        received = list(stream.token_ids)
        front.sequences.submit([6], Sampling(max_tokens=300), unsuspended, grant=Grant(1, 2))
        await unsuspended.ended.wait()
        await trio.sleep(0.7)
        assert parent.stuck is None
        assert received == stream.token_ids
        front.sequences.resume(key)
        await stream.ended.wait()
        assert (stream.token_ids, stream.ends) == (fake_child.answer([5], 300), ["length"])
        front.sequences.suspend(key)
        await wait_for_counts(parent, running=0, suspended=0)


async def test_front_that_detaches_in_mid_stream_frees_its_slots_and_blocks(tmp_path):
    path, parent = listening(tmp_path, "slots=4", watchdog_s=0.3)
    async with running(parent):
        async with attached(path) as front:
            streams = [submit(front, [number], ENDLESS, Grant(1, number)) for number in range(6)]
            await streams[0].begun.wait()
        await wait_for_counts(parent, running=0, pending=0, slots_free=4, blocks_free=8000)
    for stream in streams:
        (error,) = stream.ends
        assert isinstance(error, NodeFailed)


async def test_killed_child_fails_the_sequences_of_every_front_once(tmp_path):
    path, parent = listening(tmp_path, "delay_ms=1")
    ended: list[FairleadError] = []
    streams: list[Stream] = []

    async def use(name: int, *, task_status: trio.TaskStatus[None]) -> None:
        front = Attachment(str(path), name=f"front {name}")
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(front.run)
                streams.append(submit(front, [name], ENDLESS, Grant(1, name)))
                await streams[-1].begun.wait()
                task_status.started()
        except* NodeFailed as errors:
            ended.extend(errors.exceptions)
        with pytest.raises(NodeFailed):
            submit(front, [1], ENDLESS, Grant(1, 50 + name))

    async with running_until_failure(parent), trio.open_nursery() as nursery:
        for name in range(2):
            await nursery.start(use, name)
        os.kill(parent.pid, signal.SIGKILL)
    assert [error.message for error in ended] == ["the model's process closed the connection"] * 2
    assert [[type(end) for end in stream.ends] for stream in streams] == [[NodeFailed]] * 2


@pytest.mark.parametrize("busy", [False, True])
async def test_stopped_child_is_given_up_by_its_parent_and_ends_the_fronts(tmp_path, busy):
    path, parent = listening(tmp_path, "delay_ms=1", watchdog_s=0.3)
    async with running_until_failure(parent) as errors:
        front = Attachment(str(path), name="front")
        ended: list[BaseException] = []
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(front.run)
                if busy:
                    stream = submit(front, [1], ENDLESS, Grant(1, 1))
                    await stream.begun.wait()
                os.kill(parent.pid, signal.SIGSTOP)
        except* NodeFailed as failures:
            ended.extend(failures.exceptions)
        assert [str(error) for error in ended] == ["the model's process closed the connection"]
    assert "made no progress" in errors[0].message


async def test_stale_grant_fails_its_sequence_only(tmp_path):
    path, parent = listening(tmp_path)
    parent.raise_epoch(3)
    async with running(parent), attached(path) as front:
        await wait_for_counts(parent, slots_free=4)  # the frame that answers the epoch
        parent.statistics = messages.EngineStatistics()
        parent.raise_epoch(4)
        await wait_for_counts(parent, slots_free=4)  # the same for this one
        stale = submit(front, [1], Sampling(max_tokens=2), Grant(3, 1))
        valid = submit(front, [1], Sampling(max_tokens=2), Grant(4, 1))
        await stale.ended.wait()
        await valid.ended.wait()
    (error,) = stale.ends
    assert isinstance(error, StaleGrant)
    assert valid.ends == ["length"]


async def test_epoch_raised_before_the_load_counts_too(tmp_path):
    path, parent = listening(tmp_path)
    parent.raise_epoch(3)
    async with running(parent), attached(path) as front:
        await wait_for_counts(parent, slots_free=4)
        stale = submit(front, [1], Sampling(max_tokens=2), Grant(2, 1))
        await stale.ended.wait()
    assert isinstance(stale.ends[0], StaleGrant)


async def test_front_of_another_version_gets_the_reason(tmp_path):
    path, parent = listening(tmp_path)
    newer = messages.PROTOCOL_VERSION + 1
    async with running(parent):
        with pytest.raises(
            NodeFailed, match=f"version {messages.PROTOCOL_VERSION} of the protocol, not {newer}"
        ):
            await Attachment(str(path), name="newer", version=newer).run()


async def test_no_engine_at_the_path_is_an_error(tmp_path):
    with pytest.raises(NodeFailed, match="cannot be reached"):
        await Attachment(str(tmp_path / "none.sock"), name="front").run()


async def test_engine_that_does_not_answer_is_given_up(tmp_path, autojump_clock):
    path = tmp_path / "engine.sock"
    with trio.socket.socket(trio.socket.AF_UNIX) as silent:
        await silent.bind(str(path))
        silent.listen()
        with pytest.raises(NodeFailed, match="did not answer within 60 s"):
            await Attachment(str(path), name="front").run()
    assert trio.current_time() >= attachment.ATTACH_TIMEOUT_S


async def test_engine_that_sends_an_invalid_message_is_left(tmp_path):
    path = tmp_path / "engine.sock"
    with trio.socket.socket(trio.socket.AF_UNIX) as wrong:
        await wrong.bind(str(path))
        wrong.listen()
        async with trio.open_nursery() as nursery:

            async def answer() -> None:
                connection, _ = await wrong.accept()
                await connection.send(encode_frame(messages.LoadFailure("not for fronts")))
                await connection.recv(1 << 16)
                connection.close()

            nursery.start_soon(answer)
            with trio.fail_after(TIMEOUT_S), pytest.raises(NodeFailed, match="sent an invalid message"):
                await Attachment(str(path), name="front").run()


async def test_socket_that_cannot_be_made_is_a_failed_load(tmp_path):
    _, parent = listening(tmp_path / "missing")
    error = await failure_of(parent)
    assert isinstance(error, LoadFailed)
    assert "the socket for clients" in error.message


async def test_socket_is_removed_when_the_child_ends_with_its_parent(tmp_path):
    path, parent = listening(tmp_path, "fail_load")
    await failure_of(parent)
    assert not path.exists()
