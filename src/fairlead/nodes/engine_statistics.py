"""What an engine node reports about itself: a status for people, and counts for telemetry."""

import msgspec

from fairlead.messages import EngineStatistics


class EngineStatus(msgspec.Struct, frozen=True):
    """The status of the node. Blocks and sequences are the child's own counts.

    `cache_usage` is the fraction of blocks that running sequences hold, `prefix_hit_rate` the fraction of
    prompt tokens found in the prefix cache (both 0…1). `mean_step_ms` and `mean_step_tokens` cover all steps
    since the model was loaded, as do `prefix_queries` and `prefix_hits`, in tokens. `kernel` names what
    computes the steps ("torch", "amx"; None before the model is loaded).
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
    """Counts for telemetry: the time and memory that the load took, and the child's own counts."""

    load_s: float
    weight_bytes: int
    kv_cache_bytes: int
    engine: EngineStatistics


def ratio(part: float, whole: float) -> float:
    """Return the quotient, rounded to four places; 0 if `whole` is 0."""
    return round(part / whole, 4) if whole else 0.0
