"""The supervisor's side of the models' processes: runs them as the dispatcher orders, and reports on them.

They outlive the dispatcher: the next one gets those that are up, and those that were loading end with it.
"""

from collections.abc import Callable, Sequence

import trio

from fairlead.base.config import HealthConfig
from fairlead.base.errors import LoadFailed, NodeFailed
from fairlead.base.messages import EngineStatistics, Ready
from fairlead.base.supervision import FailureBoundary, described, log_failure
from fairlead.distributed.supervisor import control
from fairlead.nodes.command_node import CommandNode
from fairlead.nodes.engines.client import COMMAND, Worker
from fairlead.nodes.limits import NodeLimits
from fairlead.nodes.node import Node

COUNTS_INTERVAL_S = 1.0

Send = Callable[[control.ToChildRole], None]


class OwnedProcesses:
    """All processes of models, by the names of their runs.

    `nursery` outlives dispatchers; `send` reports to the present one. `engine_command` starts an engine.
    """

    def __init__(self, nursery: trio.Nursery, send: Send, *, engine_command: Sequence[str] = COMMAND) -> None:
        self._nursery = nursery
        self._send = send
        self._engine_command = engine_command
        self._processes: dict[str, OwnedProcess] = {}
        self._epoch = 0

    def __len__(self) -> int:
        """Return the number of processes that have not ended."""
        return len(self._processes)

    @property
    def pids(self) -> list[int]:
        """The process ids of the models that are loaded."""
        ups = (process.up for process in self._processes.values())
        return [up.pid for up in ups if up is not None and up.pid is not None]

    def start(self, order: control.StartProcess) -> None:
        """Start a process in a task of its own."""
        kind = OwnedCommand if order.spec is None else OwnedEngine
        process = kind(order, self._send, self._engine_command)
        process.raise_epoch(self._epoch)
        self._processes[order.name] = process
        self._nursery.start_soon(self._run, process)

    def end(self, name: str) -> None:
        """End a process, if it has not ended."""
        if (process := self._processes.get(name)) is not None:
            process.scope.cancel()

    def change_health(self, name: str, health: HealthConfig) -> None:
        """Use another health check for a command."""
        if (process := self._processes.get(name)) is not None:
            process.change_health(health)

    def end_all(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            process.scope.cancel()

    def begin_epoch(self, epoch: int) -> tuple[control.RunningProcess, ...]:
        """Prepare for a new dispatcher: return the processes that are up, and end the others.

        Engines refuse grants of earlier dispatchers from now on.
        """
        self._epoch = epoch
        running = []
        for process in self._processes.values():
            process.raise_epoch(epoch)
            if process.up is None or process.scope.cancel_called:
                process.scope.cancel()
            else:
                running.append(control.RunningProcess(process.order, process.up))
        return tuple(running)

    async def _run(self, process: "OwnedProcess") -> None:
        boundary = FailureBoundary()
        try:
            with boundary, process.scope:
                await process.run()
        finally:
            failure = boundary.failure
            if failure is not None and not isinstance(failure, LoadFailed | NodeFailed):
                log_failure("model's process failed", failure, model=process.order.model)
            del self._processes[process.order.name]
            reason = "" if failure is None else described(failure)
            self._send(control.ProcessEnded(process.order.name, reason))


class OwnedProcess:
    """One run of a model. `up` is set while its model is loaded; cancelling `scope` ends it."""

    def __init__(self, order: control.StartProcess, send: Send, engine_command: Sequence[str]) -> None:
        self.order = order
        self.scope = trio.CancelScope()
        self.up: control.ProcessUp | None = None
        self._send = send
        self._engine_command = engine_command

    async def run(self) -> None:
        """Run until it ends, by raising."""
        raise NotImplementedError

    def raise_epoch(self, epoch: int) -> None:
        """Refuse grants of lower epochs from now on."""

    def change_health(self, health: HealthConfig) -> None:
        """Use another health check from now on, if it has one."""

    def _progressed(self, fraction: float | None, stage: str) -> None:
        self._send(control.ProcessProgress(self.order.name, fraction, stage))

    def _printed(self, line: str) -> None:
        self._send(control.ProcessLine(self.order.name, line))

    def _came_up(self, up: control.ProcessUp) -> None:
        self.up = up
        self._send(up)

    def _went_down(self, stuck: str | None) -> None:
        if self.up is not None:
            self.up = None
            self._send(control.ProcessDown(self.order.name, stuck))


class OwnedEngine(OwnedProcess):
    """An engine's process. Fronts connect to it themselves."""

    def __init__(self, order: control.StartProcess, send: Send, engine_command: Sequence[str]) -> None:
        super().__init__(order, send, engine_command)
        assert order.spec is not None
        self._worker = Worker(
            order.spec,
            name=order.model,
            command=engine_command,
            on_progress=self._progressed,
            on_ready=self._ready,
            on_stuck=lambda _error: self._went_down(self._worker.stuck),
            on_line=self._printed,
        )

    async def run(self) -> None:
        """Run until it ends, by raising."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._report_counts)
            try:
                await self._worker.run()
            finally:
                self._went_down(self._worker.stuck)

    def raise_epoch(self, epoch: int) -> None:
        """Refuse grants of lower epochs from now on."""
        self._worker.raise_epoch(epoch)

    def _ready(self, ready: Ready) -> None:
        self._came_up(control.ProcessUp(self.order.name, self._worker.pid, ready=ready))

    async def _report_counts(self) -> None:
        reported = EngineStatistics()
        while True:
            await trio.sleep(COUNTS_INTERVAL_S)
            if self._worker.statistics != reported:
                reported = self._worker.statistics
                self._send(control.ProcessCounts(self.order.name, reported))


class OwnedCommand(OwnedProcess):
    """A command's processes. Fronts relay requests to its server themselves."""

    def __init__(self, order: control.StartProcess, send: Send, engine_command: Sequence[str]) -> None:
        super().__init__(order, send, engine_command)
        assert order.config is not None, "a command has one"
        self._node = CommandNode(
            order.config,
            self._report,
            health=order.health,
            on_progress=self._progressed,
            on_line=self._printed,
        )

    async def run(self) -> None:
        """Run until it ends, by raising."""
        await self._node.run()

    def change_health(self, health: HealthConfig) -> None:
        """Use another health check from now on, if it has one."""
        self._node.change_health(health)

    def _report(self, _node: Node, limits: NodeLimits | None) -> None:
        if limits is None:
            self._went_down(self._node.stuck)
        else:
            self._came_up(
                control.ProcessUp(
                    self.order.name, self._node.pid, limits=limits, command=self._node.started_config
                )
            )
