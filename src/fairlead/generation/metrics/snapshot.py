"""The server's state at one moment, as one frozen value, pulled from all components that have state.

The dashboard shows it and `/metrics` is made from it. No component pushes values here. Only the token counts
of the last snapshots are kept, from which rates are computed.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import trio

from fairlead.generation.metrics.job_metrics import FrontCounts
from fairlead.generation.metrics.totals import QueueTotals, TokenTotals
from fairlead.generation.timeline import LEFT, SUCCESS
from fairlead.router.fleet.access import FleetAccess
from fairlead.router.fleet.status import ModelStatus, NodeStatus

# Error codes for missing capacity; the client may retry the request. The dashboard's total «Rejected».
REJECTIONS = (
    *("queue_full", "displaced", "no_queue", "bodies_full", "rate_limited"),
    *("queue_timeout", "model_loading", "no_node", "draining"),
)
# The window of a rate. If there was no snapshot within it, the rate is since the one before.
RATE_WINDOW_S = 3.0
# The minimum time between two kept samples, however often snapshots are taken.
SAMPLE_INTERVAL_S = 0.1


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Totals, and the state of every model and node.

    at_s: seconds since 1970.
    ready: whether no job would wait for a model to be loaded.
    queue: the queue's totals.
    answered: jobs with a complete answer.
    rejected: has every code of `REJECTIONS`, with its count since the start.
    failed: the other errors that occurred, with theirs.
    tokens: totals and rates of tokens.
    cache_usage: the part of the KV cache blocks of all loaded models that running sequences hold, 0 to 1;
        None when no loaded model has any.
    models: all models.
    nodes: all nodes.
    """

    at_s: float
    ready: bool
    queue: QueueTotals
    answered: int
    rejected: dict[str, int]
    failed: dict[str, int]
    tokens: TokenTotals
    cache_usage: float | None
    models: tuple[ModelStatus, ...]
    nodes: tuple[NodeStatus, ...]


class Overview:
    """Takes snapshots. There is one per server; each snapshot reads everything again.

    fleet: has models and nodes.
    counts: returns the counts of jobs, and of requests refused before they became jobs.
    ready: returns whether no job would wait for a model to be loaded.
    queue_statistics: returns the values of `QueueTotals`.

    A snapshot takes some tens of microseconds, and one microsecond for each running job.
    """

    def __init__(
        self,
        fleet: FleetAccess,
        counts: Callable[[], FrontCounts],
        *,
        ready: Callable[[], bool],
        queue_statistics: Callable[[], dict[str, Any]],
    ) -> None:
        self._fleet = fleet
        self.counts = counts
        self._ready = ready
        self._queue_statistics = queue_statistics
        self._rates = _Rates()

    def snapshot(self) -> Snapshot:
        """Return the server's state now."""
        counts = self.counts()
        jobs = counts.jobs
        codes = jobs.outcomes
        codes.update(counts.refusals)
        answered = codes.pop(SUCCESS, 0)
        codes.pop(LEFT, None)
        rejected = {code: codes.pop(code, 0) for code in REJECTIONS}
        prompt, generated = jobs.prompt_tokens, jobs.generated_tokens
        prompt_per_s, generated_per_s = self._rates.add(trio.current_time(), prompt, generated)
        models = tuple(self._fleet.models())
        return Snapshot(
            at_s=time.time(),
            ready=self._ready(),
            queue=msgspec.convert(self._queue_statistics(), QueueTotals),
            answered=answered,
            rejected=rejected,
            failed=dict(codes),
            tokens=TokenTotals(prompt, generated, round(prompt_per_s, 2), round(generated_per_s, 2)),
            cache_usage=_cache_usage(models),
            models=models,
            nodes=tuple(self._fleet.nodes()),
        )


class _Rates:
    """Two counts and their rates of growth, from samples at irregular times."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, int]] = deque()

    def add(self, now_s: float, prompt: int, generated: int) -> tuple[float, float]:
        """Add a sample; return the rate of each count per second, 0 at the first sample."""
        samples = self._samples
        while len(samples) > 1 and samples[1][0] <= now_s - RATE_WINDOW_S:
            samples.popleft()
        then_s, prompt_then, generated_then = samples[0] if samples else (now_s, prompt, generated)
        if not samples or now_s - samples[-1][0] >= SAMPLE_INTERVAL_S:
            samples.append((now_s, prompt, generated))
        past_s = now_s - then_s
        if past_s <= 0:
            return 0.0, 0.0
        return (prompt - prompt_then) / past_s, (generated - generated_then) / past_s


def _cache_usage(models: tuple[ModelStatus, ...]) -> float | None:
    engines = [model.engine for model in models if model.state == "ready" and model.engine is not None]
    total = sum(engine.blocks_total for engine in engines)
    used = sum(engine.cache_usage * engine.blocks_total for engine in engines)
    return round(used / total, 4) if total else None
