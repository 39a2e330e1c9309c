"""The limits and budgets that all fronts share: the dispatcher has the usage of each key, and admits jobs.

A front asks for each job of a key with limits or budgets, once more at its seat if it has budgets, and sends
one message at its end. While no dispatcher answers,
such jobs wait, as all jobs do. A new dispatcher begins with empty windows: the fronts declare the jobs that
run, which are charged again, and the tokens of those that ended in between. So a key cannot have more jobs at
a time than it may, but its minute begins again.
"""

import contextlib
import itertools
import time
from collections.abc import Iterable
from math import inf
from typing import Any

import msgspec
import trio

from fairlead.base.config import ApiKey, KeyLimits, Price
from fairlead.base.errors import NoNode
from fairlead.distributed.frontends.client import DispatchClient
from fairlead.distributed.frontends.questions import Questions
from fairlead.router.quotas.access import owner_of
from fairlead.router.quotas.budgets import Budgets, BudgetShare, BudgetUse, Reservation
from fairlead.router.quotas.key_quotas import JobCharge, KeyCharge, admit, uncharged
from fairlead.router.quotas.quotas import Charge, Quota, QuotaUsage, limit_headers

RETRY_S = 0.1
MAX_IDLE = 1000
"""Number of quotas from which those without any usage are removed."""

_UNLIMITED = KeyLimits()


class ChargeValue(msgspec.Struct, frozen=True):
    """A charge, or a part of one.

    number: unique at its front.
    owner: the key that is charged (see `owner_of`).
    limits: those of the key.
    prompt_tokens: charged for the prompt.
    answer_tokens: charged for the answer so far; None: it has not begun.
    shares: the budgets that it counts for.
    price: that of its model.
    cached_tokens: how many of the prompt's were cached.
    """

    number: int
    owner: str
    limits: KeyLimits
    prompt_tokens: int = 0
    answer_tokens: int | None = None
    shares: tuple[BudgetShare, ...] = ()
    price: Price | None = None
    cached_tokens: int = 0


class Admitted(msgspec.Struct, frozen=True):
    """The answer for a job that may run. `warning`: as of `JobCharge`."""

    usage: QuotaUsage
    warning: str = ""


