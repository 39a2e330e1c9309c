"""The supervisor's end of a child: its process, and the connection to it."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

import msgspec
import structlog
import trio

from fairlead.base.frame_link import FrameLink
from fairlead.distributed.supervisor import control
from fairlead.nodes.processes.child import Child

COMMAND = (sys.executable, "-P", "-m", "fairlead.server.processes.main")
# After the connection has ended, a child has this time to end, too.
END_WAIT_S = 5.0
# A child that has not reported for so long is stuck; its first report may take longer. A machine without free
# processors or memory can delay reports by seconds, and to end a front that is only slow costs its clients.
SILENCE_S = 5.0
START_WAIT_S = 120.0
# A child that is stopped by a signal is given up sooner: the system says so, and load cannot be the cause.
STOPPED_S = 1.0
CHECK_INTERVAL_S = 0.25

logger = structlog.get_logger("fairlead.supervisor")


class ChildProcess:
    """One run of a child. `handle` gets its messages, and is set before `run`; `name` is for the log.

    It inherits the `descriptors`. `was_ready`: whether it has reported that it is ready.
    """

    def __init__(self, name: str, descriptors: Sequence[int] = ()) -> None:
        self.name = name
        self.handle: Callable[[control.ToSupervisor], None] = lambda _message: None
        self._descriptors = descriptors
        self.pid: int | None = None
        self.was_ready = False
        self._heard_at: float | None = None
        self._link: FrameLink[control.ToSupervisor] | None = None
        self._stream: trio.SocketStream | None = None
        self._child: Child | None = None
        self._is_reaped = False
        self._prepared: trio.Event | None = None
        self._is_killed = False

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; it is dropped if the child has ended."""
        if self._link is not None:
            self._link.send(message)

    def end(self) -> None:
        """End the process; `run` returns when it has ended."""
        if self._link is not None:
            self._link.close()

    async def prepare(self, command: Sequence[str] = COMMAND) -> None:
        """Start the process before there is something to do: `run` then takes only the time of a message.

        It ends with `run` or `discard`. Raises `OSError` if it cannot be started.
        """
        assert self._stream is None, "a child is started once"
        self._prepared = trio.Event()
        ours, theirs = socket.socketpair()
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        try:
            await self._start(command, theirs)
        finally:
            self._prepared.set()

    async def run(self, first: msgspec.Struct, command: Sequence[str] = COMMAND) -> None:
        """Start the process, unless it was prepared, send it its `first` message, and wait for its end.

        Cancelling ends it. Raises `OSError` if it cannot be started.
        """
        theirs = None
        if self._stream is None:
            ours, theirs = socket.socketpair()
            self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        # Before the process is started, so that it gets all that happens after `first` was made.
        self._link = FrameLink(self._stream, control.to_supervisor_decoder, name=self.name)
        self._link.send(first)
        try:
            if theirs is not None:
                await self._start(command, theirs)
            elif self._prepared is not None:
                await self._prepared.wait()
            if self._child is None:
                raise OSError(f"{self.name} could not be started")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, self._child)
                await self._link.run(self._receive)
                nursery.cancel_scope.cancel()
            await self._reap()
        finally:
            self._link.close()
            await self.discard()

    def kill(self) -> None:
        """End the process at once, also one that is just being started."""
        self._is_killed = True
        if self._child is not None:
            self._child.kill()

    async def discard(self) -> None:
        """End the process, if there is one, and wait for its end; a cancellation has no effect on that."""
        with trio.CancelScope(shield=True):
            if self._prepared is not None:
                await self._prepared.wait()
            if self._stream is not None:
                await trio.aclose_forcefully(self._stream)
            await self._reap()

    async def _start(self, command: Sequence[str], connection: socket.socket) -> None:
        with connection:
            child = await Child.start(
                # The name is shown in the list of processes.
                [*command, self.name, str(connection.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[connection.fileno(), *self._descriptors],
            )
        self._child, self.pid = child, child.pid
        if self._is_killed:
            child.kill()

    def _receive(self, message: control.ToSupervisor) -> None:
        self._heard_at = trio.current_time()
        if isinstance(message, control.RoleReady):
            self.was_ready = True
        if not isinstance(message, control.Alive):
            self.handle(message)

    async def _watch(self, child: Child) -> None:
        """Kill a child whose event loop does not run: the system accepts connections for it all the same.

        Silence is counted in intervals, so that time in which this process itself did not run does not count:
        after that, every child seems to have been silent.
        """
        heard_at, silent_s, stopped_s = self._heard_at, 0.0, 0.0
        while True:
            await trio.sleep(CHECK_INTERVAL_S)
            silent_s += CHECK_INTERVAL_S
            stopped_s = stopped_s + CHECK_INTERVAL_S if _is_stopped(child.pid) else 0.0
            if self._heard_at != heard_at:
                heard_at, silent_s = self._heard_at, 0.0
            longest_s = START_WAIT_S if heard_at is None else SILENCE_S
            if silent_s > longest_s or stopped_s >= STOPPED_S:
                logger.error("process is stuck", process=self.name, silent_s=silent_s, stopped_s=stopped_s)
                child.kill()
                return

    async def _reap(self) -> None:
        """Wait for the end of the process, and kill it if it takes too long."""
        if self._child is None or self._is_reaped:
            return
        await self._child.end(grace_s=END_WAIT_S, request=self._child.wait)
        self._is_reaped = True
        logger.info("process ended", process=self.name, reason=self._child.ending)


def _is_stopped(pid: int) -> bool:
    """Return whether a child is stopped by a signal; False where the system cannot tell."""
    if not hasattr(os, "waitid"):
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False
