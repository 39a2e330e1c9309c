"""The views of budgets: list, with what is used; set and remove. For administrators, without a restart.

A budget in the store replaces that of the configuration for the same user or team, until it is removed. A
change is answered when it is in the store and in force in every front. The budget of a key is shown too, but
it is set where the key is made. OpenAI's API has the spend limit of a project, in cents a month, which here
is a team's budget of money.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from math import ceil
from typing import Literal, NamedTuple

import msgspec
import structlog

from fairlead.base.config import Budget
from fairlead.base.errors import NotFound, StoreUnavailable, quoted
from fairlead.base.requester import who
from fairlead.dialects.body import invalid_field
from fairlead.router.quotas.access import key_id
from fairlead.router.quotas.budgets import BudgetShare
from fairlead.server.organization.keys import store_of
from fairlead.server.organization.schemas import (
    PROJECT,
    BudgetList,
    BudgetObject,
    BudgetUseObject,
    DeletedBudget,
    DeletedSpendLimit,
    SetBudgetRequest,
    SetSpendLimitRequest,
    SpendLimit,
    SpendLimitEnforcement,
)
from fairlead.server.routes.request import Request, Response, json_response
from fairlead.server.routes.request_reader import RequestReader
from fairlead.store.records import NANO, SetBudget, UsageQuery

CENTS = 100
_LIMITS = ("tokens_per_day", "tokens_per_month", "cost_per_day", "cost_per_month")

_set_decoder = msgspec.json.Decoder(SetBudgetRequest)
_limit_decoder = msgspec.json.Decoder(SetSpendLimitRequest)

logger = structlog.get_logger("fairlead.server.organization")


class SubjectBudget(NamedTuple):
    """A budget in force.

    subject: `key:ID`, `user:NAME` or `team:NAME`.
    budget: its limits.
    source: where it is set.
    key_name: the name of its key; None: it has none, or is not of a key.
    """

    subject: str
    budget: Budget
    source: Literal["file", "store"]
    key_name: str | None = None


class BudgetRoutes:
    """The views of `/v1/organization/budgets` and `/v1/organization/projects/{project_id}/spend_limit`."""

    def __init__(self, reader: RequestReader) -> None:
        self._reader = reader
        self._services = reader.jobs.services
        self._quotas = reader.jobs.quotas

    async def list_budgets(self, request: Request) -> Response:  # noqa: ARG002
        """Return all budgets in force, by key, team and user."""
        known = self._in_force() | self._of_keys()
        return json_response(
            BudgetList(data=await self._shown([known[subject] for subject in sorted(known)]))
        )

    async def set_budget(self, request: Request) -> Response:
        """Set the budget of a user or a team."""
        body = await self._reader.read(request, _set_decoder)
        if (body.user is None) == (body.team is None):
            raise invalid_field("user", "give either user or team")
        budget = Budget(*(getattr(body, name) for name in _LIMITS))
        if budget == Budget():
            raise invalid_field(_LIMITS[0], f"give at least one of {', '.join(_LIMITS)}")
        subject = f"user:{body.user}" if body.team is None else f"team:{body.team}"
        await self._change(request, subject, budget)
        (set_,) = await self._shown([SubjectBudget(subject, budget, "store")])
        return json_response(set_)

    async def budget(self, request: Request) -> Response:
        """Return a budget."""
        known = self._in_force() | self._of_keys()
        (found,) = await self._shown([known[self._find(request, known)]])
        return json_response(found)

    async def remove_budget(self, request: Request) -> Response:
        """Remove a budget from the store."""
        subject = self._find(request, self._stored())
        await self._change(request, subject, None)
        return json_response(DeletedBudget(id=id_of(subject)))

    # In OpenAI's form ----------------------------------------------------------------------------------

    async def spend_limit(self, request: Request) -> Response:
        """Return the money that a project may spend in a month."""
        subject = _project(request)
        amount = self._budget_of(subject).cost_per_month
        if amount is None:
            raise NotFound(f"the project {quoted(subject.partition(':')[2])} has no spend limit")
        return json_response(await self._spend_limit(subject, amount))

    async def set_spend_limit(self, request: Request) -> Response:
        """Set the money that a project may spend in a month; its other limits stay as they are."""
        subject = _project(request)
        body = await self._reader.read(request, _limit_decoder)
        amount = body.threshold_amount / CENTS
        before = self._budget_of(subject)
        await self._change(request, subject, msgspec.structs.replace(before, cost_per_month=amount))
        return json_response(await self._spend_limit(subject, amount))

    async def remove_spend_limit(self, request: Request) -> Response:
        """Remove the limit of a project's money in a month from the store."""
        subject = _project(request)
        before = self._stored().get(subject, Budget())
        if before.cost_per_month is None:
            raise NotFound("the project has no spend limit in the store; those of files are changed there")
        after = msgspec.structs.replace(before, cost_per_month=None)
        await self._change(request, subject, None if after == Budget() else after)
        return json_response(DeletedSpendLimit())

    # What they share -----------------------------------------------------------------------------------

    def _stored(self) -> Mapping[str, Budget]:
        """Return the budgets of the store, by subject. Raises `NotServed` and `StoreUnavailable`."""
        keys = store_of(self._services.store).keys
        if keys is None:
            raise StoreUnavailable
        return keys.budgets

    def _in_force(self) -> dict[str, SubjectBudget]:
        """Return the budgets of users and teams, by subject. Raises `StoreUnavailable`."""
        configured = self._services.fleet.catalog.config.budgets
        stored = {} if self._services.store is None else self._stored()
        users = {f"user:{name}": budget for name, budget in configured.users.items()}
        teams = {f"team:{name}": budget for name, budget in configured.teams.items()}
        return {
            subject: SubjectBudget(subject, budget, "store" if subject in stored else "file")
            for subject, budget in (users | teams | dict(stored)).items()
        }

    def _of_keys(self) -> dict[str, SubjectBudget]:
        """Return the budgets of keys that are valid, by subject."""
        found = {}
        for api_key in self._services.fleet.catalog.config.api_keys:
            subject = f"key:{key_id(api_key)}"
            found[subject] = SubjectBudget(subject, api_key.budget, "file", api_key.user)
        store, now = self._services.store, time.time()
        for key in () if store is None or store.keys is None else store.keys.keys:
            if key.is_valid(now):
                found.setdefault(
                    f"key:{key.id}", SubjectBudget(f"key:{key.id}", key.budget, "store", key.name)
                )
        return {subject: each for subject, each in found.items() if each.budget != Budget()}

    def _budget_of(self, subject: str) -> Budget:
        """Return the budget in force of a user or a team; without limits if it has none."""
        found = self._in_force().get(subject)
        return Budget() if found is None else found.budget

    async def _shown(self, budgets: Sequence[SubjectBudget]) -> list[BudgetObject]:
        """Return budgets as clients see them. What is used of all is asked for at once."""
        shares = tuple(BudgetShare(each.subject, each.budget) for each in budgets)
        uses: dict[str, list[BudgetUseObject]] = {}
        for use in await self._quotas.budget_uses(shares):
            shown_use = BudgetUseObject(
                kind=f"{use.what}_per_{use.period}",  # type: ignore[arg-type]  # of these values
                limit=use.limit,
                used=use.used,
                renews_at=int(use.renews_at),
            )
            uses.setdefault(use.subject, []).append(shown_use)
        return [shown(each, tuple(uses.get(each.subject, ()))) for each in budgets]

    def _find(self, request: Request, budgets: Iterable[str]) -> str:
        """Return the subject of the budget in the path. Raises `NotFound`."""
        budget_id = request.path_parameters["budget_id"]
        for subject in budgets:
            if id_of(subject) == budget_id:
                return subject
        raise NotFound(
            f"there is no budget {quoted(budget_id)} in the store; those of files are changed there"
        )

    async def _change(self, request: Request, subject: str, budget: Budget | None) -> None:
        await store_of(self._services.store).change_budget(SetBudget(subject, budget))
        event = "budget removed" if budget is None else "budget set"
        logger.info(event, budget=subject, **who(self._reader.requester(request)))

    async def _spend_limit(self, subject: str, amount: float) -> SpendLimit:
        start, end = month_at(time.time())
        team = subject.partition(":")[2]
        query = UsageQuery(start=start, end=end, width_s=end - start, filters={"team": (team,)})
        rows = await store_of(self._services.store).usage(query)
        is_spent = sum(counts.cost_nano for _, counts in rows) >= amount * NANO
        return SpendLimit(
            threshold_amount=ceil(round(amount * CENTS, 6)),
            enforcement=SpendLimitEnforcement("enforcing" if is_spent else "inactive"),
        )