class SharedQuotas:
    """The dispatcher's side. `questions` are for `FrontServer`, which adds the front's name."""

    def __init__(self, budgets: Budgets | None = None) -> None:
        self._budgets = budgets or Budgets()
        self._quotas: dict[tuple[str, KeyLimits], Quota] = {}
        self._charges: dict[str, dict[int, KeyCharge]] = {}
        self.questions: Questions = {
            "admit": self.admit,
            "check_quota": self.check,
            "begin_charge": self.begin,
            "correct_prompt": self.correct_prompt,
            "end_charge": self.end,
            "declare_charges": self.declare,
            "budget_uses": self.budget_uses,
        }

    def admit(self, front: str, value: Any, is_estimate: bool, param: str) -> Admitted:
        """Charge for a job, once even if asked twice. Raises as `KeyQuotas.admit` does."""
        asked = msgspec.convert(value, ChargeValue)
        now_s = trio.current_time()
        quota = self._quota(asked, now_s)
        charges = self._charges.setdefault(front, {})
        if asked.number not in charges:
            charges[asked.number] = admit(
                quota,
                self._budgets,
                prompt_tokens=asked.prompt_tokens,
                is_estimate=is_estimate,
                param=param,
                shares=asked.shares,
                price=asked.price,
            )
        return Admitted(quota.usage(now_s), charges[asked.number].warning)

    def begin(self, front: str, number: int) -> None:
        """Raise `BudgetExceeded` if a budget was spent since this job was admitted."""
        if (charge := self._charges.get(front, {}).get(number)) is not None:
            charge.check()

    def check(self, _front: str, value: Any) -> None:
        """Raise `RateLimited` if a job with `prompt_tokens`, at most the limit, cannot be admitted now."""
        now_s = trio.current_time()
        self._quota(msgspec.convert(value, ChargeValue), now_s).check(now_s=now_s)

    def budget_uses(self, _front: str, shares: Any) -> list[BudgetUse]:
        """Return what is spent of each limit of some budgets."""
        return self._budgets.uses(msgspec.convert(shares, tuple[BudgetShare, ...]), time.time())

    def correct_prompt(self, front: str, number: int, prompt_tokens: int) -> None:
        """Replace the charge for the prompt's estimated tokens by a charge for its actual tokens."""
        if (charge := self._charges.get(front, {}).get(number)) is not None:
            charge.correct_prompt(prompt_tokens, trio.current_time())

    def end(
        self, front: str, number: int, answer_tokens: int | None, cached_tokens: int, is_refused: bool
    ) -> None:
        """End a charge."""
        charge = self._charges.get(front, {}).pop(number, None)
        if charge is None:
            return
        if is_refused:
            charge.refund()
        elif answer_tokens is not None:
            charge.charge_answer(answer_tokens, trio.current_time(), cached_tokens=cached_tokens)
        charge.end()

    def declare(self, front: str, running: Any, ended: Any, asking: Any) -> None:
        """Handle the charges that a front has when it has connected, and those that ended before.

        It will ask again for the charges with the numbers `asking`, which are kept if they are known.
        """
        now_s = trio.current_time()
        charges = self._charges.setdefault(front, {})
        for value in msgspec.convert(ended, list[ChargeValue]):
            charge = charges.pop(value.number, None) or self._restore(value, now_s)
            if value.answer_tokens is not None:
                charge.charge_answer(value.answer_tokens, now_s, cached_tokens=value.cached_tokens)
            charge.end()
        declared = msgspec.convert(running, list[ChargeValue])
        for value in declared:
            if value.number not in charges:
                charges[value.number] = self._restore(value, now_s)
        kept = {value.number for value in declared} | set(msgspec.convert(asking, list[int]))
        for number in charges.keys() - kept:
            charges.pop(number).end()

    def end_front(self, front: str) -> None:
        """End the charges of a front that has ended."""
        for charge in self._charges.pop(front, {}).values():
            charge.end()

    def usage(self) -> dict[str, QuotaUsage]:
        """Return the usage of the keys that have any, by owner."""
        now_s = trio.current_time()
        return {
            owner: quota.usage(now_s)
            for (owner, _), quota in self._quotas.items()
            if not quota.is_idle(now_s)
        }

    def _restore(self, value: ChargeValue, now_s: float) -> KeyCharge:
        """Charge without a check: the job was admitted before."""
        tokens, now = value.prompt_tokens, time.time()
        reservation = Reservation(self._budgets, value.shares, value.price, tokens, now)
        return KeyCharge(Charge(self._quota(value, now_s), tokens, now_s), reservation)

    def _quota(self, value: ChargeValue, now_s: float) -> Quota:
        key = (value.owner, value.limits)
        found = self._quotas.get(key)
        if found is None:
            if len(self._quotas) >= MAX_IDLE:
                self._quotas = {k: quota for k, quota in self._quotas.items() if not quota.is_idle(now_s)}
            found = self._quotas[key] = Quota(value.limits)
        return found


