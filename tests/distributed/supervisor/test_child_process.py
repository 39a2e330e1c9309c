"""The supervisor's end of a child, with small programs in place of the roles."""

import os
import signal
import sys

import trio
import trio.testing

from fairlead.distributed.supervisor import child_process, control
from fairlead.distributed.supervisor.child_process import CHECK_INTERVAL_S, SILENCE_S, STOPPED_S, ChildProcess

# Ends with success once it has received this many frames, the first of which is given.
COUNT_FRAMES = """
import os, sys
descriptor, wanted = int(sys.argv[-1]), 2
def read(size):
    data = b""
    while len(data) < size:
        data += os.read(descriptor, size - len(data))
    return data
for _ in range(wanted):
    read(int.from_bytes(read(4), "little"))
"""


async def test_message_that_is_sent_while_the_child_starts_is_received():
    child = ChildProcess("child")
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child.run, control.Drain(), (sys.executable, "-c", COUNT_FRAMES))
            while child._link is None:  # Trio's order of tasks is random
                await trio.lowlevel.checkpoint()
            assert child.pid is None, "it has started already"
            child.send(control.FrontEnded("front 0.1"))


class Killed:
    """Counts the calls of `kill`, in place of a process."""

    def __init__(self, pid=os.getpid()):  # noqa: B008  no child of this process
        self.pid = pid
        self.times = 0

    def kill(self):
        self.times += 1


async def pass_seconds(clock, count):
    for _ in range(int(count / CHECK_INTERVAL_S)):
        clock.jump(CHECK_INTERVAL_S + 0.001)
        await trio.testing.wait_all_tasks_blocked()


async def test_child_is_killed_for_its_own_silence_and_not_for_a_pause_of_the_supervisor(mock_clock, nursery):
    child, process = ChildProcess("child"), Killed()
    nursery.start_soon(child._watch, process)
    await trio.testing.wait_all_tasks_blocked()
    child._receive(control.Alive())
    await pass_seconds(mock_clock, 3)
    mock_clock.jump(60)  # neither process ran
    await trio.testing.wait_all_tasks_blocked()
    assert process.times == 0
    child._receive(control.Alive())
    await pass_seconds(mock_clock, SILENCE_S)
    assert process.times == 0
    await pass_seconds(mock_clock, 1)
    assert process.times > 0


async def test_child_that_is_stopped_is_killed_after_a_second_and_one_that_is_slow_is_not(
    mock_clock, nursery, monkeypatch
):
    stopped = {1: True, 2: False}
    monkeypatch.setattr(child_process, "_is_stopped", stopped.get)
    processes = [Killed(pid) for pid in stopped]
    for process in processes:
        child = ChildProcess("child")
        child._receive(control.Alive())
        nursery.start_soon(child._watch, process)
    await trio.testing.wait_all_tasks_blocked()
    await pass_seconds(mock_clock, STOPPED_S - CHECK_INTERVAL_S)
    stopped[1] = False  # for a moment: it goes on, and is stopped again
    await pass_seconds(mock_clock, CHECK_INTERVAL_S)
    stopped[1] = True
    await pass_seconds(mock_clock, STOPPED_S - CHECK_INTERVAL_S)
    assert [process.times for process in processes] == [0, 0]
    await pass_seconds(mock_clock, CHECK_INTERVAL_S)
    assert [process.times for process in processes] == [1, 0]


async def test_system_tells_which_child_is_stopped():
    process = await trio.lowlevel.open_process(["sleep", "60"])
    try:
        assert not child_process._is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        with trio.fail_after(10):
            while not child_process._is_stopped(process.pid):  # noqa: ASYNC110  there is no event for it
                await trio.sleep(0.01)
        assert child_process._is_stopped(process.pid), "also when it is asked again"
        process.send_signal(signal.SIGCONT)
        with trio.fail_after(10):
            while child_process._is_stopped(process.pid):  # noqa: ASYNC110  there is no event for it
                await trio.sleep(0.01)
    finally:
        process.kill()
        await process.wait()
    assert not child_process._is_stopped(process.pid)


async def test_prepared_child_gets_its_messages_when_it_is_run():
    child = ChildProcess("child")
    with trio.fail_after(60):
        await child.prepare((sys.executable, "-c", COUNT_FRAMES))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child.run, control.Drain())
            while child._link is None:  # Trio's order of tasks is random
                await trio.lowlevel.checkpoint()
            child.send(control.FrontEnded("front 1"))
    assert child._child._process.returncode == 0


async def test_prepared_child_that_is_not_needed_ends():
    for end in ("discard", "kill", "run"):
        child = ChildProcess("child")
        with trio.fail_after(60):
            await child.prepare((sys.executable, "-c", COUNT_FRAMES))
            if end == "kill":
                child.kill()
            if end == "run":  # it has ended while it waited, which the one who runs it notices
                child._child._process.kill()
                await child.run(control.Drain())
            await child.discard()
        assert child._child._process.returncode is not None
