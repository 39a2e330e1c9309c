"""The interfaces that routes use. The composition root implements them; tests use fakes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import trio

from fairlead.answer.deltas import Deltas
from fairlead.config import AnyModelConfig, Config, NodeConfig, SelectorConfig
from fairlead.errors import ModelNotFound, quoted
from fairlead.fleet.status import ConfigChanges, ModelStatus, NodeStatus
from fairlead.job import Job
from fairlead.job_metrics import JobStatistics
from fairlead.process.output import ProcessOutput
from fairlead.text.model import TextModel


class Answer(Protocol):
    """A job's answer, from its first delta on. What concerns its wait is None if it did not wait."""

    @property
    def deltas(self) -> Deltas:
        """The answer, as it arrives."""

    @property
    def estimated_wait_s(self) -> int | None:
        """The wait that was estimated on arrival, in whole seconds."""

    @property
    def estimated_wait_p90_s(self) -> int | None:
        """The wait that nine of ten do not exceed; None also if the current estimate has none."""

    @property
    def queue_position(self) -> int | None:
        """The queue position on arrival, from 1."""


class Waiting(Protocol):
    """The forecast for a queued job, as of now."""

    @property
    def position(self) -> int:
        """Its queue position, from 1."""

    @property
    def estimated_wait_s(self) -> int:
        """The rest of its wait, in whole seconds."""


class Gateway(Protocol):
    """The service that runs jobs, each in its own task. No two jobs in flight have the same `request_id`."""

    async def serve(self, job: Job, *, task_status: trio.TaskStatus[Answer] = ...) -> None:
        """Run a job. Report `started` with its `Answer`; raise a `FairleadError` before that, never after."""

    def cancel(self, request_id: str, owner: str) -> bool:
        """End a job of this owner with `Cancelled`; return False if there is none with that id."""

    def waiting(self, request_id: str) -> Waiting | None:
        """Return the forecast for a queued job; None if it has its seat or is over."""

    def statistics(self) -> JobStatistics:
        """Return the outcomes of all jobs."""


class Fleet(Protocol):
    """All models and nodes, local and remote. Models have their canonical names."""

    @property
    def instance(self) -> str:
        """This server's identity, by which it recognizes itself when configured as its own node."""

    def models(self) -> list[ModelStatus]:
        """Return every model that is known now: configured, or reported by a remote node."""

    def model(self, name: str) -> ModelStatus | None:
        """Return one of them; None if it is unknown."""

    def nodes(self) -> list[NodeStatus]:
        """Return every node: engines, commands, remote ones."""

    def has(self, model: str) -> bool:
        """Return whether some node holds the model or could load it."""

    def offers(self, model: str) -> bool:
        """Return whether a job for the model may wait for a node: not if all its nodes are drained."""

    def configured(self, model: str) -> AnyModelConfig | None:
        """Return the current configuration of a local model; None for others."""

    def is_relayed(self, model: str) -> bool:
        """Return whether a command or a remote node may run it: its jobs carry a `relay`."""

    def output(self, model: str) -> ProcessOutput:
        """Return the output of a local model's processes. Raises `InvalidRequest` for other models."""

    @property
    def lists_aliases(self) -> bool:
        """Whether aliases are listed as separate models."""

    def sends_loading_state(self, model: str) -> bool:
        """Return whether streamed chats for a local model report the progress of its load."""

    async def load(self, model: str) -> None:
        """Load the model in its turn; return when it is ready. Joins a load in progress.

        Raises `LoadFailed`.
        """

    async def unload(self, model: str, *, force: bool = False, wait: bool = False) -> None:
        """Unload the model; return when its process has ended. Its jobs finish first; with `force` they fail.

        Jobs and loads that wait for it end with `ModelUnloaded`; with `wait` they wait for its next load.
        """

    async def add_node(self, config: NodeConfig) -> None:
        """Add a remote node. Raises `InvalidRequest` if its id is taken."""

    async def remove_node(self, node_id: str) -> None:
        """Remove the node; return when its jobs are finished. Raises `NotFound`."""

    def drain_node(self, node_id: str) -> None:
        """Give the node no more jobs; it stays listed. Raises `NotFound`."""

    async def reload(self, config: Config) -> ConfigChanges:
        """Apply another configuration. A model that did not change keeps its process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Everything that the routes use.

    `models` are the engine's, by canonical name: their tokenizers are loaded here. Others, which only `fleet`
    knows, are relayed. `aliases` maps other names to canonical ones, of all kinds of models, and `selectors`
    has the names that stand for several. All three may change at run time.

    `estimate` returns, for a model, tenant and priority, the forecast for a new job: `position`,
    `estimated_wait_s` and `estimated_wait_p90_s`. `problems` returns the current problems, by model;
    `draining` whether the server takes no more jobs, because it is about to stop.
    """

    config: Config
    gateway: Gateway
    fleet: Fleet
    models: Mapping[str, TextModel]
    aliases: Mapping[str, str]
    selectors: Mapping[str, SelectorConfig] = field(default_factory=dict)
    ready: Callable[[], bool]
    queue_statistics: Callable[[], dict[str, Any]]
    estimate: Callable[[str, str, int], dict[str, Any]]
    problems: Callable[[], Mapping[str, str]] = dict
    draining: Callable[[], bool] = bool

    def canonical(self, name: str) -> str:
        """Return the canonical name of a model, from its name or an alias. Raises `ModelNotFound`."""
        model = self.aliases.get(name, name)
        if not self.serves(model):
            raise ModelNotFound(f"the model {quoted(name)} is not served here", param="model")
        return model

    def serves(self, model: str) -> bool:
        """Return whether jobs for the model of this canonical name can be taken.

        An engine's model that is being removed still has a node, but no tokenizer any more.
        """
        return model in self.models or self.fleet.is_relayed(model)