class RemoteQuotas:
    """A front's side: `KeyQuotas` that ask the dispatcher. `timeout_s`: how long a job waits for one."""

    def __init__(self, client: DispatchClient, *, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._numbers = itertools.count(1)
        self._running: dict[int, RemoteCharge] = {}
        self._asking: set[int] = set()
        self._ended: list[ChargeValue] = []  # while no dispatcher answered
        self._usage: dict[str, QuotaUsage] = {}
        self._updated_s = -inf
        client.on_connect.append(self._declare)

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
        """See `KeyQuotas`. Raises `NoNode` if no dispatcher answers in time."""
        if api_key is None or (api_key.limits == _UNLIMITED and not shares):
            return uncharged(prompt_tokens)
        value = ChargeValue(
            next(self._numbers), owner_of(api_key), api_key.limits, prompt_tokens, shares=shares, price=price
        )
        self._asking.add(value.number)
        try:
            answer = await self._ask("admit", value, is_estimate, param)
        except BaseException:
            self._client.tell("end_charge", value.number, None, 0, True)  # it may have been charged
            raise
        finally:
            self._asking.discard(value.number)
        admitted = msgspec.convert(answer, Admitted)
        self.update({value.owner: admitted.usage}, is_partial=True)
        charge = self._running[value.number] = RemoteCharge(self, value, admitted.warning)
        return charge

    async def begin(self, value: ChargeValue) -> None:
        """Ask whether the budgets of a job that has its seat are spent. Without an answer it may run."""
        if value.shares:
            with contextlib.suppress(NoNode):
                await self._client.ask("begin_charge", value.number)

    async def check(self, api_key: ApiKey | None) -> None:
        """See `KeyQuotas`. Raises `NoNode` if no dispatcher answers in time."""
        if api_key is not None and api_key.limits != _UNLIMITED:
            await self._ask("check_quota", ChargeValue(0, owner_of(api_key), api_key.limits))

    def headers(self, api_key: ApiKey | None) -> dict[str, str]:
        """See `KeyQuotas`. Usage at other fronts is that of the last update."""
        if api_key is None or api_key.limits == _UNLIMITED:
            return {}
        usage = self._usage.get(owner_of(api_key), QuotaUsage())
        return limit_headers(api_key.limits, usage.after(trio.current_time() - self._updated_s))

    def usage(self, api_key: ApiKey) -> QuotaUsage:
        """See `KeyQuotas`. Usage at other fronts is that of the last update."""
        usage = self._usage.get(owner_of(api_key), QuotaUsage())
        return usage.after(trio.current_time() - self._updated_s)

    async def budget_uses(self, shares: tuple[BudgetShare, ...]) -> list[BudgetUse]:
        """See `KeyQuotas`."""
        if not shares:
            return []
        return msgspec.convert(await self._client.ask("budget_uses", shares), list[BudgetUse])

    def change(self, api_keys: tuple[ApiKey, ...]) -> None:
        """Do nothing: the limits of a request's key are sent with each question."""

    def update(self, usage: dict[str, QuotaUsage], *, is_partial: bool = False) -> None:
        """Record the usage of all keys, or only of these."""
        now_s = trio.current_time()
        kept = {}
        if is_partial:
            kept = {owner: known.after(now_s - self._updated_s) for owner, known in self._usage.items()}
        self._usage, self._updated_s = kept | usage, now_s

    def correct(self, value: ChargeValue) -> None:
        """Report the actual tokens of a prompt."""
        self._client.tell("correct_prompt", value.number, value.prompt_tokens)

    def end(self, value: ChargeValue, *, is_refused: bool) -> None:
        """Report the end of a charge."""
        del self._running[value.number]
        if not is_refused:
            known = self._usage.get(value.owner, QuotaUsage())
            self.update({value.owner: known.with_tokens(value.answer_tokens or 0)}, is_partial=True)
        if self._client.is_connected:
            self._client.tell(
                "end_charge", value.number, value.answer_tokens, value.cached_tokens, is_refused
            )
        elif not is_refused:
            self._ended.append(value)

    async def _ask(self, question: str, *arguments: Any) -> Any:
        """Ask until a dispatcher answers."""
        deadline = trio.current_time() + self._timeout_s
        while True:
            try:
                return await self._client.ask(question, *arguments)
            except NoNode:
                if trio.current_time() + RETRY_S >= deadline:
                    raise
            await trio.sleep(RETRY_S)

    def _declare(self) -> None:
        running: Iterable[ChargeValue] = (charge.value for charge in self._running.values())
        self._client.tell("declare_charges", list(running), self._ended, list(self._asking))
        self._ended = []


class RemoteCharge:
    """What one job costs its key, which the dispatcher keeps."""

    def __init__(self, quotas: RemoteQuotas, value: ChargeValue, warning: str) -> None:
        self.value = value
        self.warning = warning
        self._quotas = quotas
        self._is_refused = False

    async def begin(self) -> None:
        """Raise `BudgetExceeded` if a budget was spent since the job was admitted."""
        await self._quotas.begin(self.value)

    def correct_prompt(self, prompt_tokens: int, now_s: float) -> None:  # noqa: ARG002
        """Replace the charge for the prompt's estimated tokens by a charge for its actual tokens."""
        self.value = msgspec.structs.replace(self.value, prompt_tokens=prompt_tokens)
        self._quotas.correct(self.value)

    def charge_answer(self, tokens: int, now_s: float, *, cached_tokens: int = 0) -> None:  # noqa: ARG002
        """Charge for the answer: `tokens` in all, less those charged before."""
        self.value = msgspec.structs.replace(self.value, answer_tokens=tokens, cached_tokens=cached_tokens)

    def refund(self) -> None:
        """Refund everything: the job was refused."""
        self._is_refused = True

    def end(self) -> None:
        """Stop counting the job as concurrent."""
        self._quotas.end(self.value, is_refused=self._is_refused)
