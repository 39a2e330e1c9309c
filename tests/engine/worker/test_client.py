"""The parent's side with real child processes, which run a fake model."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio
import trio.testing

from engine.worker import fake_child
from engine.worker.children import (
    CHILD,
    ENDLESS,
    GRANT,
    TIMEOUT_S,
    Stream,
    failure_of,
    has_ended,
    running,
    running_until_failure,
    scripted,
    submit,
    wait_for_counts,
    worker,
)
from fairlead.base import messages
from fairlead.base.errors import EngineFailed, FairleadError, InvalidRequest, LoadFailed, NodeFailed
from fairlead.base.job import Sampling
from fairlead.nodes.engines import client
from fairlead.nodes.engines.client import Worker

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="F_SETSIG is Linux's")


async def test_submitted_sequence_streams_its_tokens_and_finishes():
    tested = worker()
    async with running(tested):
        _, stream = submit(tested, [1, 2, 3], Sampling(max_tokens=50))
        await stream.ended.wait()
    assert fake_child.answer([1, 2, 3], 50) == stream.token_ids
    assert stream.ends == ["length"]


async def test_ready_has_the_limits_and_progress_is_reported():
    progress = []
    tested = worker("slots=3")
    tested.on_progress = lambda *stage: progress.append(stage)
    async with running(tested) as ready:
        assert (ready.slots, ready.max_model_len) == (3, 1_000_000)
    assert progress == [(0.5, "weights")]


async def test_many_sequences_stream_concurrently():
    tested = worker()
    async with running(tested):
        prompts = [[number, number + 1] for number in range(40)]
        streams = [submit(tested, prompt, Sampling(max_tokens=20))[1] for prompt in prompts]
        for stream in streams:
            await stream.ended.wait()
    assert [fake_child.answer(prompt, 20) for prompt in prompts] == [stream.token_ids for stream in streams]
    assert all(stream.ends == ["length"] for stream in streams)


async def test_prompt_larger_than_the_socket_buffer_arrives_unchanged():
    tested = worker()
    prompt = [number % 900 for number in range(400_000)]
    async with running(tested):
        _, large = submit(tested, prompt, Sampling(max_tokens=1))
        _, behind = submit(tested, [5], Sampling(max_tokens=1))
        await behind.ended.wait()
        assert fake_child.answer([5], 1) == behind.token_ids
        await large.ended.wait()
    assert fake_child.answer(prompt, 1) == large.token_ids


@pytest.mark.parametrize("options", ["slots=8", "slots=8,overlap"])
async def test_two_hundred_random_aborts_free_all_slots_and_blocks(options):
    choose = random.Random(7)
    tested = worker(options)
    async with running(tested):
        streams: dict[int, Stream] = {}
        for _ in range(200):
            key, stream = submit(tested, [choose.randrange(900)], ENDLESS)
            streams[key] = stream
            if choose.random() < 0.3:
                await choose.choice(list(streams.values())[:8]).begun.wait()  # those that have a slot
            if choose.random() < 0.7:
                aborted = choose.choice(list(streams))
                tested.sequences.abort(aborted)
                del streams[aborted]
        for key in streams:
            tested.sequences.abort(key)
        _, last = submit(tested, [5], Sampling(max_tokens=2))
        await last.ended.wait()
        await wait_for_counts(tested, running=0, pending=0, slots_free=8, blocks_free=8000)
    assert fake_child.answer([5], 2) == last.token_ids


async def test_no_callback_follows_an_abort():
    tested = worker()
    async with running(tested):
        key, stream = submit(tested, [1], ENDLESS)
        await stream.begun.wait()
        tested.sequences.abort(key)
        received = len(stream.token_ids)
        await wait_for_counts(tested, running=0)
    assert received == len(stream.token_ids)
    assert stream.ends == []


async def test_no_callback_follows_an_abort_from_within_a_callback():
    tested = worker()
    keys: list[int] = []

    class AbortAtThird(Stream):
        def receive_token(self, token_id: int) -> None:
            super().receive_token(token_id)
            tested.sequences.abort(keys[0])

    stream = AbortAtThird()
    async with running(tested):
        keys.append(tested.sequences.submit([1], ENDLESS, stream, grant=GRANT))
        await stream.begun.wait()
        await wait_for_counts(tested, slots_free=4)
    assert (len(stream.token_ids), stream.ends) == (1, [])


async def test_abort_of_a_sequence_that_finished_is_ignored():
    tested = worker()
    async with running(tested):
        key, stream = submit(tested, [1], Sampling(max_tokens=1))
        await stream.ended.wait()
        tested.sequences.abort(key)
        tested.sequences.abort(12_345)
        _, second = submit(tested, [2], Sampling(max_tokens=1))
        await second.ended.wait()
    assert stream.ends == second.ends == ["length"]


async def test_refused_sequence_does_not_affect_others():
    tested = worker()
    async with running(tested):
        _, failing = submit(tested, [4000], Sampling(max_tokens=5))
        _, working = submit(tested, [4], Sampling(max_tokens=5))
        await failing.ended.wait()
        await working.ended.wait()
    (error,) = failing.ends
    assert isinstance(error, InvalidRequest)
    assert (error.param, "no token 4000" in error.message) == ("prompt", True)
    assert working.ends == ["length"]


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([1] * 1_000_000, "context_length_exceeded"),
        ([2**31], "invalid_request"),
        ([-(2**31) - 1], "invalid_request"),
    ],
)
async def test_prompt_that_cannot_be_sent_is_an_invalid_request(prompt, code):
    tested = worker()
    async with running(tested):
        with pytest.raises(InvalidRequest) as caught:
            submit(tested, prompt, ENDLESS)
        assert (caught.value.param, caught.value.code) == ("prompt", code)
        _, stream = submit(tested, [4], Sampling(max_tokens=1))
        await stream.ended.wait()
    assert stream.ends == ["length"]


@pytest.mark.parametrize("options", ["raise_in_step=3,rows=2", "raise_in_step=3,rows=2,overlap"])
async def test_failed_step_fails_its_sequences_and_the_child_keeps_running(options):
    tested = worker(options)
    async with running(tested):
        streams = [submit(tested, [number], ENDLESS)[1] for number in range(2)]
        for stream in streams:
            await stream.ended.wait()
            (error,) = stream.ends
            assert isinstance(error, EngineFailed)
            assert "the fake device failed" in error.message
        _, after = submit(tested, [4], Sampling(max_tokens=1))
        await after.ended.wait()
    assert after.ends == ["length"]


async def test_three_failed_steps_in_a_row_end_the_child_with_the_reason():
    tested = worker("raise_in_step=1,raise_times=3,slots=1")
    async with running_until_failure(tested) as errors:
        streams = [submit(tested, [number], ENDLESS)[1] for number in range(4)]
    (error,) = errors
    assert isinstance(error, NodeFailed)
    assert "exit status 1" in error.message
    assert "RuntimeError: the fake device failed" in error.message
    assert [EngineFailed, EngineFailed, NodeFailed, NodeFailed] == [
        type(stream.ends[0]) for stream in streams
    ]
    assert all(len(stream.ends) == 1 for stream in streams)


async def test_killed_child_fails_each_open_sequence_once():
    tested = worker("delay_ms=1")
    async with running_until_failure(tested) as errors:
        streams = [submit(tested, [number], ENDLESS)[1] for number in range(6)]
        key, aborted = submit(tested, [9], ENDLESS)
        tested.sequences.abort(key)
        await streams[0].begun.wait()
        assert tested.pid is not None
        os.kill(tested.pid, signal.SIGKILL)
    (error,) = errors
    assert isinstance(error, NodeFailed)
    assert error.message == "the model's process was killed by SIGKILL"
    for stream in streams:
        (end,) = stream.ends
        assert isinstance(end, NodeFailed)
        assert error.message == end.message
    assert aborted.ends == []
    assert has_ended(tested.pid)
    with pytest.raises(NodeFailed):
        submit(tested, [1], ENDLESS)
    tested.sequences.abort(1)


async def test_failing_sequence_may_abort_others():
    tested = worker("die_after=2")
    keys: list[int] = []
    failures = []

    class AbortOthers(Stream):
        def failed(self, error: FairleadError) -> None:
            failures.append(error)
            for key in keys:
                tested.sequences.abort(key)

    async with running_until_failure(tested):
        keys += [tested.sequences.submit([1], ENDLESS, AbortOthers(), grant=GRANT) for _ in range(3)]
    assert len(failures) == 1


async def test_submit_before_ready_is_refused():
    with pytest.raises(NodeFailed):
        submit(worker(), [1], ENDLESS)


async def test_failed_load_has_the_reason_of_the_child():
    error = await failure_of(worker("fail_load"))
    assert isinstance(error, LoadFailed)
    assert error.message == "no such fake model"


async def test_unexpected_error_in_loading_is_a_failed_load():
    error = await failure_of(worker("crash_load"))
    assert isinstance(error, LoadFailed)
    assert error.message == "RuntimeError: a bug in loading"


async def test_child_that_ends_while_loading_is_reported_with_status_and_output(capfd):
    error = await failure_of(worker("die_in_load"))
    assert isinstance(error, LoadFailed)
    assert error.message == "the model's process ended with exit status 3 while loading\nabout to die"
    assert capfd.readouterr().err == "[engine] about to die\n"


async def test_child_killed_while_loading_is_a_failed_load_that_names_the_signal():
    loading = trio.Event()
    tested = worker("slow_load")
    tested.on_progress = lambda _fraction, _stage: loading.set()
    caught = []

    async def run() -> None:
        caught.append(await failure_of(tested))

    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await loading.wait()
            assert tested.pid is not None
            os.kill(tested.pid, signal.SIGSEGV)
    (error,) = caught
    assert isinstance(error, LoadFailed)
    assert "was killed by SIGSEGV while loading" in error.message


async def test_load_without_progress_is_aborted(monkeypatch):
    for name in ("LOAD_PROGRESS_TIMEOUT_S", "END_WAIT_S", "LOG_WAIT_S"):
        monkeypatch.setattr(client, name, 0.5)
    tested = worker("slow_load")
    error = await failure_of(tested)
    assert isinstance(error, LoadFailed)
    assert error.message == "the model's process made no progress for 0.5 s"
    assert has_ended(tested.pid)


async def test_command_that_does_not_exist_is_a_failed_load():
    error = await failure_of(Worker(messages.WorkerSpec(path="fake:"), command=["/nonexistent/python"]))
    assert isinstance(error, LoadFailed)
    assert "cannot be started" in error.message


async def test_child_that_sends_an_invalid_message_is_ended():
    tested = scripted("""
        connection.sendall(b"\\xff" * 99)
        while connection.recv(99):
            pass
    """)
    error = await failure_of(tested)
    assert isinstance(error, LoadFailed)
    assert "an invalid message" in error.message
    assert has_ended(tested.pid)


async def test_messages_that_arrive_byte_by_byte_are_decoded():
    tested = scripted("""
        from fairlead.base import messages
        from fairlead.base.frames import encode_frame

        ready = messages.Ready(8, 4096, 32_000, 100, 16, "cpu", "float32", 1, 1)
        progress = messages.LoadProgress(0.5, "weights")
        for byte in encode_frame(progress) + encode_frame(ready):
            connection.sendall(bytes([byte]))
    """)
    progress = []
    tested.on_progress = lambda *stage: progress.append(stage)
    async with running_until_failure(tested) as errors:
        pass
    assert progress == [(0.5, "weights")]
    (error,) = errors
    assert isinstance(error, NodeFailed)
    assert error.message == "the model's process ended with exit status 0"


async def test_output_of_the_child_is_forwarded_and_kept_within_bounds(capfd):
    error = await failure_of(
        scripted("print('x' * 100_000); [print(number) for number in range(1000)]; sys.exit(4)")
    )
    assert error.message.splitlines() == [
        "the model's process ended with exit status 4 while loading",
        *map(str, range(995, 1000)),
    ]
    first, *others = [line.removeprefix("[engine] ") for line in capfd.readouterr().err.splitlines()]
    assert set(first) == {"x"}
    assert [str(number) for number in range(1000)] == others[-1000:]


async def test_cancellation_while_loading_ends_the_child():
    tested = worker("slow_load")
    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            tested.on_progress = lambda _fraction, _stage: nursery.cancel_scope.cancel()
            nursery.start_soon(tested.run)
    assert has_ended(tested.pid)


async def test_cancellation_ends_the_child_and_fails_open_sequences_once():
    tested = worker("delay_ms=1")
    async with running(tested):
        _, stream = submit(tested, [1], ENDLESS)
        await stream.begun.wait()
    assert has_ended(tested.pid)
    (error,) = stream.ends
    assert isinstance(error, NodeFailed)
    with pytest.raises(NodeFailed):
        submit(tested, [1], ENDLESS)


async def test_child_that_ignores_sigterm_is_killed(mock_clock):
    tested = scripted("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("SIGTERM is ignored", flush=True)
        time.sleep(600)
    """)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tested.run)
        while "SIGTERM is ignored" not in tested._log:
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await trio.testing.wait_all_tasks_blocked()
            assert not has_ended(tested.pid)
            mock_clock.jump(client.END_WAIT_S)  # virtual time, so the duration is not tested
    assert has_ended(tested.pid)


