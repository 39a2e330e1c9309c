"""A child that makes no progress: real processes, stopped or in an endless step.

The clock is virtual and moved by hand, so that a child on a slow machine does not count as stuck.
"""

import os
import signal
from pathlib import Path

import pytest
import trio
import trio.testing

from engine.worker import fake_child
from engine.worker.children import (
    ENDLESS,
    GRANT,
    Engine,
    Stream,
    has_ended,
    running,
    running_until_failure,
    scripted,
    submit,
    wait_for_counts,
    worker,
)
from fairlead.base.errors import NodeFailed, RequestTimeout
from fairlead.base.job import Sampling
from fairlead.nodes.engines import client
from fairlead.nodes.engines.watchdog import TICKS

WATCHDOG_S = 0.5


async def advance(clock: trio.testing.MockClock, ticks: int = 1) -> None:
    """Advance the clock by `ticks` checks of the watchdog."""
    for _ in range(ticks):
        clock.jump(WATCHDOG_S / TICKS)
        await trio.testing.wait_all_tasks_blocked()


async def run_until_stuck(tested: Engine | client.Worker, clock: trio.testing.MockClock) -> None:
    for _ in range(3 * TICKS):
        await advance(clock)
        if tested.stuck is not None:
            return
    raise AssertionError("the watchdog did not fire")


async def run_until_ended(clock: trio.testing.MockClock) -> None:
    """Advance the clock past the waits for a stuck child's last output and for its end."""
    for wait_s in (client.FINAL_OUTPUT_WAIT_S, client.END_WAIT_S):
        clock.jump(wait_s)
        await trio.testing.wait_all_tasks_blocked()


async def wait_for_next_step(tested: Engine) -> None:
    steps = tested.statistics.steps
    while steps == tested.statistics.steps:
        await trio.lowlevel.checkpoint()


def suspend(pid: int | None) -> None:
    """Suspend a child, and wait until it is suspended."""
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        os.sched_yield()


async def test_endless_step_ends_the_child_and_fails_open_sequences(mock_clock, capfd):
    tested = worker("stuck_in=3", watchdog_s=WATCHDOG_S)
    async with running_until_failure(tested) as errors:
        streams = [submit(tested, [number], ENDLESS)[1] for number in range(3)]
        await wait_for_counts(tested._worker, steps=1)
        await wait_for_counts(tested, steps=2)
        await run_until_stuck(tested, mock_clock)
        assert all(stream.ended.is_set() for stream in streams)
        with pytest.raises(NodeFailed):
            submit(tested, [9], ENDLESS)  # the worker accepts no more sequences
        while not any("in finish" in line for line in tested.log):  # its last output: the step's stack
            await trio.lowlevel.checkpoint()
        await run_until_ended(mock_clock)
    reason = "the model's process made no progress for 0.5 s"
    (error,) = errors
    assert (NodeFailed, reason) == (type(error), error.message)
    assert [(NodeFailed, reason)] * 3 == [
        (type(end), end.message) for stream in streams for end in stream.ends
    ]
    assert max(len(stream.token_ids) for stream in streams) == 2
    assert reason == tested.stuck
    assert has_ended(tested.pid)
    assert "in finish" in capfd.readouterr().err


async def test_first_step_may_take_twice_the_bound(mock_clock):
    tested = worker("stuck_in=1", watchdog_s=WATCHDOG_S)
    async with running_until_failure(tested):
        _, stream = submit(tested, [1], ENDLESS)
        await advance(mock_clock, TICKS + 1)
        assert not stream.ended.is_set()
        await run_until_stuck(tested, mock_clock)
        assert stream.ended.is_set()
        await run_until_ended(mock_clock)
    assert tested.stuck == "the model's process made no progress for 1 s"


async def test_suspended_child_is_killed(mock_clock):
    tested = worker(watchdog_s=WATCHDOG_S)
    async with running_until_failure(tested):
        _, stream = submit(tested, [1], ENDLESS)
        await stream.begun.wait()
        suspend(tested.pid)
        await run_until_stuck(tested, mock_clock)
        await run_until_ended(mock_clock)  # it cannot act on SIGTERM
    (end,) = stream.ends
    assert isinstance(end, NodeFailed)
    assert has_ended(tested.pid)


