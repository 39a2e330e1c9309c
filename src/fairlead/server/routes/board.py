"""The views of requests, people and times, and what of them a caller may see.

An operator's key sees all requests, for some models those for these models; any other key its own tenant's,
and a trusted one also those of the users that it names, unless the request names one. Without keys everybody
sees all, with tenants as the log shows them.
"""

import re
import time
from typing import Any, Literal

import msgspec

from fairlead.base.config import ApiKey, KeyLimits
from fairlead.base.errors import FairleadError, printable
from fairlead.dialects.body import invalid_field
from fairlead.generation.metrics.activity import WINDOWS, WindowTimings
from fairlead.generation.metrics.people import Person, SeatShare
from fairlead.generation.metrics.requests import KEPT, EndedRequest, RequestQuery, RequestScope
from fairlead.generation.metrics.tenants import TenantNames
from fairlead.router.dispatch.open_jobs import OpenJob
from fairlead.router.quotas.access import BATCH_PREFIX, Authenticator, owner_of
from fairlead.router.quotas.budgets import BudgetShare, shares_of
from fairlead.router.quotas.quotas import QuotaUsage
from fairlead.server.routes.request import Request, Response, json_response
from fairlead.server.routes.request_caller import owner_so_far, tenant_so_far
from fairlead.server.routes.request_reader import RequestReader

STATES = ("waiting", "running", "ended")
_NUMBER = re.compile("[0-9]{1,4}", re.ASCII)


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """A request.

    id: Its X-Request-Id.
    state: Whether it waits, runs or has ended.
    is_own: Whether its tenant is the caller's.
    may_cancel: Whether the caller may cancel it.
    tenant: The user, key or address.
    team: The team of its key; null: none.
    key: The id of its key; null: none.
    model: Its model.
    priority: Its class.
    route: The path of its route; null until it has ended.
    node: Where it runs, or ran last; null: nowhere.
    position: Its place in the queue, from 1; null: it does not wait, or is far behind.
    estimated_wait_s: How long it will still wait, in whole seconds; null: unknown.
    arrived_at: When it arrived, in seconds since 1970.
    ended_at: When it ended; null: it has not.
    wait_s: How long it waited for its first seat, or has waited so far.
    first_token_s: The time from its arrival to its first token; null: there is none.
    took_s: The time from its arrival to its end, or to now.
    tokens_per_s: The rate of its answer after the first token; null: unknown.
    prompt_tokens: The tokens of its prompt.
    cached_tokens: How many of these were cached; null until it has ended.
    tokens: The tokens of its answer so far.
    attempts: At how many nodes it ran; null until it has ended.
    outcome: success, client_left, or an error's code; null until it has ended.
    problem: The message of the error; null: none.
    """

    id: str
    state: Literal["waiting", "running", "ended"]
    is_own: bool
    may_cancel: bool
    tenant: str
    team: str | None
    key: str | None
    model: str
    priority: str
    route: str | None = None
    node: str | None
    position: int | None = None
    estimated_wait_s: int | None = None
    arrived_at: float
    ended_at: float | None = None
    wait_s: float
    first_token_s: float | None
    took_s: float
    tokens_per_s: float | None
    prompt_tokens: int
    cached_tokens: int | None = None
    tokens: int
    attempts: int | None = None
    outcome: str | None = None
    problem: str | None = None


class RequestList(msgspec.Struct, frozen=True):
    """Requests.

    data: Those that wait or run, in the order in which they arrived; then those that ended, the latest first.
    waiting: How many of the wanted ones wait, also beyond the limit.
    running: How many run.
    """

    data: tuple[RequestRow, ...]
    waiting: int
    running: int


class LimitUse(msgspec.Struct, frozen=True, kw_only=True):
    """A limit or budget, and what is used of it.

    kind: What is limited.
    subject: The id of a key, `user:NAME` or `team:NAME`.
    limit: The limit.
    used: What is used now; it may exceed the limit.
    renews_in_s: In how many seconds all of it is free again; null: when jobs end.
    """

    kind: Literal[
        "requests_per_minute",
        "tokens_per_minute",
        "concurrent",
        "tokens_per_day",
        "tokens_per_month",
        "cost_per_day",
        "cost_per_month",
    ]
    subject: str
    limit: float
    used: float
    renews_in_s: float | None = None


