"""What the routes are given. The composition root fills it in; tests fill it in with fakes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import trio

from fairlead.api.body import told
from fairlead.config import AnyModelConfig, Config, NodeConfig, SelectorConfig
from fairlead.errors import ModelNotFound
from fairlead.job import Job
from fairlead.nodes.deltas import Deltas
from fairlead.nodes.output import ProcessOutput
from fairlead.nodes.status import Changes, ModelStatus, NodeStatus
from fairlead.tally import TallyStatistics
from fairlead.text.model import TextModel


class Answer(Protocol):
    """What a route has once the first delta is there; None for what only those who waited have."""

    @property
    def deltas(self) -> Deltas:
        """The answer, as it comes."""

    @property
    def estimated_wait_s(self) -> int | None:
        """What was estimated on arrival, whole seconds."""

    @property
    def estimated_wait_p90_s(self) -> int | None:
        """The wait that nine of ten do not exceed; None also where the estimate in force knows none."""

    @property
    def queue_position(self) -> int | None:
        """The place in the queue on arrival, from 1."""


class Waiting(Protocol):
    """What can be said now of a job that waits."""

    @property
    def position(self) -> int:
        """Its place in the queue, from 1."""

    @property
    def estimated_wait_s(self) -> int:
        """What is left of its wait, whole seconds."""


class Gateway(Protocol):
    """One job's life, in a task of its own. No two jobs it is given at a time share a `request_id`."""

    async def serve(self, job: Job, *, task_status: trio.TaskStatus[Answer] = ...) -> None:
        """Report `started` with the `Answer`; raise a `FairleadError` before that, never after."""

    def cancel(self, request_id: str, owner: str) -> bool:
        """End a job of this owner with `Cancelled`; False if there is none of that id to end."""

    def waiting(self, request_id: str) -> Waiting | None:
        """Return how a job waits; None if it has its seat, or has left."""

    def statistics(self) -> TallyStatistics:
        """Return what became of all jobs."""


class Fleet(Protocol):
    """All models and nodes, ours and those elsewhere. Models go by their canonical names."""

    @property
    def instance(self) -> str:
        """What this server says it is, so that it knows itself when it is told to be its own node."""

    def models(self) -> list[ModelStatus]:
        """Return every model that is known now: configured, or told of by a node elsewhere."""

    def model(self, name: str) -> ModelStatus | None:
        """Return one of them; None if it is not known."""

    def nodes(self) -> list[NodeStatus]:
        """Return every node: engines, commands, remote ones."""

    def has(self, model: str) -> bool:
        """Whether some node holds the model or could load it."""

    def offers(self, model: str) -> bool:
        """Whether a job for the model may wait for a node; not if all nodes that have it are drained."""

    def configured(self, model: str) -> AnyModelConfig | None:
        """Return the present configuration of a model of ours; None of others."""

    def is_relayed(self, model: str) -> bool:
        """Whether a command or a remote node may run it: a job for it carries `relay`."""

    def output(self, model: str) -> ProcessOutput:
        """Return what the processes of a model of ours have printed. Raises `InvalidRequest` for others."""

    @property
    def lists_aliases(self) -> bool:
        """Whether aliases are listed as models of their own."""

    def sends_loading_state(self, model: str) -> bool:
        """Whether streamed chats for a model of ours report the progress of its load."""

    async def load(self, model: str) -> None:
        """Have the model loaded, in its turn, and return when it is ready; joins a load under way.

        Raises `LoadFailed`.
        """

    async def unload(self, model: str, *, force: bool = False, wait: bool = False) -> None:
        """Return when the model's process is gone. Its jobs are finished first; with `force` they fail.

        Jobs and loads that wait for it end with `ModelUnloaded`; with `wait` they wait for its next load.
        """

    async def add_node(self, config: NodeConfig) -> None:
        """Take a node elsewhere into service. Raises `InvalidRequest` if its id is taken."""

    async def remove_node(self, node_id: str) -> None:
        """Return when the node is out of service, its jobs finished. Raises `NotFound`."""

    def drain_node(self, node_id: str) -> None:
        """Give the node no more jobs; it stays listed. Raises `NotFound`."""

    async def reload(self, config: Config) -> Changes:
        """Go by another configuration. A model that did not change keeps its process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Everything the routes act on.

    `models` are those whose tokens are known here, by canonical name: the engine's. Others, which only
    `fleet` knows, are relayed. `aliases` maps other names to canonical ones, of all kinds of models, and
    `selectors` has the names that stand for several. All three may change while we serve.

    `estimate` returns, for a model, tenant and priority, what a new job would be told: `position`,
    `estimated_wait_s` and `estimated_wait_p90_s`. `problems` returns what is wrong, by model;
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
        """Return the canonical name of the model of that name or alias. Raises `ModelNotFound`."""
        model = self.aliases.get(name, name)
        if not self.serves(model):
            raise ModelNotFound(f"the model {told(name)} is not served here", param="model")
        return model

    def serves(self, model: str) -> bool:
        """Whether jobs for the model of this canonical name can be taken.

        An engine's model that is about to go has a node still, but nobody who could read its jobs.
        """
        return model in self.models or self.fleet.is_relayed(model)
