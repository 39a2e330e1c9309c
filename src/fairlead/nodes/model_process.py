"""What runs a model of ours, and the factory that makes it: how processes are controlled is replaced here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import trio

from fairlead.config import AnyModelConfig, CommandConfig, HealthConfig
from fairlead.nodes.command_node import CommandNode
from fairlead.nodes.engine_node import EngineNode, worker_spec
from fairlead.nodes.model_memory import GpuUse
from fairlead.nodes.node import Node
from fairlead.nodes.remote_node import RemoteListener
from fairlead.text.model import TextModel
from fairlead.worker.client import COMMAND


class ModelProcess(Node, Protocol):
    """One run of a model: its processes, from their start to their end, as a node that takes jobs."""

    @property
    def is_ready(self) -> bool:
        """Whether the model is loaded now."""

    @property
    def pid(self) -> int | None:
        """Its first process, for measuring its memory; None if there is none."""

    @property
    def gpu(self) -> GpuUse | None:
        """What it takes of a GPU's memory; None if it is on none, or where that is not known."""

    @property
    def stuck(self) -> str | None:
        """Why it was ended although it had not ended by itself; None if it was not."""

    def change_health(self, health: HealthConfig) -> None:
        """Use another health check from now on, if it has one."""

    def status(self) -> msgspec.Struct:
        """Return a picture of it; the fields that `ModelStatus` has are shown."""

    async def run(self, *, task_status: trio.TaskStatus[Any]) -> None:
        """Start, call `started()` when the model is loaded, and end by raising. Cancelling ends it.

        Raises `LoadFailed` before it was loaded, and `NodeFailed` afterwards. The listener is told of
        `node_up`, and of `node_down` before the jobs fail. When this is over, no process is left.
        """


@dataclass(frozen=True)
class ProcessOptions:
    """What a run of a model is made with. `text` is an engine model's; commands have none.

    `on_progress` is called with how far loading is (0 to 1, None: not known) and what it does, and `on_line`
    with each line that its processes print.
    `engine_command` starts an engine's process.
    """

    config: AnyModelConfig
    text: TextModel | None
    listener: RemoteListener
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
            options.listener,
            health=options.health,
            on_progress=options.on_progress,
            on_line=options.on_line,
        )
    assert options.text is not None, "an engine's model has a vocabulary"
    return EngineNode(
        options.text,
        worker_spec(msgspec.structs.replace(config, path=options.text.path)),
        options.listener,
        isolate_tenants=config.kv_cache.isolate_tenants,
        on_progress=options.on_progress,
        on_line=options.on_line,
        command=options.engine_command,
    )