class PersonRow(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant.

    tenant: The user, key or address.
    is_own: Whether it is the caller's.
    team: Its team; null: none.
    keys: The ids of the keys that it has used lately.
    waiting: Its requests that wait.
    running: Its requests that run.
    oldest_wait_s: How long its oldest waiting request waits; null: none does.
    minute: Its share of the last minute.
    hour: Its share of the last hour.
    day: Its share of the last day.
    limits: Its limits and budgets, and those of its keys and team.
    """

    tenant: str
    is_own: bool
    team: str | None
    keys: tuple[str, ...]
    waiting: int
    running: int
    oldest_wait_s: float | None
    minute: SeatShare
    hour: SeatShare
    day: SeatShare
    limits: tuple[LimitUse, ...]


class PeopleList(msgspec.Struct, frozen=True):
    """Tenants: those with the greatest share of the day first."""

    data: tuple[PersonRow, ...]


class TimingList(WindowTimings, frozen=True, kw_only=True):
    """Times and outcomes. `classes`: The names of the priority classes, the first one served first."""

    classes: tuple[str, ...]


class BoardRoutes:
    """The views of `/v1/requests`, `/tenants` and `/timings`.

    reader: Identifies callers, and has the services.
    authenticator: Has the keys of other people, for their limits.
    """

    def __init__(self, reader: RequestReader, authenticator: Authenticator) -> None:
        self._services = reader.jobs.services
        self._quotas = reader.jobs.quotas
        self._authenticator = authenticator
        self._names = TenantNames(self._services.config)
        self._classes = self._services.config.queue.classes

    async def requests(self, request: Request) -> Response:
        """Return the requests that the caller may see: open ones, and the last ones that ended."""
        query, tenant = self._query(request)
        found = await self._services.board.requests(self._scope(request), query)
        now = time.time()
        jobs: tuple[OpenJob | EndedRequest, ...] = (*found.open, *found.ended)
        rows = [self._row(request, each, now) for each in jobs]
        if tenant is not None:
            rows = [row for row in rows if row.tenant == tenant]
        return json_response(RequestList(tuple(rows), found.waiting, found.running))

    async def people(self, request: Request) -> Response:
        """Return the tenants that the caller may see."""
        await self._services.refresh()
        people = await self._services.board.people(self._scope(request, of_people=True))
        budgets, stored = self._services.fleet.catalog.config.budgets, self._services.stored_budgets
        keys = [[key for key in map(self._find_key, each.keys) if key is not None] for each in people]
        shares = [
            dict.fromkeys(
                share
                for key in own
                for share in shares_of(key, each.tenant.removeprefix(BATCH_PREFIX), budgets, stored)
            )
            for each, own in zip(people, keys, strict=True)
        ]
        uses = await self._budget_uses({share for own in shares for share in own})
        rows = [
            self._person(request, each, own, [use for share in counting for use in uses[share.subject]])
            for each, own, counting in zip(people, keys, shares, strict=True)
        ]
        return json_response(PeopleList(tuple(rows)))

    async def timings(self, request: Request) -> Response:
        """Return the times of requests in a window, and how they ended; for users of their own requests."""
        window = request.query("window") or "1h"
        if window not in WINDOWS:
            raise invalid_field("window", f"must be one of {', '.join(WINDOWS)}")
        found = await self._services.board.timings(self._scope(request), window)
        return json_response(TimingList(**msgspec.structs.asdict(found), classes=self._classes))

    # What a caller may see ---------------------------------------------------------------------------

    def _scope(self, request: Request, *, of_people: bool = False) -> RequestScope:
        """Return which requests a caller may see. Of people, an operator for some models sees only itself."""
        key = request.api_key
        if key is None:
            return RequestScope()
        models = self._services.scope_of(key).models
        if key.has_role("operator") and (models is None or not of_people):
            return RequestScope(models)
        names_user = owner_so_far(request) != owner_of(key)
        mine = owner_of(key) if key.trusted and not names_user else None
        return RequestScope(None, tenant_so_far(request), mine)

    def _shown(self, request: Request, tenant: str) -> str:
        """Return a tenant's name. Without keys anybody may ask, so it is the one in the log."""
        return printable(tenant) if request.api_key is not None else self._names.shown(tenant)

    def _query(self, request: Request) -> tuple[RequestQuery, str | None]:
        """Return what is wanted, and the tenant as it is shown if only that name is known."""
        state, priority = request.query("state"), request.query("priority")
        if state is not None and state not in STATES:
            raise invalid_field("state", f"must be one of {', '.join(STATES)}")
        if priority is not None and priority not in self._classes:
            raise invalid_field("priority", f"must be one of {', '.join(self._classes)}")
        limit = request.query("limit") or str(KEPT)
        if not _NUMBER.fullmatch(limit) or not 1 <= int(limit) <= KEPT:
            raise invalid_field("limit", f"must be a whole number from 1 to {KEPT}")
        tenant = request.query("tenant")
        model = request.query("model")
        query = RequestQuery(
            state=state,  # type: ignore[arg-type]  # checked above
            model=None if model is None else self._services.aliases.get(model, model),
            tenant=tenant if request.api_key is not None else None,
            team=request.query("team"),
            node=request.query("node"),
            outcome=request.query("outcome"),
            priority=None if priority is None else self._classes.index(priority),
            limit=int(limit),
        )
        return query, tenant if request.api_key is None else None

    # Rows --------------------------------------------------------------------------------------------

    def _row(self, request: Request, found: OpenJob | EndedRequest, now: float) -> RequestRow:
        key, owner = request.api_key, owner_so_far(request)
        is_open = isinstance(found, OpenJob)
        common: dict[str, Any] = {
            "id": found.request_id,
            "is_own": found.tenant == tenant_so_far(request),
            "may_cancel": is_open and (found.owner == owner or key is None or key.has_role("operator")),
            "tenant": self._shown(request, found.tenant),
            "team": found.team or None,
            "key": found.owner.partition("/")[0] or None,
            "model": found.model,
            "priority": self._class(found.priority),
            "node": found.node,
            "wait_s": round(found.wait_s, 3),
            "first_token_s": _rounded(found.first_token_s),
            "prompt_tokens": found.prompt_tokens,
            "tokens": found.tokens,
        }
        if isinstance(found, OpenJob):
            return RequestRow(
                state=found.state,
                position=found.position,
                estimated_wait_s=found.estimated_wait_s,
                arrived_at=round(now - found.age_s, 3),
                took_s=round(found.age_s, 3),
                tokens_per_s=_rate(found),
                **common,
            )
        return RequestRow(
            state="ended",
            route=found.route or None,
            arrived_at=round(found.ended_at - found.took_s, 3),
            ended_at=round(found.ended_at, 3),
            took_s=round(found.took_s, 3),
            tokens_per_s=_rounded(found.tokens_per_s),
            cached_tokens=found.cached_tokens,
            attempts=found.attempts,
            outcome=found.outcome,
            problem=printable(found.problem) or None,
            **common,
        )

    def _class(self, priority: int) -> str:
        return self._classes[min(priority, len(self._classes) - 1)]

    def _person(
        self, request: Request, person: Person, keys: list[ApiKey], budgets: list[LimitUse]
    ) -> PersonRow:
        limits = [use for key in keys for use in _key_limits(key, self._quotas.usage(key))]
        return PersonRow(
            tenant=self._shown(request, person.tenant),
            is_own=person.tenant == tenant_so_far(request),
            team=person.team or None,
            keys=person.keys,
            waiting=person.waiting,
            running=person.running,
            oldest_wait_s=_rounded(person.oldest_wait_s),
            minute=_rounded_share(person.minute),
            hour=_rounded_share(person.hour),
            day=_rounded_share(person.day),
            limits=(*limits, *budgets),
        )

    def _find_key(self, key_id: str) -> ApiKey | None:
        try:
            return self._authenticator.with_id(key_id)
        except FairleadError:  # it was removed, or the store is away
            return None

    async def _budget_uses(self, shares: set[BudgetShare]) -> dict[str, list[LimitUse]]:
        """Return what is spent of budgets, by subject. All are asked for at once."""
        found: dict[str, list[LimitUse]] = {}
        now = time.time()
        for use in await self._quotas.budget_uses(tuple(shares)) if shares else ():
            row = LimitUse(
                kind=f"{use.what}_per_{use.period}",  # type: ignore[arg-type]  # of these values
                subject=use.subject.removeprefix("key:"),
                limit=use.limit,
                used=use.used,
                renews_in_s=round(max(0.0, use.renews_at - now), 1),
            )
            found.setdefault(use.subject, []).append(row)
        return found


def _key_limits(api_key: ApiKey, usage: QuotaUsage) -> list[LimitUse]:
    """Return the limits of a key, and what is used of them."""
    limits: KeyLimits = api_key.limits
    found = []
    if limits.requests_per_minute is not None:
        found.append(
            ("requests_per_minute", limits.requests_per_minute, usage.requests, usage.requests_reset_s)
        )
    if limits.tokens_per_minute is not None:
        found.append(("tokens_per_minute", limits.tokens_per_minute, usage.tokens, usage.tokens_reset_s))
    uses = [
        LimitUse(
            kind=kind,  # type: ignore[arg-type]  # of these values
            subject=owner_of(api_key),
            limit=limit,
            used=used,
            renews_in_s=round(reset_s, 1),
        )
        for kind, limit, used, reset_s in found
    ]
    if limits.concurrent is not None:
        subject = owner_of(api_key)
        uses.append(LimitUse(kind="concurrent", subject=subject, limit=limits.concurrent, used=usage.running))
    return uses


def _rate(job: OpenJob) -> float | None:
    """Return the tokens a second of a job that runs; None before its second token."""
    if job.first_token_s is None or job.tokens < 2 or job.age_s <= job.first_token_s:
        return None
    return round((job.tokens - 1) / (job.age_s - job.first_token_s), 3)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _rounded_share(share: SeatShare) -> SeatShare:
    return SeatShare(round(share.part, 4), round(share.fair, 4))
