"""What the fleet reports: the current status of models and nodes, and what a reload changed.

Values for people and telemetry. No decision uses them, because they are outdated when they arrive.
"""

from typing import Literal

import msgspec

from fairlead.base.config import ModelKind
from fairlead.nodes.node import ModelState
from fairlead.nodes.status import EngineStatus

NodeKind = Literal[ModelKind, "remote"]
NodeAvailability = Literal["up", "down", "draining", "loading"]


class LoadStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The load of a model: its `progress` (0…1; None: not known) and `stage`; 0 and empty when stopped.

    `duration_s` is the time that the latest load took, 0 before the first.
    """

    progress: float | None = 0.0
    stage: str = ""
    duration_s: float = 0.0


class LifetimeCounts(msgspec.Struct, kw_only=True):
    """Events of a local model since the server was started.

    loads: how often it was loaded.
    load_failures: how often that failed.
    restarts: how often it was started again after a death.
    evictions: how often it was unloaded for another model.
    stuck: how often it was given up because it made no progress.
    """

    loads: int = 0
    load_failures: int = 0
    restarts: int = 0
    evictions: int = 0
    stuck: int = 0


class RemoteDetails(msgspec.Struct, frozen=True, kw_only=True):
    """The address of a remote node, and the `load` that it reports, 0 or more; null if it reports none."""

    url: str
    load: float | None = None


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A node: one for each local model, or a remote one.

    id: its id.
    kind: what it is.
    models: the models that it has.
    seats: how many jobs it may run.
    busy: how many of ours it runs.
    state: whether it takes jobs.
    problem: why it does not, or what is wrong with it.
    ups: how often it came up since the server was started.
    downs: how often it went down.
    remote: what only remote nodes have.
    """

    id: str
    kind: NodeKind
    models: tuple[str, ...]
    seats: int
    busy: int
    state: NodeAvailability
    problem: str | None = None
    ups: int = 0
    downs: int = 0
    remote: RemoteDetails | None = None


class ReplicaCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas of a model on the cluster.

    wanted: how many there are to be.
    starting: how many are started.
    up: how many take jobs.
    draining: how many finish their jobs.
    """

    wanted: int = 0
    starting: int = 0
    up: int = 0
    draining: int = 0


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is known now.

    model: its name.
    kind: the kind of its node.
    node: the node that has it, or would; of several remote ones, the first.
    state: whether it is loaded.
    seats: how many jobs it may run; 0 if it is not ready.
    busy: the seats that our own jobs hold.
    sequences: those of its node; of a command or a remote model, its jobs.
    waiting: how many of them wait for a slot.
    memory_bytes: what its processes take; 0 if there are none, or if it is unknown.
    ttl_s: when it is unloaded if it is not used; 0: never.
    problem: why it has failed; the next job loads it again.
    aliases: its other names.
    unlisted: whether lists of models leave it out.
    output: the last lines that a command has printed; a key with the role user gets none.
    load: how far it is loaded.
    counts: its events.
    engine: the state of a ready engine; None for other models.
    replicas: only of a model that runs on a cluster.
    """

    model: str
    kind: NodeKind
    node: str
    state: ModelState
    seats: int = 0
    busy: int = 0
    sequences: int = 0
    waiting: int = 0
    memory_bytes: int = 0
    ttl_s: float = 0.0
    problem: str | None = None
    aliases: tuple[str, ...] = ()
    unlisted: bool = False
    output: tuple[str, ...] = ()
    load: LoadStatus = LoadStatus()
    counts: LifetimeCounts = msgspec.field(default_factory=LifetimeCounts)
    engine: EngineStatus | None = None
    replicas: ReplicaCounts | None = None

    @property
    def is_resident(self) -> bool:
        """Whether it has a local process, also while it loads or stops: `GET /running` shows those."""
        return self.kind != "remote" and self.state not in ("stopped", "failed")

    def as_node(self) -> NodeStatus:
        """Return the status of the local node that has the model."""
        states: dict[str, NodeAvailability] = {"ready": "up", "draining": "draining", "loading": "loading"}
        return NodeStatus(
            id=self.node,
            kind=self.kind,
            models=(self.model,),
            seats=self.seats,
            busy=self.busy,
            state=states.get(self.state, "down"),
            problem=self.problem,
            ups=self.counts.loads,
            downs=self.counts.loads - (self.state in ("ready", "draining")),
        )


class ConfigChanges(msgspec.Struct, frozen=True, kw_only=True):
    """What a reload has changed, by name. What is in none of the lists continues as before.

    models_added: models that are new.
    models_changed: models with other settings, from their next load on.
    models_removed: models that are gone when their jobs are finished.
    nodes_added: nodes that are new.
    nodes_changed: nodes with other settings.
    nodes_removed: nodes that are gone when their jobs are finished.
    """

    models_added: tuple[str, ...] = ()
    models_changed: tuple[str, ...] = ()
    models_removed: tuple[str, ...] = ()
    nodes_added: tuple[str, ...] = ()
    nodes_changed: tuple[str, ...] = ()
    nodes_removed: tuple[str, ...] = ()
