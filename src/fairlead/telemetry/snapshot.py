"""The server at one moment, as one frozen value: pulled from what everything stateful says of itself.

The dashboard shows it and `/metrics` is made of it. Nothing here is pushed from below, and nothing is kept
but what a rate needs: how many tokens there were at the last looks.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
import trio

from fairlead.journey import LEFT, SUCCESS
from fairlead.nodes.status import ModelStatus, NodeStatus
from fairlead.tally import TallyStatistics

# Codes that say that there was no capacity for a job, which may come again. The dashboard says: rejected.
REJECTIONS = (
    *("queue_full", "displaced", "no_queue", "bodies_full", "rate_limited"),
    *("queue_timeout", "model_loading", "no_node", "draining"),
)
# A rate is that of the last seconds, or since the look before that if nobody has looked since.
RATE_OVER_S = 3.0
# Looks closer together than this are not kept, however many people look.
LOOKS_APART_S = 0.1


class QueueTotals(msgspec.Struct, frozen=True):
    """The queue: jobs that wait and run, how many may, and means over the last 100 jobs."""

    waiting: int = 0
    running: int = 0
    capacity: int = 0
    seats: int = 0
    mean_wait_s: float = 0.0
    mean_service_s: float = 0.0


class TokenTotals(msgspec.Struct, frozen=True):
    """Tokens since the server was started, those of running jobs too, and how many come in a second now.

    A prompt's count when its answer begins; those of a prompt that only another server has read are a guess.
    """

    prompt: int = 0
    generated: int = 0
    prompt_per_s: float = 0.0
    generated_per_s: float = 0.0


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Totals, and the state of every model and node. `at_s`: seconds since 1970.

    `rejected` has every code of `REJECTIONS`, `failed` those of other errors that there were, each with its
    number since the start. `answered`: jobs whose answer is whole. `cache_usage`: the part of the KV cache
    blocks of all loaded models that running sequences hold (0…1), None when no loaded model has any.
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
    """What is asked of the fleet."""

    def models(self) -> list[ModelStatus]:
        """Every model that is known now."""

    def nodes(self) -> list[NodeStatus]:
        """Every node."""


class Gateway(Protocol):
    """What is asked of the gateway."""

    def statistics(self) -> TallyStatistics:
        """What became of all jobs."""


class Sources(Protocol):
    """Whom a snapshot asks: the services of the api are one."""

    @property
    def fleet(self) -> Fleet:
        """Models and nodes."""

    @property
    def gateway(self) -> Gateway:
        """Jobs."""

    @property
    def ready(self) -> Callable[[], bool]:
        """Whether a job would not have to wait for a model to be loaded."""

    @property
    def queue_statistics(self) -> Callable[[], dict[str, Any]]:
        """The queue's totals, as `QueueTotals` has them."""


class Overview:
    """Takes snapshots. One for each server, shared by all who look: each look is a pull of everything.

    `refusals` returns how many requests were refused before they became jobs, by code. A look costs some
    tens of microseconds and one for each running job.
    """

    def __init__(self, sources: Sources, refusals: Callable[[], Mapping[str, int]] = dict) -> None:
        self._sources = sources
        self._refusals = refusals
        self._rates = _Rates()

    def snapshot(self) -> Snapshot:
        """Return the server as it is now."""
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
    """Two counts and how fast they grow, from looks that come when they come."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int, int]] = deque()

    def look(self, now_s: float, prompt: int, generated: int) -> tuple[float, float]:
        """Return how much was added in a second, of each; 0 at the first look."""
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
    blocks = [(model.cache_usage, model.blocks_total) for model in models if model.state == "ready"]
    told = [(usage, total) for usage, total in blocks if usage is not None and total]
    if not told:
        return None
    return round(sum(usage * total for usage, total in told) / sum(total for _, total in told), 4)
