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
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack

import trio

from fairlead import child_output
from fairlead.errors import LoadFailed
from fairlead.supervision import FailureBoundary, described, exit_description

LINES_KEPT = 200
LOG_WAIT_S = 0.5
KILL_WAIT_S = 5.0
# A shell may end before the server that it runs, which may need a moment more.
GROUP_WAIT_S = 1.0
POLL_INTERVAL_S = 0.02
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
        self._process: trio.Process | None = None
        self._is_killed = False
        self._secrets = tuple(secrets)
        self._secret = _pattern_of(self._secrets)
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)

    @property
    def ending(self) -> str | None:
        """How it ended; None while it runs."""
        status = None if self._process is None else self._process.returncode
        return None if status is None else exit_description(status)

    def output(self, lines: int = LINES_KEPT) -> list[str]:
        """Return the last lines that it printed, without empty ones."""
        return [line for line in self._lines if line][-lines:]

    async def run(self, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED) -> None:
        """Start the command, report its process id, and return when it has ended. Cancelling stops it.

        Raises `LoadFailed` if it cannot be started.
        """
        assert self._process is None, "a command is run once"
        process = self._process = await self._start()
        assert process.stdout is not None
        async with AsyncExitStack() as ending:  # last to first, each even if another fails
            ending.push_async_callback(_shielded, process.stdout.aclose)
            ending.push_async_callback(_shielded, self._kill, process)
            guard = await _guard(process.pid)
            ending.push_async_callback(_shielded, _stop_guard, guard)
            await self._live(process, task_status)

    async def _live(self, process: trio.Process, task_status: trio.TaskStatus[int]) -> None:
        """Read its output until it has ended, or until cancelled; then stop it."""
        async with trio.open_nursery() as nursery:
            # Shielded: its last output arrives after we are cancelled.
            log_read, reading = trio.Event(), trio.CancelScope(shield=True)
            nursery.start_soon(self._read_log, process.stdout, reading, log_read)
            try:
                task_status.started(process.pid)
                await process.wait()
                self.ended.set()
            finally:
                try:
                    with trio.CancelScope(shield=True):
                        await self._stop(process)
                        # A process that has left the group may keep the pipe open.
                        with trio.move_on_after(LOG_WAIT_S):
                            await log_read.wait()
                finally:
                    reading.cancel()

    async def _start(self) -> trio.Process:
        try:
            # Shielded: a process that was started but not recorded would run forever.
            with trio.CancelScope(shield=True):
                process = await trio.lowlevel.open_process(
                    list(self._command),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:
            raise LoadFailed(f"{self._name} cannot be started: {error}") from error
        self.pid = process.pid
        return process

    async def _stop(self, process: trio.Process) -> None:
        """End the whole group. Takes up to `unload_timeout_s`, and `KILL_WAIT_S`."""
        if process.returncode is None:
            with trio.move_on_after(self._unload_timeout_s):
                await self._request_stop(process)
                await process.wait()
                with trio.move_on_after(GROUP_WAIT_S):
                    while _signal_group(process.pid, None):  # noqa: ASYNC110  # no event reports their end
                        await trio.sleep(POLL_INTERVAL_S)
        await self._kill(process)

    async def _kill(self, process: trio.Process) -> None:
        """Kill the whole group, including what the command started and left behind, and reap the command."""
        if not self._is_killed:  # once: its id may be reused afterwards
            _signal_group(process.pid, signal.SIGKILL)
            self._is_killed = True
        with trio.move_on_after(KILL_WAIT_S):
            await process.wait()

    async def _request_stop(self, process: trio.Process) -> None:
        if not self._stop_command:
            _signal_group(process.pid, signal.SIGTERM)
            _signal_group(process.pid, signal.SIGCONT)  # a stopped process handles SIGTERM only then
            return
        command = [word.replace("${PID}", str(process.pid)) for word in self._stop_command]
        stopper = CommandProcess(
            f"{self._name} (stop)",
            command,
            environment=self._environment,
            unload_timeout_s=0,
            on_line=self._on_line,
            secrets=self._secrets,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run_stopper, stopper, process)
            await process.wait()

    async def _run_stopper(self, stopper: "CommandProcess", process: trio.Process) -> None:
        with FailureBoundary() as boundary:
            await stopper.run()
        if boundary.failure is not None:
            self._record_line(described(boundary.failure))
            _signal_group(process.pid, signal.SIGTERM)

    # Its output --------------------------------------------------------------------------------------

    async def _read_log(
        self, stream: trio.abc.ReceiveStream | None, scope: trio.CancelScope, ended: trio.Event
    ) -> None:
        assert stream is not None
        with scope:
            await child_output.read_lines(stream, self._record_line, self._on_partial_line)
        ended.set()

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


async def _guard(group: int) -> trio.Process:
    """Start a shell that ends the group when our death, even by SIGKILL, closes the shell's stdin.

    Otherwise a server that gets no more requests would hold its memory forever.
    """
    try:
        with trio.CancelScope(shield=True):
            guard = await trio.lowlevel.open_process(
                ["/bin/sh", "-c", GUARD, "guard", str(group)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
    except OSError as error:
        raise LoadFailed(f"the guard of a command's processes cannot be started: {error}") from error
    return guard


async def _stop_guard(guard: trio.Process) -> None:
    assert guard.stdin is not None
    async with guard.stdin:
        try:
            guard.kill()
            with trio.move_on_after(KILL_WAIT_S):
                await guard.wait()
        finally:  # once its stdin is closed, it would signal the group, which is gone
            guard.kill()
            with trio.move_on_after(KILL_WAIT_S):
                await guard.wait()


async def _shielded(end: Callable[..., Awaitable[object]], *arguments: object) -> None:
    """Run a cleanup step, which takes a bounded time, even after a cancellation."""
    with trio.CancelScope(shield=True):
        await end(*arguments)


def _signal_group(group: int, number: signal.Signals | None) -> bool:
    """Send a signal, or none, to a whole group; return whether there was a process to send it to."""
    try:
        os.killpg(group, number or 0)
    except (ProcessLookupError, PermissionError):  # no process, or none that is still ours
        return False
    return True
