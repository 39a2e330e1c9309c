"""The supervisor's end of a child: its process, and the connection to it."""

import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

import msgspec
import structlog
import trio

from fairlead.link.connection import FrameLink
from fairlead.roles import control
from fairlead.supervision import exit_description

COMMAND = (sys.executable, "-P", "-m", "fairlead.roles.main")
# After the connection has ended, a child has this time to end, too.
END_WAIT_S = 5.0
# A child that has not reported for so long is stuck; its first report may take longer.
SILENCE_S = 5.0
START_WAIT_S = 120.0

logger = structlog.get_logger("fairlead.supervisor")


class ChildProcess:
    """One run of a child. `handle` gets its messages; `name` is for the log."""

    def __init__(self, name: str, handle: Callable[[control.ToSupervisor], None]) -> None:
        self.name = name
        self.pid: int | None = None
        self._handle = handle
        self._heard_at: float | None = None
        self._link: FrameLink[control.ToSupervisor] | None = None

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; it is dropped if the child has ended."""
        if self._link is not None:
            self._link.send(message)

    async def run(self, first: msgspec.Struct, command: Sequence[str] = COMMAND) -> None:
        """Start the process, send it its `first` message, and return when it has ended.

        Cancelling ends it. Raises `OSError` if it cannot be started.
        """
        ours, theirs = socket.socketpair()
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        # Before the process is started, so that it gets all that happens after `first` was made.
        self._link = FrameLink(stream, control.to_supervisor_decoder, name=self.name)
        self._link.send(first)
        try:
            process = await self._start(command, theirs)
        except BaseException:
            self._link.close()
            await trio.aclose_forcefully(stream)
            raise
        try:
            async with stream, trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, process)
                await self._link.run(self._receive)
                nursery.cancel_scope.cancel()
            await self._reap(process)
        finally:
            self._link.close()
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(stream)
                await self._reap(process)

    async def _start(self, command: Sequence[str], connection: socket.socket) -> trio.Process:
        with connection:
            process = await trio.lowlevel.open_process(
                # The name is shown in the list of processes.
                [*command, self.name, str(connection.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[connection.fileno()],
            )
        self.pid = process.pid
        return process

    def _receive(self, message: control.ToSupervisor) -> None:
        self._heard_at = trio.current_time()
        if not isinstance(message, control.Alive):
            self._handle(message)

    async def _watch(self, process: trio.Process) -> None:
        """Kill a child whose event loop does not run: the system accepts connections for it all the same.

        Silence is counted in intervals, so that time in which this process itself did not run does not count:
        after that, every child seems to have been silent.
        """
        heard_at, silent_s = self._heard_at, 0.0
        while True:
            await trio.sleep(control.ALIVE_INTERVAL_S)
            silent_s += control.ALIVE_INTERVAL_S
            if self._heard_at != heard_at:
                heard_at, silent_s = self._heard_at, 0.0
            if silent_s > (START_WAIT_S if heard_at is None else SILENCE_S):
                logger.error("process is stuck", process=self.name, silent_s=round(silent_s, 1))
                process.kill()

    async def _reap(self, process: trio.Process) -> None:
        """Wait for the end of the process, and kill it if it takes too long."""
        if process.returncode is not None:
            return
        with trio.move_on_after(END_WAIT_S):
            await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()
        logger.info("process ended", process=self.name, reason=exit_description(process.returncode))
