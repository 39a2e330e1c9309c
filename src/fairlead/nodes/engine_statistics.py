"""What an engine node tells of itself: a picture for people, and counts for telemetry."""

import msgspec

from fairlead.worker.wire import EngineStatistics


class EngineStatus(msgspec.Struct, frozen=True):
    """What the node shows of itself. Blocks and sequences are the child's own counts.

    `cache_usage` is the part of the blocks that running sequences hold, `prefix_hit_rate` the part of the
    prompts' tokens that were found in the cache (both 0…1). `mean_step_ms` and `mean_step_tokens` are over
    all steps since the model was loaded, as are `prefix_queries` and `prefix_hits`, in tokens; `kernel` is
    what computes them, in a word ("torch", "amx"; None before).
    """

    model: str
    state: str
    seats: int
    sequences: int
    waiting: int
    blocks_free: int
    blocks_total: int
    slots_free: int
    cache_usage: float
    cached_tokens: int
    prefix_hit_rate: float
    preemptions: int
    mean_step_ms: float
    mean_step_tokens: float
    load_progress: float
    load_stage: str
    kernel: str | None
    prefix_queries: int
    prefix_hits: int


class EngineNodeStatistics(msgspec.Struct, frozen=True):
    """Counts for telemetry: how long the load took, what it took, and the child's own counts of this life."""

    load_s: float
    weight_bytes: int
    kv_cache_bytes: int
    engine: EngineStatistics


def ratio(part: float, whole: float) -> float:
    """Return the quotient, to four places; 0 of nothing."""
    return round(part / whole, 4) if whole else 0.0
