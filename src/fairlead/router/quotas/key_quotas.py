"""The quotas of all keys as the routes use them: of a server that is one process, or of all fronts."""

from typing import Protocol

import trio

from fairlead.base.config import ApiKey
from fairlead.router.quotas.quotas import Quotas


class JobCharge(Protocol):
    """What one job costs its key; see `quotas.Charge`."""

    def correct_prompt(self, prompt_tokens: int, now_s: float) -> None:
        """Replace the charge for the prompt's estimated tokens by a charge for its actual tokens."""

    def charge_answer(self, tokens: int, now_s: float) -> None:
        """Charge for the answer: `tokens` in all, less those charged before."""

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
    ) -> JobCharge:
        """Charge for a job, or raise as `Quota.admit` does. Nothing is charged if this is cancelled.

        api_key: the job's key; None: nothing is charged.
        prompt_tokens: the tokens of its prompt.
        is_estimate: whether they are estimated.
        param: the request's field with the prompt, for errors.
        """
        ...

    async def check(self, api_key: ApiKey | None) -> None:
        """Raise `RateLimited` if no job can be admitted now."""

    def headers(self, api_key: ApiKey | None) -> dict[str, str]:
        """Return OpenAI's headers about limits; none for limits that are not set."""
        ...

    def change(self, api_keys: tuple[ApiKey, ...]) -> None:
        """Replace the configured keys. A key with unchanged limits keeps its usage."""


class LocalQuotas:
    """The quotas of a server that is a single process."""

    def __init__(self, api_keys: tuple[ApiKey, ...]) -> None:
        self._quotas = Quotas(api_keys)

    async def admit(
        self,
        api_key: ApiKey | None,
        *,
        prompt_tokens: int,
        is_estimate: bool = False,
        param: str = "prompt",
    ) -> JobCharge:
        """Charge for a job, or raise as `Quota.admit` does."""
        return self._quotas.of(api_key).admit(
            prompt_tokens=prompt_tokens, is_estimate=is_estimate, param=param, now_s=trio.current_time()
        )

    async def check(self, api_key: ApiKey | None) -> None:
        """Raise `RateLimited` if no job can be admitted now."""
        self._quotas.of(api_key).check(now_s=trio.current_time())

    def headers(self, api_key: ApiKey | None) -> dict[str, str]:
        """Return OpenAI's headers about limits; none for limits that are not set."""
        return self._quotas.of(api_key).headers(trio.current_time())

    def change(self, api_keys: tuple[ApiKey, ...]) -> None:
        """Replace the configured keys."""
        self._quotas.change(api_keys)
