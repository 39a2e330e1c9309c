"""The supervisor's end of a child, with small programs in place of the roles."""

import sys

import trio

from fairlead.roles import control
from fairlead.roles.child_process import ChildProcess

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
            await trio.lowlevel.checkpoint()
            assert child.pid is None, "it has started already"
            child.send(control.FrontEnded("front 0.1"))
