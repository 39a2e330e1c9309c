"""The limits and budgets of all keys as the routes use them: of one process, or of all fronts."""

import time
from collections.abc import Callable
from typing import Protocol

import trio

from fairlead.base.config import ApiKey, KeyLimits, Price
from fairlead.base.errors import BudgetExceeded
from fairlead.router.quotas.budgets import Budgets, BudgetShare, BudgetUse, Reservation
from fairlead.router.quotas.quotas import Charge, Quota, Quotas, QuotaUsage


class JobCharge(Protocol):
    """What one job costs its key, and the budgets that it counts for."""

    @property
    def warning(self) -> str:
        """Which budgets are nearly spent, as a header's value; "": none."""

    async def begin(self) -> None:
        """Raise `BudgetExceeded` if a budget was spent since the job was admitted: it has its seat now."""

    def correct_prompt(self, prompt_tokens: int, now_s: float) -> None:
        """Replace the charge for the prompt's estimated tokens by a charge for its actual tokens.

        Budgets are not concerned: only requests that count tokens do this.
        """

    def charge_answer(self, tokens: int, now_s: float, *, cached_tokens: int = 0) -> None:
        """Charge for the answer: `tokens` in all, less those charged before.

        `cached_tokens`: how many of the prompt's were cached, for its price.
        """

    def refund(self) -> None:
        """Refund everything: the job was refused."""

    def end(self) -> None:
        """Stop counting the job as concurrent. Called once."""


class KeyQuotas(Protocol):
    """Admits jobs as the limits of their keys allow. None stands for requests without a key."""

    async def admit(
        self,
        api_key: ApiKey | None,
        *,
        prompt_tokens: int,
        is_estimate: bool = False,
        param: str = "prompt",
        shares: tuple[BudgetShare, ...] = (),
        price: Price | None = None,
    ) -> JobCharge:
        """Charge for a job, or raise as `Quota.admit` does, and `BudgetExceeded`.

        api_key: the job's key; None: nothing is charged.
        prompt_tokens: the tokens of its prompt.
        is_estimate: whether they are estimated.
        param: the request's field with the prompt, for errors.
        shares: the budgets that it counts for.
        price: that of its model; None: it costs no money.

        Nothing is charged if this is cancelled.
        """
        ...

    async def check(self, api_key: ApiKey | None) -> None:
        """Raise `RateLimited` if no job can be admitted now."""

    def headers(self, api_key: ApiKey | None) -> dict[str, str]:
        """Return OpenAI's headers about limits; none for limits that are not set."""
        ...

    def usage(self, api_key: ApiKey) -> QuotaUsage:
        """Return what a key has spent in the last minute, and its jobs."""
        ...

    async def budget_uses(self, shares: tuple[BudgetShare, ...]) -> list[BudgetUse]:
        """Return what is spent of each limit of some budgets. Raises `NoNode`."""
        ...

    def change(self, api_keys: tuple[ApiKey, ...]) -> None:
        """Replace the configured keys. A key with unchanged limits keeps its usage."""


class KeyCharge:
    """What one job costs, where limits and budgets are kept.

    charge: what it costs its key.
    reservation: what it has reserved of budgets.
    warning: as of `JobCharge`.
    now: returns the seconds since 1970.
    """

    def __init__(
        self,
        charge: Charge,
        reservation: Reservation,
        warning: str = "",
        now: Callable[[], float] = time.time,
    ) -> None:
        self.warning = warning
        self._charge = charge
        self._reservation = reservation
        self._now = now

    async def begin(self) -> None:
        """Raise `BudgetExceeded` if a budget was spent since the job was admitted."""
        self.check()

    def check(self) -> None:
        """Do what `begin` does, at once."""
        self._reservation.check(self._now())

    def correct_prompt(self, prompt_tokens: int, now_s: float) -> None:
        """Replace the charge for the prompt's estimated tokens by a charge for its actual tokens."""
        self._charge.correct_prompt(prompt_tokens, now_s)

    def charge_answer(self, tokens: int, now_s: float, *, cached_tokens: int = 0) -> None:
        """Charge for the answer: `tokens` in all, less those charged before."""
        self._charge.charge_answer(tokens, now_s)
        self._reservation.charge_answer(tokens, cached_tokens)

    def refund(self) -> None:
        """Refund everything: the job was refused."""
        self._charge.refund()
        self._reservation.refund()

    def end(self) -> None:
        """Stop counting the job as concurrent. Without an answer, its budgets get back what it reserved."""
        self._charge.end()
        self._reservation.end(self._now())


def uncharged(prompt_tokens: int) -> KeyCharge:
    """Return the charge of a job without limits and budgets."""
    reservation = Reservation(Budgets(), (), None, prompt_tokens, 0.0)
    return KeyCharge(Charge(Quota(KeyLimits()), prompt_tokens, 0.0), reservation)


def admit(
    quota: Quota,
    budgets: Budgets,
    *,
    prompt_tokens: int,
    is_estimate: bool,
    param: str,
    shares: tuple[BudgetShare, ...],
    price: Price | None,
    now: Callable[[], float] = time.time,
) -> KeyCharge:
    """Charge a job to a key's quota and its budgets, or charge nothing and raise as `KeyQuotas.admit`."""
    charge = quota.admit(
        prompt_tokens=prompt_tokens, is_estimate=is_estimate, param=param, now_s=trio.current_time()
    )
    try:
        reservation = budgets.reserve(shares, price, prompt_tokens, now())
    except BudgetExceeded:
        charge.refund()
        charge.end()
        raise
    return KeyCharge(charge, reservation, budgets.warning(shares, now()), now)


class LocalQuotas:
    """The limits and budgets of a server that is a single process.

    api_keys: the configured keys.
    budgets: what was spent; None: nothing yet.
    """

    def __init__(self, api_keys: tuple[ApiKey, ...], budgets: Budgets | None = None) -> None:
        self._quotas = Quotas(api_keys)
        self._budgets = budgets or Budgets()

    async def admit(
        self,
        api_key: ApiKey | None,
        *,
        prompt_tokens: int,
        is_estimate: bool = False,
        param: str = "prompt",
        shares: tuple[BudgetShare, ...] = (),
        price: Price | None = None,
    ) -> JobCharge:
        """Charge for a job, or raise; see `KeyQuotas`."""
        return admit(
            self._quotas.of(api_key),
            self._budgets,
            prompt_tokens=prompt_tokens,
            is_estimate=is_estimate,
            param=param,
            shares=shares,
            price=price,
        )

    async def check(self, api_key: ApiKey | None) -> None:
        """Raise `RateLimited` if no job can be admitted now."""
        self._quotas.of(api_key).check(now_s=trio.current_time())

    def headers(self, api_key: ApiKey | None) -> dict[str, str]:
        """Return OpenAI's headers about limits; none for limits that are not set."""
        return self._quotas.of(api_key).headers(trio.current_time())

    def usage(self, api_key: ApiKey) -> QuotaUsage:
        """Return what a key has spent in the last minute, and its jobs."""
        return self._quotas.of(api_key).usage(trio.current_time())

    async def budget_uses(self, shares: tuple[BudgetShare, ...]) -> list[BudgetUse]:
        """Return what is spent of each limit of some budgets."""
        return self._budgets.uses(shares, time.time())

    def change(self, api_keys: tuple[ApiKey, ...]) -> None:
        """Replace the configured keys."""
        self._quotas.change(api_keys)
