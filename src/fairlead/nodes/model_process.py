"""What runs a local model: the interface of such a process, and the kinds of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from fairlead.base.config import AnyModelConfig, CommandConfig, HealthConfig, ModelConfig
from fairlead.language.text.model import TextModel
from fairlead.nodes.command_node import CommandNode
from fairlead.nodes.engine_node import EngineNode, own_engine, worker_spec
from fairlead.nodes.engines.client import COMMAND
from fairlead.nodes.node import GpuUse, Node, NodeReport
from fairlead.nodes.status import ProcessStatus


class ModelProcess(Node, Protocol):
    """One run of a model: its processes, from their start to their end, as a node that takes jobs."""

    @property
    def pid(self) -> int | None:
        """The id of its first process, for measuring its memory; None if there is none."""

    @property
    def gpu(self) -> GpuUse | None:
        """The GPU memory that it takes; None if it is on no GPU, or if that is not known."""

    @property
    def stuck(self) -> str | None:
        """Why it was given up although it had not ended by itself; None if it was not."""

    def change_health(self, health: HealthConfig) -> None:
        """Use another health check from now on, if it has one."""

    def status(self) -> ProcessStatus:
        """Return its status."""

    async def run(self) -> None:
        """Start, serve, and end by raising: `LoadFailed` or, once it was ready, `NodeFailed`.

        Calls `report` with its limits when the model is loaded, and with None before the jobs fail.
        Cancelling ends it. When this is over, no process is left.
        """


@dataclass(frozen=True)
class ProcessOptions:
    """The options of one run of a model. Only engine models have a `text`.

    `on_progress` is called with the load's progress (0 to 1; None: not known) and its stage, `on_line` with
    each line that the processes print. `engine_command` starts an engine's process.
    """

    config: AnyModelConfig
    text: TextModel | None
    report: NodeReport
    health: HealthConfig
    on_progress: Callable[[float | None, str], None]
    on_line: Callable[[str], None]
    engine_command: Sequence[str] = COMMAND


ProcessFactory = Callable[[ProcessOptions], ModelProcess]


class ProcessKind(NamedTuple):
    """A kind of process that runs a model.

    `reports_progress`: the progress of a load is known from its beginning. `has_group`: its processes are a
    process group: the memory of that group is measured.
    """

    make: ProcessFactory
    reports_progress: bool
    has_group: bool


def make_process(options: ProcessOptions) -> ModelProcess:
    """Return a run of the model, of the kind that its configuration names."""
    return PROCESS_KINDS[options.config.kind].make(options)


def _make_command(options: ProcessOptions) -> CommandNode:
    assert isinstance(options.config, CommandConfig)
    return CommandNode(
        options.config,
        options.report,
        health=options.health,
        on_progress=options.on_progress,
        on_line=options.on_line,
    )


def _make_engine(options: ProcessOptions) -> EngineNode:
    config = options.config
    assert isinstance(config, ModelConfig)
    assert options.text is not None, "an engine's model has a vocabulary"
    return own_engine(
        options.text,
        worker_spec(msgspec.structs.replace(config, path=options.text.path)),
        options.report,
        on_progress=options.on_progress,
        on_line=options.on_line,
        command=options.engine_command,
    )


PROCESS_KINDS: dict[str, ProcessKind] = {
    "engine": ProcessKind(_make_engine, reports_progress=True, has_group=False),
    "command": ProcessKind(_make_command, reports_progress=False, has_group=True),
}
