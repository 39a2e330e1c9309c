"""The server's state at one moment, as one frozen value, pulled from all components that have state.

The dashboard shows it and `/metrics` is made from it. No component pushes values here. Only what a rate needs
is kept: the token counts of the last snapshots.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
import trio

from fairlead.fleet.status import ModelStatus, NodeStatus
from fairlead.job_metrics import JobStatistics
from fairlead.request_timeline import LEFT, SUCCESS

# Error codes for missing capacity: the job may be retried. The dashboard calls them rejected.
REJECTIONS = (
    *("queue_full", "displaced", "no_queue", "bodies_full", "rate_limited"),
    *("queue_timeout", "model_loading", "no_node", "draining"),
)
# The window of a rate. If there was no snapshot within it, the rate is since the one before.
RATE_OVER_S = 3.0
# Samples closer together than this are not kept, however often snapshots are taken.
LOOKS_APART_S = 0.1


class QueueTotals(msgspec.Struct, frozen=True):
    """The queue: waiting and running jobs, the limits of both, and means over the last 100 jobs."""

    waiting: int = 0
    running: int = 0
    capacity: int = 0
    seats: int = 0
    mean_wait_s: float = 0.0
    mean_service_s: float = 0.0


class TokenTotals(msgspec.Struct, frozen=True):
    """Tokens since the server started, also those of running jobs, and tokens per second now.

    A prompt's tokens count when its answer begins; they are a guess if only a remote server has read the
    prompt.
    """

    prompt: int = 0
    generated: int = 0
    prompt_per_s: float = 0.0
    generated_per_s: float = 0.0


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Totals, and the state of every model and node. `at_s`: seconds since 1970.

    `rejected` has every code of `REJECTIONS`, `failed` the other errors that occurred, each with its count
    since the start. `answered`: jobs with a complete answer. `cache_usage`: the part of the KV cache blocks
    of all loaded models that running sequences hold (0…1), None when no loaded model has any.
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


class Fleet(Protocol):
    """The part of the fleet that a snapshot reads."""

    def models(self) -> list[ModelStatus]:
        """Return every model that is known now."""

    def nodes(self) -> list[NodeStatus]:
        """Return every node."""


class Gateway(Protocol):
    """The part of the gateway that a snapshot reads."""

    def statistics(self) -> JobStatistics:
        """Return the metrics of all jobs."""


class Sources(Protocol):
    """What a snapshot is taken from; the services of the API are one."""

    @property
    def fleet(self) -> Fleet:
        """Models and nodes."""

    @property
    def gateway(self) -> Gateway:
        """Jobs."""

    @property
    def ready(self) -> Callable[[], bool]:
        """Whether no job would have to wait for a model to be loaded."""

    @property
    def queue_statistics(self) -> Callable[[], dict[str, Any]]:
        """The queue's totals, with the keys of `QueueTotals`."""


class Overview:
    """Takes snapshots. One for each server, shared by all readers; each snapshot reads everything anew.

    `refusals` returns how many requests were refused before they became jobs, by code. A snapshot takes some
    tens of microseconds, and one microsecond for each running job.
    """

    def __init__(self, sources: Sources, refusals: Callable[[], Mapping[str, int]] = dict) -> None:
        self._sources = sources
        self._refusals = refusals
        self._rates = _Rates()

    def snapshot(self) -> Snapshot:
        """Return the server's state now."""
        sources = self._sources
        tally = sources.gateway.statistics()
        codes = tally.outcomes
        codes.update(self._refusals())
        answered = codes.pop(SUCCESS, 0)
        codes.pop(LEFT, None)
        rejected = {code: codes.pop(code, 0) for code in REJECTIONS}
        prompt, generated = tally.prompt_tokens, tally.generated_tokens
        prompt_per_s, generated_per_s = self._rates.look(trio.current_time(), prompt, generated)
        models = tuple(sources.fleet.models())
        return Snapshot(
            at_s=time.time(),
            ready=sources.ready(),
            queue=msgspec.convert(sources.queue_statistics(), QueueTotals),
            answered=answered,
            rejected=rejected,
            failed=dict(codes),
            tokens=TokenTotals(prompt, generated, round(prompt_per_s, 2), round(generated_per_s, 2)),
            cache_usage=_cache_usage(models),
            models=models,
            nodes=tuple(sources.fleet.nodes()),
        )


class _Rates:
    """Two counts and their rates of growth, from samples at irregular times."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int, int]] = deque()

    def look(self, now_s: float, prompt: int, generated: int) -> tuple[float, float]:
        """Add a sample; return how much each count grows in a second, 0 at the first sample."""
        looks = self._looks
        while len(looks) > 1 and looks[1][0] <= now_s - RATE_OVER_S:
            looks.popleft()
        then_s, prompt_then, generated_then = looks[0] if looks else (now_s, prompt, generated)
        if not looks or now_s - looks[-1][0] >= LOOKS_APART_S:
            looks.append((now_s, prompt, generated))
        past_s = now_s - then_s
        if past_s <= 0:
            return 0.0, 0.0
        return (prompt - prompt_then) / past_s, (generated - generated_then) / past_s


def _cache_usage(models: tuple[ModelStatus, ...]) -> float | None:
    engines = [model.engine for model in models if model.state == "ready" and model.engine is not None]
    total = sum(engine.blocks_total for engine in engines)
    used = sum(engine.cache_usage * engine.blocks_total for engine in engines)
    return round(used / total, 4) if total else None
