"""Budgets by day and month, of keys, users and teams: tokens, and money. Pure: the time is an argument.

A job reserves its prompt when it is admitted, and is charged for its answer when that ends, as for the limits
of a minute. Between the two it asks once more: when it has its seat, and before it runs. So of all jobs that
were admitted together, only those that hold seats can exceed a budget, each by one answer.

    limit 100, ten jobs with prompts of 5 tokens, one seat → all are admitted: 50 are reserved
    the first three answer 20 tokens each → 110 are spent → the others are refused at their seats

A discount (`batchDiscount`) reduces the tokens that a line of a batch counts.

What was spent before comes from the store (`restore`), and so does what other servers spend.
"""

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from types import MappingProxyType

import msgspec

from fairlead.base.config import ApiKey, Budget, BudgetsConfig, Price
from fairlead.base.errors import BudgetExceeded
from fairlead.router.quotas.access import key_id, user_tenant
from fairlead.store.database import periods_at
from fairlead.store.records import NANO, Spent

WARNED_SHARE = 0.8
"""The part of a budget from which on answers have a warning."""


class BudgetShare(msgspec.Struct, frozen=True, array_like=True):
    """A budget that a job counts for.

    subject: `key:ID`, `user:NAME` or `team:NAME`.
    budget: its limits.
    token_share: the part of the job's tokens that counts.
    """

    subject: str
    budget: Budget
    token_share: float = 1.0


def shares_of(
    api_key: ApiKey | None,
    tenant: str,
    budgets: BudgetsConfig,
    stored: Mapping[str, Budget] = MappingProxyType({}),
    *,
    is_batch: bool = False,
) -> tuple[BudgetShare, ...]:
    """Return the budgets of a job's key, of its tenant as a user, and of the key's team.

    api_key: the job's key; None: there are no budgets, because clients could name any user.
    tenant: the job's.
    budgets: those of the configuration.
    stored: those of the store, by subject, which replace those of the same subject.
    is_batch: the job is a line of a batch.
    """
    if api_key is None:
        return ()
    user, team = user_tenant(tenant, is_batch=is_batch), api_key.team or ""
    of_user, of_team = f"user:{user}", f"team:{team}"
    found = (
        (f"key:{key_id(api_key)}", api_key.budget),
        (of_user, stored.get(of_user) or budgets.users.get(user)),
        (of_team, stored.get(of_team) or budgets.teams.get(team) if team else None),
    )
    share = token_share(budgets, is_batch=is_batch)
    return tuple(
        BudgetShare(subject, budget, share)
        for subject, budget in found
        if budget is not None and budget != Budget()
    )


def subjects_of(api_keys: Iterable[ApiKey], budgets: BudgetsConfig, stored: Iterable[str] = ()) -> list[str]:
    """Return the subjects that have a budget; `stored`: those in the store."""
    keys = [f"key:{key_id(api_key)}" for api_key in api_keys if api_key.budget != Budget()]
    names = [f"user:{name}" for name in budgets.users] + [f"team:{name}" for name in budgets.teams]
    return keys + list(dict.fromkeys((*names, *stored)))


def token_share(budgets: BudgetsConfig, *, is_batch: bool) -> float:
    """Return the part of a job's tokens that counts for budgets of tokens."""
    return 1.0 - budgets.batch_discount if is_batch else 1.0


def counted_tokens(tokens: int, share: float) -> int:
    """Return how many tokens count for budgets."""
    return tokens if share == 1.0 else math.ceil(round(tokens * share, 6))


