"""What nodes report about themselves, for people and telemetry."""

import msgspec

from fairlead.nodes.http.client import UpstreamStatistics


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a loaded engine: its KV cache, and its work since the load.

    `kernel` is what computes its steps ("torch", "amx"). `suspended` sequences have no slot, and go on later.
    `cache_usage` is the fraction of blocks that running and suspended sequences hold, `prefix_hit_rate` the
    fraction of prompt tokens found in the prefix cache (both 0…1). `prefix_queries` and `prefix_hits` are
    tokens looked up and found. `draft_tokens` and `accepted_tokens` are drafts of speculation that were tried
    and that the model has chosen. Means are over all steps. `block_size` is the tokens that a cache block
    holds, `cache_dtype` the type of its numbers. `keeps_prefixes`: blocks of ended sequences are kept for
    reuse.
    """

    kernel: str
    blocks_free: int
    blocks_total: int
    slots_free: int
    suspended: int
    cache_usage: float
    cached_tokens: int
    prefix_hit_rate: float
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    draft_tokens: int
    accepted_tokens: int
    mean_step_ms: float
    mean_step_tokens: float
    block_size: int
    cache_dtype: str
    keeps_prefixes: bool


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one run of a model. `waiting` is how many of its `sequences` wait for a slot or blocks.

    `output` has the last lines that a command has printed, and `engine` is the state of a loaded engine.
    """

    seats: int
    sequences: int
    waiting: int = 0
    output: tuple[str, ...] = ()
    engine: EngineStatus | None = None


class RemoteStatus(msgspec.Struct, frozen=True):
    """The status of a remote node. `load` is the load that it reports, 0 or more; None if it reports none.

    `ups` and `downs` count how often it came up and went down; `problem` is why it is not up, or why its list
    of models is not used.
    """

    id: str
    is_up: bool
    is_fairlead: bool
    models: tuple[str, ...]
    seats: int
    busy: int
    load: float | None
    connections: UpstreamStatistics
    ups: int
    downs: int
    problem: str | None = None