def id_of(subject: str) -> str:
    """Return the id of the budget of `user:NAME` or `team:NAME`. Names may have slashes; ids have none."""
    return f"budget-{sha256(subject.encode()).hexdigest()[:16]}"


def shown(found: SubjectBudget, uses: tuple[BudgetUseObject, ...]) -> BudgetObject:
    """Return a budget as clients see it."""
    kind, _, name = found.subject.partition(":")
    return BudgetObject(
        id=id_of(found.subject),
        user=name if kind == "user" else None,
        team=name if kind == "team" else None,
        api_key_id=name if kind == "key" else None,
        api_key_name=found.key_name,
        source=found.source,
        **msgspec.structs.asdict(found.budget),
        uses=uses,
    )


def month_at(at: float) -> tuple[int, int]:
    """Return the first second of the month of a time, and that of the next month, in UTC."""
    first = datetime.fromtimestamp(at, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    following = (first + timedelta(days=32)).replace(day=1)
    return int(first.timestamp()), int(following.timestamp())


def _project(request: Request) -> str:
    """Return the subject of the path's project. Raises `NotFound` for the project of keys without a team."""
    project = request.path_parameters["project_id"]
    if project == PROJECT:
        raise NotFound(f"the project {PROJECT} is that of keys without a team, and has no spend limit")
    return f"team:{project}"
