"""The dispatcher's side of the models' processes, which the supervisor runs: they take jobs from fronts."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

import msgspec
import trio

from fairlead.base.config import CommandConfig, HealthConfig, ModelConfig
from fairlead.base.errors import LoadFailed, NodeFailed
from fairlead.base.grant import Grant
from fairlead.base.job import Job
from fairlead.base.messages import EngineStatistics, WorkerSpec
from fairlead.base.sequence_seats import SequenceSeats
from fairlead.distributed.supervisor import control
from fairlead.nodes.engine_node import counts_of, engine_status, gpu_use, limits_of, worker_spec
from fairlead.nodes.limits import NodeLimits
from fairlead.nodes.model_process import ProcessOptions
from fairlead.nodes.node import GpuUse
from fairlead.nodes.processes.output import ProcessOutput
from fairlead.nodes.status import ProcessStatus
from fairlead.nodes.streams.sink import Sink

LINES_SHOWN = 10

Send = Callable[[msgspec.Struct], None]


class SupervisedProcesses:
    """All runs of models of this dispatcher, by name. `start.running` are those of an earlier one.

    `next_grant` returns the dispatcher's next grant: a run that is started now gets none before it.
    """

    def __init__(self, start: control.RunDispatcher, send: Send, next_grant: Callable[[], Grant]) -> None:
        self._send = send
        self._next_grant = next_grant
        self._directory = start.directory
        self._names = (f"{start.epoch}-{number}" for number in itertools.count(1))
        self._adoptable = {running.start.model: running for running in start.running}
        self._processes: dict[str, SupervisedProcess] = {}

    @property
    def adoptable(self) -> Sequence[str]:
        """The models that run already."""
        return list(self._adoptable)

    @property
    def engines(self) -> dict[str, WorkerSpec]:
        """The engines that are up, by model, as they were started."""
        return {
            each.order.model: each.order.spec
            for each in self._processes.values()
            if each.up is not None and each.order.spec is not None
        }

    @property
    def commands(self) -> dict[str, CommandConfig]:
        """The commands that are up, by model, as they were started."""
        return {
            each.order.model: each.up.command
            for each in self._processes.values()
            if each.up is not None and each.up.command is not None
        }

    def make(self, options: ProcessOptions) -> "SupervisedProcess":
        """Return a run of the model: one that the supervisor has with equal options, or a new one."""
        order = self._order(options)
        adopted = self._adoptable.pop(order.model, None)
        if adopted is not None and adopted.start.parts != order.parts:
            self._send(control.EndProcess(adopted.start.name))
            adopted = None
        process = SupervisedProcess(options, order, self._send, adopted, self._ended)
        self._processes[process.order.name] = process
        return process

    def end_others(self) -> None:
        """End the processes that nothing has adopted: of models that are not configured any more."""
        for running in self._adoptable.values():
            self._send(control.EndProcess(running.start.name))
        self._adoptable.clear()

    def end_with_supervisor(self) -> None:
        """Count all as ended, because the processes end with the supervisor."""
        for process in self._processes.values():
            process.handle(control.ProcessEnded(process.order.name, "the server has ended"))

    def handle(self, message: msgspec.Struct) -> None:
        """Handle a message of the supervisor about a process."""
        name = getattr(message, "name", "")
        if (process := self._processes.get(name)) is not None:
            process.handle(message)
        elif isinstance(message, control.ProcessDown | control.ProcessEnded):  # before it was adopted
            kept = self._adoptable.items()
            self._adoptable = {model: running for model, running in kept if running.start.name != name}

    def _order(self, options: ProcessOptions) -> control.StartProcess:
        config, name = options.config, next(self._names)
        if isinstance(config, ModelConfig):
            assert options.text is not None, "an engine's model has a vocabulary"
            spec = msgspec.structs.replace(
                worker_spec(msgspec.structs.replace(config, path=options.text.path)),
                listen=f"{self._directory}/{name}.sock",
                first_grant=self._next_grant(),
            )
            return control.StartProcess(name, config.name, spec)
        return control.StartProcess(name, config.name, config=config, health=options.health)

    def _ended(self, name: str) -> None:
        del self._processes[name]


class SupervisedProcess:
    """One run of a model: a `ModelProcess` whose processes belong to the supervisor."""

    def __init__(
        self,
        options: ProcessOptions,
        order: control.StartProcess,
        send: Send,
        adopted: control.RunningProcess | None,
        on_end: Callable[[str], None],
    ) -> None:
        self.id = f"{options.config.kind}:{options.config.name}"
        self.models = frozenset({options.config.name})
        self.order = order if adopted is None else adopted.start
        self.up: control.ProcessUp | None = None
        self.stuck: str | None = None
        self._options = options
        self._adopted = adopted
        self._send = send
        self._on_end = on_end
        self._was_up = False
        self._counts = EngineStatistics()
        self._output = ProcessOutput()
        self._reason = ""
        self._ended = trio.Event()

    @property
    def pid(self) -> int | None:
        """The id of its first process; None if it is not loaded."""
        return None if self.up is None else self.up.pid

    @property
    def gpu(self) -> GpuUse | None:
        """The GPU memory that it takes; None if it is on no GPU, or if that is not known."""
        return None if self.up is None else gpu_use(self.up.ready)

    def change_health(self, health: HealthConfig) -> None:
        """Use another health check from now on, if it has one."""
        if self.order.spec is None:
            self._send(control.ChangeHealth(self.order.name, health))

    def status(self) -> ProcessStatus:
        """Return its status. The dispatcher counts the jobs of a command."""
        if self.order.spec is None:
            limits = None if self.up is None else self.up.limits
            output = tuple(self._output.since(self._output.end - LINES_SHOWN))
            return ProcessStatus(seats=0 if limits is None else limits.seats, sequences=0, output=output)
        ready = None if self.up is None else self.up.ready
        return engine_status(ready, EngineStatistics() if ready is None else counts_of(ready, self._counts))

    def generate(
        self, job: Job, into: Sink, *, grant: Grant | None = None, seats: SequenceSeats | None = None
    ) -> AbstractAsyncContextManager[None]:
        """Never called: jobs run in fronts."""
        raise NotImplementedError

    async def run(self) -> None:
        """See `ModelProcess`. The process continues if the dispatcher dies."""
        if self._adopted is None:
            self._send(self.order)
        else:
            self.handle(self._adopted.up)
        try:
            await self._ended.wait()
        finally:
            self._went_down()
            self._send(control.EndProcess(self.order.name))
            with trio.CancelScope(shield=True):
                await self._ended.wait()
            self._on_end(self.order.name)
        if self._was_up:
            raise NodeFailed(self._reason)
        raise LoadFailed(self._reason)

    def handle(self, message: msgspec.Struct) -> None:
        """Handle a message of the supervisor about it."""
        match message:
            case control.ProcessProgress(_, fraction, stage):
                self._options.on_progress(fraction, stage)
            case control.ProcessLine(_, line):
                self._output.add(line)
                self._options.on_line(line)
            case control.ProcessCounts(_, counts):
                self._counts = counts
            case control.ProcessUp():
                self.up, self._was_up = message, True
                self._options.report(self, self._limits(message))
            case control.ProcessDown(_, stuck):
                self.stuck = stuck
                self._went_down()
            case control.ProcessEnded(_, reason):
                self._reason = reason
                self._ended.set()

    def _went_down(self) -> None:
        was_up, self.up = self.up is not None, None
        if was_up:
            self._options.report(self, None)

    def _limits(self, up: control.ProcessUp) -> NodeLimits:
        if up.limits is not None:
            return up.limits
        assert up.ready is not None
        return limits_of(up.ready)