async def test_submit_without_an_answer_ends_the_child(mock_clock):
    tested = worker(watchdog_s=WATCHDOG_S)
    async with running_until_failure(tested):
        _, first = submit(tested, [1], Sampling(max_tokens=1))
        await first.ended.wait()
        suspend(tested.pid)
        _, second = submit(tested, [1], Sampling(max_tokens=1))
        await run_until_stuck(tested, mock_clock)
        await run_until_ended(mock_clock)
    assert first.ends == ["length"]
    assert isinstance(second.ends[0], NodeFailed)
    assert has_ended(tested.pid)


async def test_stuck_child_is_detected_despite_aborted_sequences(mock_clock):
    tested = worker("stuck_in=2", watchdog_s=WATCHDOG_S)
    async with running_until_failure(tested) as errors:
        key, stream = submit(tested, [1], ENDLESS)
        await stream.begun.wait()
        for _ in range(3 * TICKS):
            tested.sequences.abort(key)
            key, stream = submit(tested, [1], ENDLESS)
            await advance(mock_clock)  # each is open for much less than the bound
            if tested.stuck is not None:
                break
        assert stream.ended.is_set()
        await run_until_ended(mock_clock)
    assert "made no progress" in errors[0].message


async def test_child_that_reads_no_message_is_stuck(mock_clock):
    tested = scripted(
        """
        from fairlead.base import messages
        from fairlead.base.frames import encode_frame

        ready = messages.Ready(8, 4096, 32_000, 100, 16, "cpu", "float32", 1, 1)
        connection.sendall(encode_frame(ready))
        time.sleep(600)
        """,
        watchdog_s=WATCHDOG_S,
    )
    async with running_until_failure(tested) as errors:
        await run_until_stuck(tested, mock_clock)
        await run_until_ended(mock_clock)
    assert "made no progress for 1 s" in errors[0].message
    assert has_ended(tested.pid)


async def test_slow_steps_are_progress(mock_clock):
    tested = worker("delay_ms=5", watchdog_s=WATCHDOG_S)
    async with running(tested):
        submit(tested, [1], ENDLESS)
        for _ in range(15):
            await wait_for_next_step(tested)
            await advance(mock_clock, TICKS // 2)
    assert tested.stuck is None


async def test_long_prefill_in_chunks_is_progress_before_it_has_an_output(mock_clock):
    tested = worker("delay_ms=5,batched=16", watchdog_s=WATCHDOG_S)
    prompt = [1 + number % 900 for number in range(16 * 60)]
    async with running(tested):
        _, stream = submit(tested, prompt, Sampling(max_tokens=1))
        while not stream.ended.is_set():
            await wait_for_next_step(tested)
            await advance(mock_clock, TICKS // 2)
    assert (stream.token_ids, tested.stuck) == (fake_child.answer(prompt, 1), None)


async def test_sequence_beyond_its_timeout_ends_and_frees_its_slot():
    tested = worker("delay_ms=1,slots=1")
    async with running(tested):
        late, in_time = Stream(), Stream()
        tested.sequences.submit([1], ENDLESS, late, timeout_s=0.05, grant=GRANT)
        tested.sequences.submit([2], Sampling(max_tokens=2), in_time, timeout_s=60.0, grant=GRANT)
        await late.ended.wait()
        await in_time.ended.wait()
    (end,) = late.ends
    assert (type(end), end.message) == (RequestTimeout, "the request took longer than 0.05 s")
    assert in_time.ends == ["length"]


async def test_child_with_overlap_generates_the_same_tokens():
    tested = worker("overlap,delay_ms=1,slots=4")
    async with running(tested):
        prompts = [[number, number + 1] for number in range(12)]
        streams = [submit(tested, prompt, Sampling(max_tokens=20))[1] for prompt in prompts]
        for stream in streams:
            await stream.ended.wait()
    assert [fake_child.answer(prompt, 20) for prompt in prompts] == [stream.token_ids for stream in streams]
