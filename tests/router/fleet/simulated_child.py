"""Simulated processes: tasks in the test's event loop, on its clock, with real pipes and sockets."""

import itertools
import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import trio

from engine.worker import fake_child
from fairlead.base import messages
from fairlead.base.frames import FrameSocket, PeerGone
from fairlead.engine.worker import main
from fairlead.engine.worker.loop import Loop
from fairlead.engine.worker.shared_channel import MOST_CLIENTS, SharedChannel

_pids = itertools.count(10_000_000)  # above the process ids of any system

Aside = Callable[[], AbstractContextManager[None]]


class SimulatedProcesses:
    """Replaces `trio.lowlevel.open_process` and `os.killpg`. `all` holds the processes that are left.

    A process with a socket is a model's child: it runs `fake_child`, and its path selects the behavior. All
    others only wait to be ended. `aside` is entered around each turn of a child.
    """

    def __init__(self, nursery: trio.Nursery, aside: Aside = nullcontext) -> None:
        self.all: list[SimulatedProcess] = []
        self._nursery = nursery
        self._aside = aside

    async def open_process(
        self, _command: Sequence[str], *, pass_fds: Sequence[int] = (), **_options: Any
    ) -> "SimulatedProcess":
        await trio.lowlevel.checkpoint()
        connection = socket.socket(fileno=os.dup(pass_fds[0])) if pass_fds else None
        process = SimulatedProcess(connection, self._aside)
        self.all.append(process)
        self._nursery.start_soon(process.run)
        return process

    def killpg(self, group: int, number: int) -> None:
        """Signal the one process of a group, unless it has been reaped."""
        found = [process for process in self.all if process.pid == group and not process.is_reaped]
        if not found:
            raise ProcessLookupError
        if number:
            found[0].send_signal(number)

    def left(self) -> list[int]:
        """Return the ids of processes that were not reaped; drop the others and their pipes."""
        for process in self.all:
            if process.is_reaped:
                del process.stdin, process.stdout
        self.all = [process for process in self.all if not process.is_reaped]
        return [process.pid for process in self.all]


IDLE_S = 0.25  # between two turns without work: less than any watchdog's time


class _Turns:
    """A `MessageInbox` that never waits: the process waits between its turns."""

    def __init__(self, channel: SharedChannel) -> None:
        self._channel = channel
        self.write = channel.write

    def read(self, *, wait_s: float | None) -> list[messages.ToEngine]:
        return self._channel.read(wait_s=0.0)


class SimulatedProcess:
    """The used part of `trio.Process`. While `hangs` is set, it does nothing but wait to be killed."""

    def __init__(self, connection: socket.socket | None, aside: Aside) -> None:
        self.pid = next(_pids)
        self.returncode: int | None = None
        self.is_reaped = False
        self.hangs = False
        self._connection = connection
        self._aside = aside
        self._scope = trio.CancelScope()
        self._has_ended = trio.Event()
        self._ends_with = 0
        self._stdin, stdin = os.pipe()
        stdout, self._stdout = os.pipe()
        self.stdin = trio.lowlevel.FdStream(stdin)
        self.stdout = trio.lowlevel.FdStream(stdout)
        self.stderr = None

    async def run(self) -> None:
        try:
            with self._scope:
                if self._connection is None:
                    os.write(self._stdout, b"a line\n")
                    await trio.sleep_forever()
                else:
                    await self._serve(self._connection)
        except PeerGone:
            pass
        finally:
            if self._connection is not None:
                self._connection.close()
            os.close(self._stdin)
            os.close(self._stdout)
            self.returncode = self._ends_with
            self._has_ended.set()

    async def _serve(self, connection: socket.socket) -> None:
        parent = FrameSocket(connection, messages.from_parent_decoder)
        await trio.lowlevel.wait_readable(connection)
        with ExitStack() as closing:
            with self._aside():
                spec = parent.receive()
                assert isinstance(spec, messages.WorkerSpec)
                listener = closing.enter_context(main._bound(spec.listen))
                model = fake_child.load(
                    spec, lambda done, stage: parent.send(messages.LoadProgress(done, stage))
                )
            await trio.sleep(0.01)
            with self._aside():
                engine, ready = main._engine(model, spec), main._ready(model)
                listener.listen(MOST_CLIENTS)
                channel = SharedChannel(parent, listener, ready)
                closing.callback(channel.close)
                loop = Loop(engine, model.runner, _Turns(channel))
                parent.send(ready)
                os.write(self._stdout, b"a line\n")
            while True:
                while self.hangs:  # noqa: ASYNC110  # there is no event for it
                    await trio.sleep(0.1)
                with self._aside():
                    loop.turn()
                await trio.sleep(IDLE_S if engine.idle else 0.001)

    async def wait(self) -> int:
        await self._has_ended.wait()
        self.is_reaped = True
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if number in (signal.SIGUSR1, signal.SIGCONT) or self.returncode is not None:
            return
        self._ends_with = -number
        self._scope.cancel()

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def hang(self) -> None:
        """Do nothing from the next turn on, until `hangs` is reset."""
        self.hangs = True
