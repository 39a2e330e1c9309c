"""Settings of what outlives the server: the store, prices, and budgets by day and month."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from fairlead.base.config.spelling import spelled

NO_STORE = "none"
POSTGRES_PREFIXES = ("postgresql://", "postgres://")

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMG]?)")
_FACTORS = {"": 1, "k": 1000, "K": 1000, "M": 1000**2, "G": 1000**3}


def read_amount(raw: object) -> object:
    """Parse '2M', '500k' or '1.5G' to a whole number. Return other types unchanged. Raises `ValueError`."""
    if not isinstance(raw, str):
        return raw
    found = _AMOUNT.fullmatch(raw.strip())
    amount = float(found[1]) * _FACTORS[found[2]] if found is not None else 0.5
    if amount != int(amount):
        raise ValueError(f"must be a number of tokens like 500000, 500k or 2M, not {raw[:40]!r}")
    return int(amount)


Tokens = Annotated[int, Meta(ge=1, le=2**53, extra={"read": read_amount, "must": "be at least 1"})]
Money = Annotated[float, Meta(gt=0, le=1e9)]
Rate = Annotated[float, Meta(ge=0, le=1e6)]
Discount = Annotated[float, Meta(ge=0, le=1)]


class Price(msgspec.Struct, frozen=True, rename=spelled):
    """What a million tokens of a model cost, in any currency, the same for all models."""

    input: Rate = 0.0
    """The price of a million prompt tokens."""
    output: Rate = 0.0
    """The price of a million generated tokens."""
    cached: Rate | None = None
    """The price of a million prompt tokens that were cached. Default: that of other prompt tokens."""
    batch_discount: Discount = 0.0
    """The part of the price that lines of batches do not pay: 0.5 is half the price, 1 is free."""

    def of_batch(self) -> "Price":
        """Return the price for a line of a batch."""
        rest = 1 - self.batch_discount
        cached = None if self.cached is None else self.cached * rest
        return Price(self.input * rest, self.output * rest, cached)

    def nano(self, prompt_tokens: int, cached_tokens: int, generated_tokens: int) -> int:
        """Return the price in whole billionths of the currency; cached tokens are part of the prompt's."""
        cached_tokens = min(cached_tokens, prompt_tokens)
        cached = self.input if self.cached is None else self.cached
        millionths = (
            (prompt_tokens - cached_tokens) * self.input
            + cached_tokens * cached
            + generated_tokens * self.output
        )
        return round(millionths * 1000)


class Budget(msgspec.Struct, frozen=True, rename=spelled):
    """What may be spent in a day and in a month, which begin at midnight UTC; not set: no limit."""

    tokens_per_day: Tokens | None = None
    """Tokens of prompts and answers in a day, such as 500k or 2M."""
    tokens_per_month: Tokens | None = None
    """The same in a month."""
    cost_per_day: Money | None = None
    """Money in a day, for models with a price."""
    cost_per_month: Money | None = None
    """The same in a month."""


class BudgetsConfig(msgspec.Struct, frozen=True, rename=spelled):
    """Budgets of users and teams. A key has its own in `apiKeys`. A budget in the store replaces that of the
    same user or team.
    """

    users: dict[str, Budget] = {}
    """Budgets by user: that of a key, or one that a trusted key names, as portal/alice."""
    teams: dict[str, Budget] = {}
    """Budgets by team."""
    batch_discount: Discount = 0.0
    """The part of the tokens of batches that does not count for budgets of tokens. Budgets of money follow
    prices, which have a `batchDiscount` of their own.
    """


def default_store(environment: Mapping[str, str]) -> str:
    """Return the store of a server whose settings name none: FAIRLEAD_STORE, or a file of its user."""
    if named := environment.get("FAIRLEAD_STORE"):
        return named
    data = environment.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return str(Path(data) / "fairlead" / "fairlead.db")
