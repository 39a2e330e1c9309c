"""The supervisor's end of a child, with small programs in place of the roles."""

import sys

import trio
import trio.testing

from fairlead.roles import control
from fairlead.roles.child_process import SILENCE_S, ChildProcess

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
    child = ChildProcess("child", lambda _message: None)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child.run, control.Drain(), (sys.executable, "-c", COUNT_FRAMES))
            while child._link is None:  # Trio's order of tasks is random
                await trio.lowlevel.checkpoint()
            assert child.pid is None, "it has started already"
            child.send(control.FrontEnded("front 0.1"))


class Killed:
    """Counts the calls of `kill`, in place of a process."""

    def __init__(self):
        self.times = 0

    def kill(self):
        self.times += 1


async def test_child_is_killed_for_its_own_silence_and_not_for_a_pause_of_the_supervisor(mock_clock, nursery):
    async def pass_seconds(count):
        for _ in range(count):
            mock_clock.jump(1.001)
            await trio.testing.wait_all_tasks_blocked()

    child, process = ChildProcess("child", lambda _message: None), Killed()
    nursery.start_soon(child._watch, process)
    await trio.testing.wait_all_tasks_blocked()
    child._receive(control.Alive())
    await pass_seconds(3)
    mock_clock.jump(60)  # neither process ran
    await trio.testing.wait_all_tasks_blocked()
    assert process.times == 0
    child._receive(control.Alive())
    await pass_seconds(int(SILENCE_S))
    assert process.times == 0
    await pass_seconds(2)
    assert process.times > 0
