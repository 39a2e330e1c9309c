"""What the fleet tells of itself: pictures of models and nodes as they are now, and what a reload changed.

Frozen values for people and telemetry. Nobody decides by them: they are old when they arrive.
"""

from typing import Literal

import msgspec

NodeKind = Literal["engine", "command", "remote"]
ModelState = Literal["stopped", "loading", "ready", "draining", "stopping", "failed"]
NodeState = Literal["up", "down", "draining", "loading"]


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is known now. `node` is who has it, or would: of a remote model, the first who does.

    `seats` and `busy` are our own count of jobs; a model that is not ready has no seats. `load_progress`
    (0…1; None: not known) and `load_stage` say how far its load is, and `memory_bytes` what its processes
    take (0 if there are none, or if it is unknown). A failed model has a `problem`, and is tried
    again by the next job.

    Then counts of the node itself: `sequences` running and, of them, `waiting` for a slot, for a command and
    a remote model its jobs; `restarts` after a death; and the last lines that a command has printed
    (`output`). Those of a ready engine are None for all others: `cache_usage` is the part of the blocks that
    running sequences hold, `prefix_hit_rate` the part of the prompts' tokens that were found in the cache
    (both 0…1), means are over all steps since the load, and `kernel` is what computes them. `prefix_queries`
    and `prefix_hits` are tokens looked up and found since the load.

    Since the server was started: how often it was loaded (`loads`; the latest took `load_s`), could not be
    (`load_failures`), made room for another (`evictions`), and was given up because it was `stuck`.
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
        """Whether it has a process of ours, on its way up or down too: `GET /running` shows those."""
        return self.kind != "remote" and self.state not in ("stopped", "failed")


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A node: one of ours for each model that we may load, and those elsewhere, which have a `url`.

    `load` is what a node elsewhere says of itself, 0…; None if it says nothing. `ups` and `downs`: how often
    it came up and went down since the server was started.
    """

    id: str
    kind: NodeKind
    url: str | None
    models: tuple[str, ...]
    seats: int
    busy: int
    state: NodeState
    load: float | None = None
    problem: str | None = None
    ups: int = 0
    downs: int = 0


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """What a reload has changed, by name. Whoever is in none of the lists went on as before."""

    models_added: tuple[str, ...] = ()
    models_changed: tuple[str, ...] = ()
    models_removed: tuple[str, ...] = ()
    nodes_added: tuple[str, ...] = ()
    nodes_changed: tuple[str, ...] = ()
    nodes_removed: tuple[str, ...] = ()