async def test_ctrl_c_does_not_reach_the_child():
    tested = worker()
    async with running(tested):
        assert tested.pid is not None
        os.kill(tested.pid, signal.SIGINT)
        _, stream = submit(tested, [1], Sampling(max_tokens=3))
        await stream.ended.wait()
    assert stream.ends == ["length"]


async def test_idle_child_uses_no_processor_time():
    def processor_ticks() -> int:
        fields = Path(f"/proc/{tested.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    tested = worker()
    async with running(tested):
        _, stream = submit(tested, [1], Sampling(max_tokens=3))
        await stream.ended.wait()
        await wait_for_counts(tested, running=0)
        await trio.to_thread.run_sync(_wait_for_state, tested.pid, "S")
        used = []
        while not used or (used[-1] > 1 and len(used) < 4):  # a tickless kernel may count earlier work late
            before = processor_ticks()
            await trio.sleep(0.3)  # real time on purpose: the child's processor time is measured
            used.append(processor_ticks() - before)
        assert used[-1] <= 1


def _wait_for_state(pid: int, state: str) -> None:
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != state:
        os.sched_yield()


@pytest.mark.parametrize("is_stopped", [False, pytest.param(True, marks=linux)])
@pytest.mark.parametrize("options", ["delay_ms=1", "stuck_in=2"])
async def test_child_ends_with_its_parent_even_when_stopped_or_in_an_endless_step(options, is_stopped):
    script = str(Path(__file__).with_name("orphan_parent.py"))
    with trio.fail_after(TIMEOUT_S):
        parent = await trio.lowlevel.open_process(
            [sys.executable, script, f"fake:{options}", CHILD], stdout=subprocess.PIPE
        )
        assert parent.stdout is not None
        async with parent.stdout:
            pid = int(await parent.stdout.receive_some())
            grandchild = os.pidfd_open(pid)
            try:
                if is_stopped:
                    os.kill(pid, signal.SIGSTOP)
                    await trio.to_thread.run_sync(_wait_for_state, pid, "T")
                parent.kill()
                await parent.wait()
                await trio.lowlevel.wait_readable(grandchild)  # readable when it has ended
            finally:
                os.close(grandchild)
