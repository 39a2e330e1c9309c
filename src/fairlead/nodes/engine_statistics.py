"""What an engine node tells of itself: a picture for people, and counts for telemetry."""

import msgspec

from fairlead.worker.wire import EngineStatistics


class EngineStatus(msgspec.Struct, frozen=True):
    """What `GET /running` says of the node. Blocks and sequences are the child's own counts.

    `cache_usage` is the part of the blocks that running sequences hold, `prefix_hit_rate` the part of the
    prompts' tokens that were found in the cache (both 0…1). `mean_step_ms` and `mean_step_tokens` are over
    all steps since the model was loaded, and `kernel` is what computes them, in a word ("torch", "amx"; None
    before). `problem` says why `/health` is red, if this node is why.
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
    restarts: int
    kernel: str | None
    problem: str | None


class EngineNodeStatistics(msgspec.Struct, frozen=True):
    """Counts for telemetry. `engine`: the child's, which begin at 0 in each of its lives; the rest are ours.

    `stuck` counts the lives that the watchdog ended; `load_s` is how long the latest load took.
    """

    model: str
    ready: bool
    seats: int
    restarts: int
    stuck: int
    load_progress: float
    load_s: float
    weight_bytes: int
    kv_cache_bytes: int
    engine: EngineStatistics


def ratio(part: float, whole: float) -> float:
    """Return the quotient, to four places; 0 of nothing."""
    return round(part / whole, 4) if whole else 0.0
