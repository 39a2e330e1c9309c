"""A child that makes no progress: real processes, stopped or in a step that takes for ever."""

import os
import signal

import pytest
import trio

from fairlead.errors import NodeFailed, RequestTimeout
from fairlead.job import Sampling
from worker import fake_child
from worker.children import ENDLESS, Stream, dying, is_gone, running, scripted, submit, worker

WATCHDOG_S = 0.5  # real time: these children are real


async def test_a_step_that_takes_for_ever_ends_the_child_and_fails_what_is_open(capfd):
    tested = worker("stuck_in=3", watchdog_s=WATCHDOG_S)
    async with dying(tested) as errors:
        streams = [submit(tested, [number], ENDLESS)[1] for number in range(3)]
        for stream in streams:
            await stream.ended.wait()
        with pytest.raises(NodeFailed):
            submit(tested, [9], ENDLESS)  # nobody is given a seat there any more
    reason = "the model's process made no progress for 0.5 s"
    (error,) = errors
    assert (NodeFailed, reason) == (type(error), error.message)
    assert [(NodeFailed, reason)] * 3 == [
        (type(end), end.message) for stream in streams for end in stream.ends
    ]
    assert 2 == max(len(stream.token_ids) for stream in streams)
    assert reason == tested.stuck
    assert is_gone(tested.pid)
    assert "in finish" in capfd.readouterr().err  # its last words: the stack of the step


async def test_the_first_step_has_twice_the_time():
    tested = worker("stuck_in=1", watchdog_s=WATCHDOG_S)
    async with dying(tested):
        _, stream = submit(tested, [1], ENDLESS)
        await stream.ended.wait()
    assert tested.stuck == "the model's process made no progress for 1 s"


async def test_a_stopped_child_is_killed(monkeypatch):
    monkeypatch.setattr("fairlead.worker.client.END_WAIT_S", 0.1)  # it cannot act on SIGTERM
    tested = worker(watchdog_s=WATCHDOG_S)
    async with dying(tested):
        _, stream = submit(tested, [1], ENDLESS)
        await stream.begun.wait()
        os.kill(tested.pid, signal.SIGSTOP)
        await stream.ended.wait()
    (end,) = stream.ends
    assert isinstance(end, NodeFailed)
    assert is_gone(tested.pid)


async def test_a_submit_that_is_never_answered_is_noticed_too(monkeypatch):
    monkeypatch.setattr("fairlead.worker.client.END_WAIT_S", 0.1)
    tested = worker(watchdog_s=WATCHDOG_S)
    async with dying(tested):
        _, first = submit(tested, [1], Sampling(max_tokens=1))
        await first.ended.wait()
        os.kill(tested.pid, signal.SIGSTOP)
        _, second = submit(tested, [1], Sampling(max_tokens=1))
        await second.ended.wait()
    assert first.ends == ["length"]
    assert isinstance(second.ends[0], NodeFailed)
    assert is_gone(tested.pid)


async def test_clients_that_give_up_do_not_hide_a_child_that_is_stuck():
    tested = worker("stuck_in=2", watchdog_s=WATCHDOG_S)
    with trio.fail_after(60):
        async with dying(tested) as errors:
            key, stream = submit(tested, [1], ENDLESS)
            await stream.begun.wait()
            while tested.stuck is None:
                tested.abort(key)
                try:
                    key, stream = submit(tested, [1], ENDLESS)
                except NodeFailed:
                    break
                await trio.sleep(0.05)  # real time: each stays for much less than the bound
    assert "made no progress" in errors[0].message


async def test_a_child_that_reads_nothing_at_all_is_stuck():
    tested = scripted(
        """
        from fairlead.worker import wire

        connection.sendall(wire.encode_frame(wire.Ready(8, 4096, 32_000, 100, 16, "cpu", "float32", 1, 1)))
        time.sleep(600)
        """,
        watchdog_s=0.2,
    )
    async with dying(tested) as errors:
        _, stream = submit(tested, [1] * 4000, ENDLESS)
        await stream.ended.wait()
    assert "made no progress for 0.4 s" in errors[0].message
    assert is_gone(tested.pid)


async def test_slow_steps_are_progress():
    tested = worker("delay_ms=100", watchdog_s=1.0)
    async with running(tested):
        _, stream = submit(tested, [1], Sampling(max_tokens=15))
        await stream.ended.wait()
    assert (["length"], None) == (stream.ends, tested.stuck)


async def test_a_long_prefill_in_chunks_is_progress_before_it_has_an_output():
    tested = worker("delay_ms=30,batched=16", watchdog_s=1.0)
    prompt = [1 + number % 900 for number in range(16 * 60)]
    async with running(tested):
        _, stream = submit(tested, prompt, Sampling(max_tokens=1))
        await stream.ended.wait()
    assert (fake_child.answer(prompt, 1), None) == (stream.token_ids, tested.stuck)


async def test_a_sequence_that_runs_out_of_time_ends_in_the_engine_and_frees_its_slot():
    tested = worker("delay_ms=1,slots=1")
    async with running(tested):
        late, patient = Stream(), Stream()
        tested.submit([1], ENDLESS, late, timeout_s=0.05)
        tested.submit([2], Sampling(max_tokens=2), patient, timeout_s=60.0)
        await late.ended.wait()
        await patient.ended.wait()
    (end,) = late.ends
    assert (RequestTimeout, "the request took longer than 0.05 s") == (type(end), end.message)
    assert patient.ends == ["length"]


async def test_an_overlapping_child_says_the_same():
    tested = worker("overlap,delay_ms=1,slots=4")
    async with running(tested):
        prompts = [[number, number + 1] for number in range(12)]
        streams = [submit(tested, prompt, Sampling(max_tokens=20))[1] for prompt in prompts]
        for stream in streams:
            await stream.ended.wait()
    assert [fake_child.answer(prompt, 20) for prompt in prompts] == [stream.token_ids for stream in streams]
