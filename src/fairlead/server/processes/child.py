"""A child of the supervisor: its end of the connection, and the main function that all roles share."""

import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
import structlog
import trio

from fairlead.base.config import ConfigError
from fairlead.base.errors import FairleadError
from fairlead.base.frame_link import FrameLink
from fairlead.base.runtime import interpreter
from fairlead.base.telemetry import logs
from fairlead.distributed.supervisor import control
from fairlead.server.descriptors import raise_limit

logger = structlog.get_logger("fairlead.supervisor")

Play = Callable[["SupervisorLink", msgspec.Struct], Awaitable[None]]


class SupervisorLink:
    """The connection to the supervisor. Messages are kept until the role can take them.

    `on_end` is called when the supervisor has ended, and everything here is cancelled.
    """

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._handle: Callable[[control.ToChildRole], None] = self._keep
        self.on_end: Callable[[], None] = lambda: None
        self._first = trio.Event()
        self._received: list[control.ToChildRole] = []
        self._link = FrameLink(stream, control.to_role_decoder, name="supervisor")

    def send(self, message: msgspec.Struct) -> None:
        """Send a message."""
        self._link.send(message)

    async def run(self) -> None:
        """Receive messages until the supervisor has ended."""
        await self._link.run(self._receive)

    async def start(self) -> control.ToChildRole:
        """Return the first message."""
        await self._first.wait()
        return self._received.pop(0)

    def serve(self, handle: Callable[[control.ToChildRole], None]) -> None:
        """Handle messages from now on, first those that have arrived already."""
        self._handle = handle
        for message in self._received:
            handle(message)
        self._received.clear()

    def _receive(self, message: control.ToChildRole) -> None:
        self._handle(message)

    def _keep(self, message: control.ToChildRole) -> None:
        self._received.append(message)
        self._first.set()


class NoSupervisor(SupervisorLink):
    """In place of the connection, for a process that people start."""

    def __init__(self) -> None:
        self.on_end: Callable[[], None] = lambda: None
        self.ready = trio.Event()
        self._handle = self._keep
        self._received = []

    def send(self, message: msgspec.Struct) -> None:
        """Record when the role is ready; other messages have no receiver."""
        if isinstance(message, control.RoleReady):
            self.ready.set()

    def stop(self) -> None:
        """Report that the server is not ready any more."""
        self._handle(control.Stopping())

    def drain(self) -> None:
        """Take no more jobs."""
        self._handle(control.Drain())

    def _keep(self, message: control.ToChildRole) -> None:
        self._received.append(message)


def main(roles: dict[type, Play]) -> int:
    """Be what the first message says, until the supervisor ends; return the exit status."""
    # Ctrl-C at a terminal is sent to all processes: only the supervisor decides what follows.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interpreter.prepare()
    raise_limit()
    connection = socket.socket(fileno=int(sys.argv[-1]))
    os.set_inheritable(connection.fileno(), False)
    link = SupervisorLink(trio.SocketStream(trio.socket.from_stdlib_socket(connection)))
    with logs.log_streams():
        trio.run(partial(live, link, roles), strict_exception_groups=True)
    return 0


async def live(link: SupervisorLink, roles: dict[type, Play]) -> None:
    """Be what the first message of the supervisor says, until that ends."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_run_link, link, nursery.cancel_scope)
        start = await link.start()
        nursery.start_soon(_report_life, link)  # nobody reads what a process says that only waits
        assert isinstance(start, control.RunDispatcher | control.RunFront)
        config = control.unpack(start.config)
        logs.configure(json=config.log_json, level=config.log_level)
        try:
            await roles[type(start)](link, start)
        except (FairleadError, ConfigError, OSError, BaseExceptionGroup) as error:
            await _report(link, error)
        nursery.cancel_scope.cancel()


async def _run_link(link: SupervisorLink, scope: trio.CancelScope) -> None:
    await link.run()
    scope.cancel()
    link.on_end()


async def _report_life(link: SupervisorLink) -> None:
    while True:
        link.send(control.Alive())
        await trio.sleep(control.ALIVE_INTERVAL_S)


async def _report(link: SupervisorLink, error: BaseException) -> None:
    """Report why the role cannot be played, and wait to be ended; raise what is a bug."""
    cause = error
    while isinstance(cause, BaseExceptionGroup) and len(cause.exceptions) == 1:
        cause = cause.exceptions[0]
    if not isinstance(cause, FairleadError | ConfigError | OSError):
        raise error
    link.send(control.CannotStart(str(cause), is_bad_config=isinstance(cause, ConfigError)))
    await trio.sleep_forever()
