"""Fake child processes: what `trio.lowlevel.open_process` returns, and the signals that they get.

A program is an async function that runs as a task. It is cancelled when its process dies. While the process
is stopped, it waits where it calls `Process.pause`.
"""

import errno
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import trio

from simulation.machine import Machine, Pollable, os_error
from simulation.network import Listening
from simulation.streams import End, connected

FIRST_PID = 50_000
SPAWN_S = 0.004

Program = Callable[["Process", Sequence[str]], Awaitable[int]]


class PipeStream(trio.abc.Stream):
    """The server's end of a pipe, as a Trio stream."""

    def __init__(self, machine: Machine, end: End) -> None:
        self._machine = machine
        self._end = end
        self._number = machine.open(end, "pipe")

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Wait for bytes; return none at the end."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check()
        while not self._end.is_ready("read"):
            await self._end.wait("read")
        try:
            self._machine.call("recv")
        except OSError as error:
            raise trio.BrokenResourceError from error
        with suppress(ConnectionResetError):
            return self._end.receive_now(max_bytes or 1 << 16)
        return b""

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Write all of it."""
        self._check()
        try:
            await self._end.send(bytes(data))
        except OSError as error:
            raise trio.BrokenResourceError from error

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until there is room."""
        await self._end.wait("write")

    def close(self) -> None:
        """Close it."""
        if self._number >= 0:
            self._end.closing()
            self._machine.close(self._number)
            self._number = -1

    async def aclose(self) -> None:
        """Close it, with a checkpoint."""
        self.close()
        await trio.lowlevel.checkpoint()

    def _check(self) -> None:
        if self._number < 0:
            raise trio.ClosedResourceError("this pipe is closed")


class _Watch(Pollable):
    """The pidfd by which the server waits for the end of a process."""

    def is_ready(self, what: str) -> bool:
        return True


