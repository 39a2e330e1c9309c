"""Usage of finished jobs, for the store. Every job is counted once, when the gateway passes its timeline."""

import time
from collections.abc import Callable
from typing import Protocol

from fairlead.base.config import BudgetsConfig, Price
from fairlead.base.errors import Displaced
from fairlead.generation.timeline import RequestTimeline
from fairlead.router.quotas.access import user_tenant
from fairlead.router.quotas.budgets import counted_tokens, token_share
from fairlead.store.records import HOUR_S, MINUTE_S, UsageCounts, UsageKey
from fairlead.store.store import UsageWriter

MAX_COUNT = 2**40
"""The most tokens of a job that are believed: nodes elsewhere report their own."""
_UPSTREAM = "/upstream/"


class Prices(Protocol):
    """Returns the price of a model, by its canonical name, or its price for batches; None: it has none."""

    def __call__(self, model: str, *, is_batch: bool) -> Price | None:
        """See above."""
        ...


class UsageRecorder:
    """Adds finished jobs to the usage of this process.

    writer: collects the counts.
    price_of: returns prices.
    budgets: returns the settings of budgets.
    team_of: returns the team of a key, by its id; "": none.
    now: returns the seconds since 1970.
    """

    def __init__(
        self,
        writer: UsageWriter,
        *,
        price_of: Prices,
        budgets: Callable[[], BudgetsConfig],
        team_of: Callable[[str], str],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._writer = writer
        self._price_of = price_of
        self._budgets = budgets
        self._team_of = team_of
        self._now = now

    def add(self, timeline: RequestTimeline) -> None:
        """Count a finished job."""
        job = timeline.job
        key = job.owner.partition("/")[0]  # the rest is a user that a trusted key names
        prompt = _bounded(timeline.computed_prompt_tokens)
        cached = min(prompt, _bounded(timeline.cached_tokens))
        generated = _bounded(timeline.tokens)
        is_batch = job.when_idle
        # A line that was stopped for another job has used the seat, and is paid for when it is answered.
        is_paid = not (is_batch and timeline.outcome == Displaced.code)
        price = self._price_of(job.model, is_batch=is_batch) if is_paid else None
        share = token_share(self._budgets(), is_batch=is_batch) if is_paid else 0.0
        now = int(self._now())
        self._writer.add(
            UsageKey(
                hour=now // HOUR_S * HOUR_S,
                key=key,
                user=user_of(user_tenant(job.tenant, is_batch=is_batch), key),
                team=_text(self._team_of(key)) if key else "",
                model=_text(job.model),
                route=_text(route_of(job.path)),
                outcome=timeline.outcome,
                batch=is_batch,
                minute=now % HOUR_S // MINUTE_S,
            ),
            UsageCounts(
                requests=1,
                prompt_tokens=prompt,
                cached_tokens=cached,
                generated_tokens=generated,
                seat_ms=_seat_ms(timeline),
                wait_ms=_milliseconds(timeline.waited_s),
                cost_nano=0 if price is None else price.nano(prompt, cached, generated),
                budget_tokens=counted_tokens(prompt + generated, share),
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
