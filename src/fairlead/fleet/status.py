"""What the fleet reports: the current status of models and nodes, and what a reload changed.

Frozen values for people and telemetry. No decision uses them, because they are outdated when they arrive.
"""

from typing import Literal

import msgspec

from fairlead.nodes.node import ModelState

NodeKind = Literal["engine", "command", "remote"]
NodeAvailability = Literal["up", "down", "draining", "loading"]


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is known now. `node` is the node that has it, or would; of several remote ones, the first.

    `seats` and `busy` are our own count of jobs; a model that is not ready has no seats. `load_progress`
    (0…1; None: not known) and `load_stage` are those of its load, and `memory_bytes` is what its processes
    take (0 if there are none, or if it is unknown). A failed model has a `problem`; the next job loads it
    again.

    Then counts of the node itself: `sequences` (of a command or a remote model, its jobs), and those of them
    that are `waiting` for a slot; `restarts` after a death; and the last lines that a command has printed
    (`output`). The following are None except for a ready engine. `cache_usage` is the fraction of blocks that
    running sequences hold, `prefix_hit_rate` the fraction of prompt tokens found in the prefix cache (both
    0…1). Means are over all steps since the load, and `kernel` is what computes them. `prefix_queries` and
    `prefix_hits` are tokens looked up and found since the load.

    Counts since the server was started: `loads` (the latest took `load_s`), `load_failures`, `evictions` for
    another model, and how often it was given up because it was `stuck`.
    """

    model: str
    kind: NodeKind
    node: str
    state: ModelState
    seats: int = 0
    busy: int = 0
    load_progress: float | None = 0.0
    load_stage: str = ""
    memory_bytes: int = 0
    ttl_s: float = 0.0
    problem: str | None = None
    aliases: tuple[str, ...] = ()
    unlisted: bool = False
    sequences: int = 0
    waiting: int = 0
    restarts: int = 0
    output: tuple[str, ...] = ()
    kernel: str | None = None
    blocks_free: int | None = None
    blocks_total: int | None = None
    slots_free: int | None = None
    cache_usage: float | None = None
    cached_tokens: int | None = None
    prefix_hit_rate: float | None = None
    preemptions: int | None = None
    mean_step_ms: float | None = None
    mean_step_tokens: float | None = None
    prefix_queries: int | None = None
    prefix_hits: int | None = None
    loads: int = 0
    load_s: float = 0.0
    load_failures: int = 0
    evictions: int = 0
    stuck: int = 0

    @property
    def is_resident(self) -> bool:
        """Whether it has a local process, also while it loads or stops: `GET /running` shows those."""
        return self.kind != "remote" and self.state not in ("stopped", "failed")


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A node: one for each local model, or a remote one, which has a `url`.

    `load` is what a remote node reports, 0 or more; None if it reports none. `ups` and `downs` count how
    often it came up and went down since the server was started.
    """

    id: str
    kind: NodeKind
    url: str | None
    models: tuple[str, ...]
    seats: int
    busy: int
    state: NodeAvailability
    load: float | None = None
    problem: str | None = None
    ups: int = 0
    downs: int = 0


class ConfigChanges(msgspec.Struct, frozen=True, kw_only=True):
    """What a reload has changed, by name. What is in none of the lists continues as before."""

    models_added: tuple[str, ...] = ()
    models_changed: tuple[str, ...] = ()
    models_removed: tuple[str, ...] = ()
    nodes_added: tuple[str, ...] = ()
    nodes_changed: tuple[str, ...] = ()
    nodes_removed: tuple[str, ...] = ()
