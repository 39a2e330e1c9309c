"""Runs the real supervisor with its dispatcher and fronts, each as a simulated process of one Trio run.

What each process is made of is the product's; the start of an interpreter, its signals and its log are not.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import msgspec
import trio

from fairlead.base.config import Config
from fairlead.base.telemetry import logs
from fairlead.distributed.supervisor import control
from fairlead.router.fleet.reload import ConfigSource
from fairlead.server.processes import child, dispatcher_role, front_role, supervisor
from fairlead.server.processes.main import ROLES
from simulation.parent import Parent
from simulation.processes import Process
from simulation.sockets import LISTENING, FakeSocket

ROLE_PROGRAM = "fairlead.server.processes.main"
START_S = 0.5  # until a process has imported its modules


class SupervisedServer(Parent):
    """A server of several processes. They are in `system.processes`, by name: "dispatcher 1", "front 1"."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.system.processes.programs[ROLE_PROGRAM] = self._play

    async def _serve(self, config: Config, source: ConfigSource) -> None:
        with _processes_alone():
            await supervisor.supervise(config, self.announcer, source=source)

    async def _play(self, process: Process, _args: Sequence[str]) -> int:
        """Be a child of the supervisor: see `fairlead.server.processes.child.main`."""
        await process.pause(START_S)
        (end,) = process.ends.values()
        end.refs += 1
        connection = FakeSocket(fileno=self.system.machine.open(end))
        link = child.SupervisorLink(trio.SocketStream(trio.socket.from_stdlib_socket(connection)))
        listening: list[FakeSocket] = []
        LISTENING.set(listening)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_end_waits, link)
                await child.live(link, {**ROLES, control.RunFront: partial(self._be_front, process)})
                nursery.cancel_scope.cancel()
        finally:
            for sock in listening:
                sock.close()
        return 0

    async def _be_front(self, process: Process, link: child.SupervisorLink, start: msgspec.Struct) -> None:
        """Be a front, with this process's descriptors of the sockets that it has inherited."""
        assert isinstance(start, control.RunFront)
        numbers = {}
        for number, listening in process.listening.items():
            listening.refs += 1
            numbers[number] = self.system.machine.open(listening)
        own = tuple(tuple(numbers[number] for number in some) for some in start.descriptors)
        await ROLES[control.RunFront](link, msgspec.structs.replace(start, descriptors=own))


async def _end_waits(link: child.SupervisorLink) -> None:
    """Wait until the process is killed; end what it waits for, which a shield would keep running."""
    try:
        await trio.sleep_forever()
    finally:
        link.on_end()


@contextmanager
def _processes_alone() -> Iterator[None]:
    """Keep children from configuring the log, and from freezing the heap, of this one process."""
    ignored: Callable[..., None] = lambda **_options: None  # noqa: E731
    with ExitStack() as patches:
        for owner, name in ((logs, "configure"), (dispatcher_role, "freeze"), (front_role, "freeze")):
            patches.enter_context(patch.object(owner, name, ignored))
        yield
