"""What runs a local model, and the factory for it: replace these to control processes differently."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from fairlead.config import AnyModelConfig, CommandConfig, HealthConfig
from fairlead.nodes.command_node import CommandNode
from fairlead.nodes.engine_node import EngineNode, worker_spec
from fairlead.nodes.node import GpuUse, Node, NodeReport
from fairlead.nodes.status import ProcessStatus
from fairlead.text.model import TextModel
from fairlead.worker.client import COMMAND


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


def make_process(options: ProcessOptions) -> ModelProcess:
    """Return a run of a command's server, or of the engine's child process."""
    config = options.config
    if isinstance(config, CommandConfig):
        return CommandNode(
            config,
            options.report,
            health=options.health,
            on_progress=options.on_progress,
            on_line=options.on_line,
        )
    assert options.text is not None, "an engine's model has a vocabulary"
    return EngineNode(
        options.text,
        worker_spec(msgspec.structs.replace(config, path=options.text.path)),
        options.report,
        isolate_tenants=config.kv_cache.isolate_tenants,
        on_progress=options.on_progress,
        on_line=options.on_line,
        command=options.engine_command,
    )
