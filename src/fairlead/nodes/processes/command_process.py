"""A command's process, with everything it starts: its process group, its output, its end.

Guarantees: when `run` is over, however it ended, no process of the group is left and no pipe is open; and
when this program dies, the group ends too. The output is copied to our stderr, and the last lines are kept.
Independent of the command's purpose.
"""

import os
import re
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial

import trio

from fairlead.base.errors import LoadFailed
from fairlead.base.runtime import child_output
from fairlead.base.supervision import FailureBoundary, described
from fairlead.nodes.processes.child import Child

LINES_KEPT = 200
LOG_WAIT_S = 0.5
HIDDEN = "***"
# A shorter key would also be found in other words.
SHORTEST_HIDDEN = 4
# SIGCONT lets a stopped process handle SIGTERM; SIGKILL ends it in any case.
GUARD = 'read -r _ || { kill -TERM "-$1"; kill -CONT "-$1"; sleep 5; kill -KILL "-$1"; }'


class CommandProcess:
    """One run of one command. `pid` is None before it starts. `ended` is set when its process has ended,
    though others of its group may still run, and `ending` says how it ended.

    It is stopped by `stop_command`, in which `${PID}` is its process id, or else by SIGTERM to its group, and
    killed if it still runs after `unload_timeout_s`. `name` begins each line of its output. `on_line` is
    called with each line, and `on_partial_line` with an unfinished one whenever it grows. Lines are shown
    without the `secrets`: some servers print their settings.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        stop_command: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        unload_timeout_s: float = 10.0,
        on_line: Callable[[str], None] = lambda _line: None,
        on_partial_line: Callable[[str], None] | None = None,
        secrets: Iterable[str] = (),
    ) -> None:
        self.pid: int | None = None
        self.ended = trio.Event()
        self._name = name
        self._command = command
        self._stop_command = stop_command
        self._environment = {**os.environ, **(environment or {})}
        self._unload_timeout_s = unload_timeout_s
        self._on_line = on_line
        self._on_partial_line = on_partial_line
        self._child: Child | None = None
        self._secrets = tuple(secrets)
        self._secret = _pattern_of(self._secrets)
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)

    @property
    def ending(self) -> str | None:
        """How it ended; None while it runs."""
        return None if self._child is None else self._child.ending

    def output(self, lines: int = LINES_KEPT) -> list[str]:
        """Return the last lines that it printed, without empty ones."""
        return [line for line in self._lines if line][-lines:]

    async def run(self, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED) -> None:
        """Start the command, report its process id, and return when it has ended. Cancelling stops it.

        Raises `LoadFailed` if it cannot be started.
        """
        assert self._child is None, "a command is run once"
        child = self._child = await self._start()
        async with AsyncExitStack() as ending:
            ending.push_async_callback(partial(child.end, grace_s=0, output_wait_s=0))
            guard = await _guard(child.pid)
            # While its stdin is open: at the end of that it would signal the group, which is gone.
            ending.push_async_callback(partial(guard.end, grace_s=0))
            await self._live(child, task_status)

    async def _live(self, child: Child, task_status: trio.TaskStatus[int]) -> None:
        """Read its output until it has ended, or until cancelled; then stop it."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child.read_output, self._record_line, self._on_partial_line)
            try:
                task_status.started(child.pid)
                await child.wait()
                self.ended.set()
            finally:
                await child.end(
                    grace_s=self._unload_timeout_s,
                    request=partial(self._request_stop, child),
                    output_wait_s=LOG_WAIT_S,
                )

    async def _start(self) -> Child:
        try:
            child = await Child.start(
                self._command,
                has_group=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )
        except (OSError, ValueError) as error:
            raise LoadFailed(f"{self._name} cannot be started: {error}") from error
        self.pid = child.pid
        return child

    async def _request_stop(self, child: Child) -> None:
        if not self._stop_command:
            await child.terminate()
            return
        command = [word.replace("${PID}", str(child.pid)) for word in self._stop_command]
        stopper = CommandProcess(
            f"{self._name} (stop)",
            command,
            environment=self._environment,
            unload_timeout_s=0,
            on_line=self._on_line,
            secrets=self._secrets,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run_stopper, stopper, child)
            await child.wait()

    async def _run_stopper(self, stopper: "CommandProcess", child: Child) -> None:
        with FailureBoundary() as boundary:
            await stopper.run()
        if boundary.failure is not None:
            self._record_line(described(boundary.failure))
            child.signal(signal.SIGTERM)

    # Its output --------------------------------------------------------------------------------------

    def _record_line(self, line: str) -> None:
        if self._secret is not None:
            line = self._secret.sub(HIDDEN, line)
        self._lines.append(line)
        self._on_line(line)
        child_output.relay(self._name, line)


def _pattern_of(secrets: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that finds the secrets where they are not a part of a longer word."""
    found = sorted({each for each in secrets if len(each) >= SHORTEST_HIDDEN}, key=len, reverse=True)
    if not found:
        return None
    return re.compile(rf"(?<![0-9A-Za-z])(?:{'|'.join(map(re.escape, found))})(?![0-9A-Za-z])")


async def _guard(group: int) -> Child:
    """Start a shell that ends the group when our death, even by SIGKILL, closes the shell's stdin.

    Otherwise a server that gets no more requests would hold its memory forever.
    """
    try:
        return await Child.start(
            ["/bin/sh", "-c", GUARD, "guard", str(group)],
            has_group=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        raise LoadFailed(f"the guard of a command's processes cannot be started: {error}") from error
