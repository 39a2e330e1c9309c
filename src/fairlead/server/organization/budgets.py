"""The views of budgets of users and teams: list, set, remove. For administrators, without a restart.

A budget in the store replaces that of the configuration for the same user or team, until it is removed. A
change is answered when it is in the store and in force in every front. OpenAI's API has one kind of them: the
spend limit of a project, in cents a month, which here is a team's budget of money.
"""

import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from math import ceil

import msgspec
import structlog

from fairlead.base.config import Budget
from fairlead.base.errors import NotFound, StoreUnavailable, quoted
from fairlead.base.requester import who
from fairlead.dialects.body import invalid_field
from fairlead.server.organization.keys import store_of
from fairlead.server.organization.schemas import (
    PROJECT,
    BudgetList,
    BudgetObject,
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


class BudgetRoutes:
    """The views of `/v1/organization/budgets` and `/v1/organization/projects/{project_id}/spend_limit`."""

    def __init__(self, reader: RequestReader) -> None:
        self._reader = reader
        self._services = reader.jobs.services

    async def list_budgets(self, request: Request) -> Response:  # noqa: ARG002
        """Return all budgets in force, by user and team."""
        return json_response(BudgetList(data=[self._shown(subject) for subject in sorted(self._in_force())]))

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
        return json_response(shown(subject, budget, source="store"))

    async def budget(self, request: Request) -> Response:
        """Return a budget."""
        return json_response(self._shown(self._find(request, self._in_force())))

    async def remove_budget(self, request: Request) -> Response:
        """Remove a budget from the store."""
        subject = self._find(request, self._stored())
        await self._change(request, subject, None)
        return json_response(DeletedBudget(id=id_of(subject)))

    # In OpenAI's form ----------------------------------------------------------------------------------

    async def spend_limit(self, request: Request) -> Response:
        """Return the money that a project may spend in a month."""
        subject = _project(request)
        found = self._in_force().get(subject, Budget())
        if found.cost_per_month is None:
            raise NotFound(f"the project {quoted(subject.partition(':')[2])} has no spend limit")
        return json_response(await self._spend_limit(subject, found.cost_per_month))

    async def set_spend_limit(self, request: Request) -> Response:
        """Set the money that a project may spend in a month; its other limits stay as they are."""
        subject = _project(request)
        body = await self._reader.read(request, _limit_decoder)
        amount = body.threshold_amount / CENTS
        before = self._in_force().get(subject, Budget())
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

    def _in_force(self) -> dict[str, Budget]:
        """Return the budgets of users and teams, by subject. Raises as `_stored`."""
        configured = self._services.fleet.catalog.config.budgets
        users = {f"user:{name}": budget for name, budget in configured.users.items()}
        teams = {f"team:{name}": budget for name, budget in configured.teams.items()}
        return users | teams | dict(self._stored())

    def _shown(self, subject: str) -> BudgetObject:
        source = "store" if subject in self._stored() else "file"
        return shown(subject, self._in_force()[subject], source=source)

    def _find(self, request: Request, budgets: Mapping[str, Budget]) -> str:
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


def shown(subject: str, budget: Budget, *, source: str) -> BudgetObject:
    """Return a budget as clients see it; `source`: `file` or `store`."""
    kind, _, name = subject.partition(":")
    return BudgetObject(
        id=id_of(subject),
        user=name if kind == "user" else None,
        team=name if kind == "team" else None,
        source="store" if source == "store" else "file",
        **msgspec.structs.asdict(budget),
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
