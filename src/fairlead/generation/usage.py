"""Usage of finished jobs, for the store. Every job is counted once, when the gateway passes its timeline."""

import time
from collections.abc import Callable

from fairlead.base.config import Price
from fairlead.generation.timeline import RequestTimeline
from fairlead.store.records import HOUR_S, UsageCounts, UsageKey
from fairlead.store.store import UsageWriter

MAX_COUNT = 2**40
"""The most tokens of a job that are believed: nodes elsewhere report their own."""
_UPSTREAM = "/upstream/"


class UsageRecorder:
    """Adds finished jobs to the usage of this process.

    writer: collects the counts.
    price_of: returns the price of a model, by its canonical name.
    team_of: returns the team of a key, by its id; "": none.
    now: returns the seconds since 1970.
    """

    def __init__(
        self,
        writer: UsageWriter,
        *,
        price_of: Callable[[str], Price | None],
        team_of: Callable[[str], str],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._writer = writer
        self._price_of = price_of
        self._team_of = team_of
        self._now = now

    def add(self, timeline: RequestTimeline) -> None:
        """Count a finished job."""
        job = timeline.job
        key = job.owner.partition("/")[0]  # the rest is a user that a trusted key names
        prompt = _bounded(timeline.computed_prompt_tokens)
        cached = min(prompt, _bounded(timeline.cached_tokens))
        generated = _bounded(timeline.tokens)
        price = self._price_of(job.model)
        self._writer.add(
            UsageKey(
                hour=int(self._now()) // HOUR_S * HOUR_S,
                key=key,
                user=user_of(job.tenant, key),
                team=_text(self._team_of(key)) if key else "",
                model=_text(job.model),
                route=_text(route_of(job.path)),
                outcome=timeline.outcome,
            ),
            UsageCounts(
                requests=1,
                prompt_tokens=prompt,
                cached_tokens=cached,
                generated_tokens=generated,
                seat_ms=_seat_ms(timeline),
                wait_ms=_milliseconds(timeline.waited_s),
                cost_nano=0 if price is None else price.nano(prompt, cached, generated),
            ),
        )


def user_of(tenant: str, key: str) -> str:
    """Return the user of a tenant: "" for addresses, and for a key that is a tenant of its own."""
    return "" if tenant == key or tenant.startswith("address/") else _text(tenant)


def route_of(path: str) -> str:
    """Return the path of a job's route, without what clients may choose in it."""
    return _UPSTREAM if path.startswith(_UPSTREAM) else path


def _seat_ms(timeline: RequestTimeline) -> int:
    if timeline.granted_s is None or timeline.ended_s is None:
        return 0
    return _milliseconds((timeline.ended_s - timeline.granted_s) * timeline.job.sequences)


def _milliseconds(seconds: float) -> int:
    return _bounded(round(seconds * 1000))


def _bounded(count: int) -> int:
    return max(0, min(count, MAX_COUNT))


def _text(name: str) -> str:
    """Return a name without characters that a database cannot hold."""
    return name.replace("\0", "").encode(errors="replace").decode()