class _Amounts:
    """What a subject has spent or reserved in a period."""

    __slots__ = ("cost_nano", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.cost_nano = 0


class BudgetUse(msgspec.Struct, frozen=True, array_like=True):
    """What of a budget is spent or reserved.

    subject: whose it is, as in `BudgetShare`.
    what: `tokens` or `cost`.
    period: `day` or `month`.
    limit: the budget.
    used: what is spent or reserved.
    renews_at: when it renews, in seconds since 1970.
    """

    subject: str
    what: str
    period: str
    limit: float
    used: float
    renews_at: float


class Budgets:
    """What was spent and reserved. Holds the present day and month of subjects with a budget."""

    def __init__(self) -> None:
        self._amounts: dict[tuple[str, str], _Amounts] = {}
        self._day = ""
        self._was_restored = False

    def restore(self, spent: Iterable[Spent]) -> None:
        """Take what the store has.

        The first time nothing of this server is in the store yet, so its sums are added. Later the store has
        most of what is counted here, and perhaps that of other servers: the higher sum counts.
        """
        for each in spent:
            amounts = self._of(each.period, each.subject)
            if self._was_restored:
                amounts.tokens = max(amounts.tokens, each.tokens)
                amounts.cost_nano = max(amounts.cost_nano, each.cost_nano)
            else:
                amounts.tokens += each.tokens
                amounts.cost_nano += each.cost_nano
        self._was_restored = True

    def reserve(
        self, shares: tuple[BudgetShare, ...], price: Price | None, prompt_tokens: int, now: float
    ) -> "Reservation":
        """Reserve a job's prompt, or raise `BudgetExceeded` and reserve nothing."""
        cost = _cost(price, prompt_tokens)
        self.check(shares, now, tokens=max(1, prompt_tokens), cost_nano=cost)
        return Reservation(self, shares, price, prompt_tokens, now)

    def check(
        self, shares: tuple[BudgetShare, ...], now: float, *, tokens: int = 0, cost_nano: int = 0
    ) -> None:
        """Raise `BudgetExceeded` if the budgets do not have room for this much more.

        Of several budgets that are spent, the one that renews last is named.
        """
        worst: tuple[float, str] | None = None
        for share in shares:
            for period, what, limit, spent, renews_at in self._limits(share, now):
                counted = counted_tokens(tokens, share.token_share)
                more = counted if what == "tokens" else cost_nano / NANO
                if spent + more > limit and (worst is None or renews_at > worst[0]):
                    worst = renews_at, f"{_amount(limit, what)} a {period} of {_owner(share)}"
        if worst is not None:
            renews_at, budget = worst
            raise BudgetExceeded(
                f"the budget is spent: {budget}; it renews at {_written(renews_at)}",
                retry_after_s=max(1, math.ceil(renews_at - now)),
            )

    def warning(self, shares: tuple[BudgetShare, ...], now: float) -> str:
        """Return which budgets are spent to `WARNED_SHARE` or more, as a header's value; "": none."""
        warnings = [
            f"{100 * spent / limit:.0f}% of {_amount(limit, what)} a {period} of {_owner(share)}, "
            f"renews at {_written(renews_at)}"
            for share in shares
            for period, what, limit, spent, renews_at in self._limits(share, now)
            if spent >= WARNED_SHARE * limit
        ]
        return "; ".join(warnings)

    def uses(self, shares: Iterable[BudgetShare], now: float) -> list[BudgetUse]:
        """Return what is spent of each limit of some budgets."""
        return [
            BudgetUse(share.subject, what, period, limit, spent, renews_at)
            for share in shares
            for period, what, limit, spent, renews_at in self._limits(share, now)
        ]

    def add(self, shares: tuple[BudgetShare, ...], tokens: int, cost_nano: int, at: float) -> None:
        """Add amounts to the day and the month of a time."""
        self._change(shares, tokens, cost_nano, at, 1)

    def take_back(self, shares: tuple[BudgetShare, ...], tokens: int, cost_nano: int, at: float) -> None:
        """Take back amounts that were added for the same time."""
        self._change(shares, tokens, cost_nano, at, -1)

    def _change(
        self, shares: tuple[BudgetShare, ...], tokens: int, cost_nano: int, at: float, sign: int
    ) -> None:
        for period in periods_at(at):
            for share in shares:
                amounts = self._of(period, share.subject)
                amounts.tokens += sign * counted_tokens(tokens, share.token_share)
                amounts.cost_nano += sign * cost_nano

    def _limits(self, share: BudgetShare, now: float) -> Iterable[tuple[str, str, float, float, float]]:
        """Yield each limit: its period, what it limits, the limit, what was spent, and when it renews."""
        budget = share.budget
        for period, name, tokens, cost in (
            ("day", periods_at(now)[0], budget.tokens_per_day, budget.cost_per_day),
            ("month", periods_at(now)[1], budget.tokens_per_month, budget.cost_per_month),
        ):
            amounts = self._of(name, share.subject)
            if tokens is not None:
                yield period, "tokens", tokens, amounts.tokens, _end(period, now)
            if cost is not None:
                yield period, "cost", cost, amounts.cost_nano / NANO, _end(period, now)

    def _of(self, period: str, subject: str) -> _Amounts:
        """Return the amounts of a subject in a period. A new day ends those of days and months before it."""
        if len(period) > len("2026-11") and period > self._day:
            self._day = period
            kept = (period, period[:7])
            self._amounts = {name: amounts for name, amounts in self._amounts.items() if name[0] in kept}
        return self._amounts.setdefault((period, subject), _Amounts())


class Reservation:
    """What one job has reserved. `end` is called once, when the job ends."""

    def __init__(
        self,
        budgets: Budgets,
        shares: tuple[BudgetShare, ...],
        price: Price | None,
        prompt_tokens: int,
        now: float,
    ) -> None:
        self._budgets = budgets
        self._shares = shares
        self._price = price
        self._prompt_tokens = prompt_tokens
        self._reserved = (prompt_tokens, _cost(price, prompt_tokens))
        self._at = now
        self._spent = (0, 0)
        budgets.add(shares, *self._reserved, now)

    def check(self, now: float) -> None:
        """Raise `BudgetExceeded` if jobs that ended meanwhile have spent a budget."""
        self._budgets.check(self._shares, now)

    def charge_answer(self, tokens: int, cached_tokens: int) -> None:
        """Set the tokens of the answer, and how many of the prompt's were cached: the answer has begun."""
        cost = 0 if self._price is None else self._price.nano(self._prompt_tokens, cached_tokens, tokens)
        self._spent = (self._prompt_tokens + tokens, cost)

    def refund(self) -> None:
        """Charge nothing: the job was refused."""
        self._spent = (0, 0)

    def end(self, now: float) -> None:
        """Replace what was reserved by what was spent. It counts for the day in which the job ends."""
        self._budgets.take_back(self._shares, *self._reserved, self._at)
        self._budgets.add(self._shares, *self._spent, now)


def _cost(price: Price | None, prompt_tokens: int) -> int:
    return 0 if price is None else price.nano(prompt_tokens, 0, 0)


def _end(period: str, now: float) -> float:
    """Return the end of the day or month of a time, in seconds since 1970."""
    day = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "day":
        return (day + timedelta(days=1)).timestamp()
    return (day.replace(day=1) + timedelta(days=32)).replace(day=1).timestamp()


def _written(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _amount(limit: float, what: str) -> str:
    return f"{limit:g}" if what == "cost" else f"{int(limit)} tokens"


def _owner(share: BudgetShare) -> str:
    kind = share.subject.partition(":")[0]
    return "this API key" if kind == "key" else f"its {kind}"
