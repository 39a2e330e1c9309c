"""One run of a program as a child process: what commands, engines, roles and Ray's launcher have in common.

Guarantees: when `Child.end` is over, the process has ended, is reaped, and none of its pipes is open.
"""

import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import trio

from fairlead.base.runtime import child_output
from fairlead.base.supervision import exit_description

KILLED_WAIT_S = 5.0
# Other processes of a group, such as a server behind its shell, may need a moment more than the first.
GROUP_WAIT_S = 1.0
# After the end of a process. One that has inherited its output may keep that open.
OUTPUT_WAIT_S = 1.0
POLL_INTERVAL_S = 0.02

Request = Callable[[], Awaitable[object]]


class Child:
    """A process that this one has started, and must `end`. `output_ended` is set when all of it was read.

    With `has_group`, it is the first of a process group, and signals go to the whole group.
    """

    def __init__(self, process: trio.Process, *, has_group: bool = False) -> None:
        self.pid = process.pid
        self.output_ended = trio.Event()
        self._process = process
        self._has_group = has_group
        self._is_killed = False
        self._reading = trio.CancelScope(shield=True)

    @classmethod
    async def start(cls, command: Sequence[str], *, has_group: bool = False, **options: Any) -> "Child":
        """Start a program, with the options of `trio.lowlevel.open_process`.

        Raises `OSError`, or `ValueError` for a command with a null character.
        """
        # Shielded: a process that was started but not recorded would run forever.
        with trio.CancelScope(shield=True):
            process = await trio.lowlevel.open_process(list(command), start_new_session=has_group, **options)
        return cls(process, has_group=has_group)

    @property
    def ending(self) -> str | None:
        """How it ended; None while it runs."""
        status = self._process.returncode
        return None if status is None else exit_description(status)

    async def wait(self) -> None:
        """Wait for its end."""
        await self._process.wait()

    async def read_output(
        self, on_line: Callable[[str], None], on_partial_line: Callable[[str], None] | None = None
    ) -> None:
        """Read what it prints, until the end of that or the end of `end`. See `child_output.read_lines`.

        Cancelling does not end this: the last lines arrive after the owner was cancelled.
        """
        stream = self._process.stdout or self._process.stderr
        assert stream is not None
        with self._reading:
            await child_output.read_lines(stream, on_line, on_partial_line)
        self.output_ended.set()

    def signal(self, number: int) -> bool:
        """Send a signal; return whether there was a process to send it to. With 0, only that is found out."""
        if not self._has_group:
            if number:
                self._process.send_signal(number)
            return self._process.returncode is None
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):  # no process, or none that is still ours
            return False
        return True

    async def terminate(self) -> None:
        """Send SIGTERM. A stopped process handles that only after SIGCONT."""
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)

    async def close_input(self) -> None:
        """Close its standard input."""
        assert self._process.stdin is not None
        await self._process.stdin.aclose()

    def kill(self) -> None:
        """Send SIGKILL, once: the id of a group that has ended may be used again."""
        if not self._is_killed:
            self.signal(signal.SIGKILL)
            self._is_killed = True

    async def end(
        self, *, grace_s: float, request: Request | None = None, output_wait_s: float = OUTPUT_WAIT_S
    ) -> None:
        """End it if it has not ended, reap it, and close its pipes. A cancellation has no effect on that.

        - `grace_s`: how long it may run after the request. Then it is killed, with its group.
        - `request`: asks it to end; None: `terminate`.
        - `output_wait_s`: how long to read the rest of its output afterwards.

        Each of these steps follows even if an earlier one raises.
        """
        process = self._process
        with trio.CancelScope(shield=True):
            async with AsyncExitStack() as ending:  # last to first
                for pipe in (process.stdin, process.stdout, process.stderr):
                    if pipe is not None:
                        ending.push_async_callback(pipe.aclose)
                ending.callback(self._reading.cancel)
                ending.push_async_callback(self._wait_for_output, output_wait_s)
                ending.push_async_callback(self._kill_and_reap)
                if process.returncode is None:
                    with trio.move_on_after(grace_s):
                        await (request or self.terminate)()
                        await process.wait()
                        await self._wait_for_group()

    async def _wait_for_group(self) -> None:
        if self._has_group:
            with trio.move_on_after(GROUP_WAIT_S):
                while self.signal(0):  # noqa: ASYNC110  # no event reports their end
                    await trio.sleep(POLL_INTERVAL_S)

    async def _kill_and_reap(self) -> None:
        self.kill()
        with trio.move_on_after(KILLED_WAIT_S):
            await self._process.wait()

    async def _wait_for_output(self, most_s: float) -> None:
        if self._process.stdout or self._process.stderr:
            with trio.move_on_after(most_s):
                await self.output_ended.wait()