class Process:
    """One process: the interface of `trio.Process` for the server, and what its program uses.

    `group` is its process group. `ends` are its inherited connections, by their descriptor in the server, and
    `listening` its listening sockets; they are closed when it dies. `slowness` multiplies the time of its
    pauses. `on_signal` is called with each signal that does not end it.
    """

    def __init__(self, machine: Machine, pid: int, args: Sequence[str], group: int) -> None:
        self.machine = machine
        self.pid = pid
        self.args = list(args)
        self.group = group
        self._status: int | None = None
        self.stdin: PipeStream | None = None
        self.stdout: PipeStream | None = None
        self.stderr: PipeStream | None = None
        self.ends: dict[int, End] = {}
        self.listening: dict[int, Listening] = {}
        self.output: End | None = None
        self.lifeline: End | None = None
        self.ignores_term = False
        self.slowness = 1.0
        self.computed_s = 0.0
        self.on_signal: Callable[[int], bool] = lambda _number: False
        self._scope = trio.CancelScope()
        self._running = trio.Event()
        self._running.set()
        self._ended = trio.Event()
        self._number = -1

    def __repr__(self) -> str:
        return f"<process {self.pid} {self.args[:4]}>"

    # trio.Process ------------------------------------------------------------------------------------

    @property
    def returncode(self) -> int | None:
        """Its exit status if it has ended; reading it reaps the process."""
        if self._status is not None and self._number >= 0:
            self.machine.close(self._number)
            self._number = -1
        return self._status

    async def wait(self) -> int:
        """Wait until it has ended; return its exit status."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def poll(self) -> int | None:
        """Return its exit status if it has ended."""
        return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Deliver a signal, unless it has ended."""
        self.machine.note("signal", self.pid, int(number))
        if not self.is_alive:
            return
        if number == signal.SIGKILL:
            self.exit_with(-number)
        elif number == signal.SIGSTOP:
            self._running = trio.Event()
        elif number == signal.SIGCONT:
            self._running.set()
        elif number == signal.SIGTERM and not self.ignores_term:
            if self.is_stopped:
                return  # it stays pending
            self.exit_with(-number)
        elif not self.is_stopped:
            self.on_signal(number)

    # State and program -------------------------------------------------------------------------------

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped by SIGSTOP."""
        return not self._running.is_set()

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._status is None

    async def pause(self, seconds: float) -> None:
        """Sleep for `seconds`, multiplied by its slowness; then wait while it is stopped."""
        if seconds:
            await trio.sleep(seconds * self.slowness)
            self.computed_s += seconds
        if self.is_stopped:
            await self._running.wait()

    def print(self, text: str) -> None:
        """Write a line to its output if there is room."""
        if self.output is not None:
            with suppress(OSError):
                self.output.send_now(text.encode() + b"\n")

    def exit_with(self, status: int) -> None:
        """End at once with this status."""
        if self.is_alive:
            self.machine.note("exit", self.pid, status)
            self._status = status
            self._scope.cancel()
            for end in [*self.ends.values(), self.output, self.lifeline]:
                if end is not None:
                    end.closing()
                    end.drop()
            for listening in self.listening.values():
                listening.drop()
            self._ended.set()

    async def run(self, program: Program) -> None:
        """Run a program until it returns or the process dies."""
        with self._scope:
            try:
                status = await program(self, self.args)
            except OSError:  # the server has closed its ends
                status = 1
            self.exit_with(status)

    def watched_by(self, number: int) -> None:
        """Set its pidfd in the server."""
        self._number = number


class Processes:
    """All processes that the server has started. `programs`: by a word in their command."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.programs: dict[str, Program] = {}
        self.started: list[Process] = []
        self._pids = count(FIRST_PID)
        self.on_start: Callable[[Process], None] = lambda _process: None

    @property
    def running(self) -> list[Process]:
        """The processes that have not ended."""
        return [process for process in self.started if process.is_alive]

    async def open(
        self,
        command: Sequence[str],
        *,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
        env: Any = None,
        **_: Any,
    ) -> Process:
        """Replace `trio.lowlevel.open_process`. Raises `OSError`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        pid = next(self._pids)
        process = Process(self.machine, pid, command, pid if start_new_session else os.getpid())
        try:
            if stdin == subprocess.PIPE:
                process.stdin, process.lifeline = self._pipe()
            if stdout == subprocess.PIPE:
                process.stdout, process.output = self._pipe()
            with trio.CancelScope(shield=True):
                await trio.sleep(SPAWN_S)  # fork and exec, in a thread
            self.machine.call("spawn")
            program = self._program(command)
            process.watched_by(self.machine.open(_Watch(), "pidfd"))
        except BaseException:
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
            raise
        for number in pass_fds:
            opened = self.machine.opened(number)
            if isinstance(opened, Listening):
                process.listening[number] = opened.inherited()
                continue
            assert isinstance(opened, End)
            opened.refs += 1
            process.ends[number] = opened
        self.started.append(process)
        self.machine.note("start", pid, *command[:6])
        self.on_start(process)
        self.machine.nursery.start_soon(process.run, program)
        return process

    def send_signal_to_group(self, group: int, number: int) -> None:
        """Replace `os.killpg`. Raises `ProcessLookupError`."""
        members = [process for process in self.running if process.group == group]
        if not members:
            raise os_error(errno.ESRCH)
        for process in members:
            if number:
                process.send_signal(number)

    def of_group(self, group: int) -> Iterator[Process]:
        """Yield the members of a group."""
        return (process for process in self.running if process.group == group)

    def _pipe(self) -> tuple[PipeStream, End]:
        ours, theirs = connected(self.machine, ("pipe", 0), ("pipe", 1))
        return PipeStream(self.machine, ours), theirs

    def _program(self, command: Sequence[str]) -> Program:
        for name, program in self.programs.items():
            if any(name in word for word in command):
                return program
        raise os_error(errno.ENOENT)
