"""Limits of one API key: requests and tokens in any minute, and concurrent jobs.

Pure: the time is an argument, in seconds of any monotonic clock. A refused request is not charged; its error
has the time after which to retry.

The window slides: an amount counts until a minute after it was spent, so no minute, wherever it begins, has
more than the limit. Only the tokens of answers can exceed it, because their number is not known in advance.
They count when the answer ends, and their excess delays the key's next requests.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping

import msgspec

from fairlead.base.config import ApiKey, KeyLimits
from fairlead.base.errors import InvalidRequest, RateLimited

WINDOW_S = 60.0
# Amounts spent within this time share a bucket, which expires a minute after the last of them. Bounds the
# window's memory.
BUCKET_S = 1.0
# A short time, because the end of a key's running jobs is unknown.
CONCURRENT_RETRY_S = 2


class _Bucket:
    """The amount spent within `BUCKET_S`."""

    __slots__ = ("amount", "began_s", "latest_s")

    def __init__(self, now_s: float) -> None:
        self.began_s = self.latest_s = now_s
        self.amount = 0


class QuotaWindow:
    """An amount that may be spent in any minute. Holds at most one bucket per `BUCKET_S`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._spent = 0
        self._buckets: deque[_Bucket] = deque()

    def remaining(self, now_s: float) -> int:
        """Return the amount that may still be spent now."""
        return max(0, self.limit - self.spent(now_s))

    def spent(self, now_s: float) -> int:
        """Return the amount that was spent in the last minute; it may exceed the limit."""
        self._expire(now_s)
        return self._spent

    def wait_s(self, amount: int, now_s: float) -> float:
        """Return the seconds until `amount`, at most the limit, may be spent; 0 means now."""
        assert amount <= self.limit
        self._expire(now_s)
        excess = self._spent + amount - self.limit
        for bucket in self._buckets:
            if excess <= 0:
                break
            excess -= bucket.amount
            if excess <= 0:
                return bucket.latest_s + WINDOW_S - now_s
        return 0.0

    def reset_s(self, now_s: float) -> float:
        """Return the seconds until the whole limit is available, if nothing more is spent."""
        self._expire(now_s)
        latest_s = max((bucket.latest_s for bucket in self._buckets if bucket.amount), default=None)
        return 0.0 if latest_s is None else latest_s + WINDOW_S - now_s

    def spend(self, amount: int, now_s: float) -> _Bucket:
        """Spend an amount, even beyond the limit; return its bucket, for `refund`."""
        self._expire(now_s)
        if not self._buckets or now_s - self._buckets[-1].began_s >= BUCKET_S:
            self._buckets.append(_Bucket(now_s))
        bucket = self._buckets[-1]
        bucket.latest_s = now_s
        bucket.amount += amount
        self._spent += amount
        return bucket

    def refund(self, bucket: _Bucket, amount: int) -> None:
        """Refund an amount, or nothing if it has expired."""
        amount = min(amount, bucket.amount)
        bucket.amount -= amount
        self._spent -= amount

    def _expire(self, now_s: float) -> None:
        while self._buckets and now_s - self._buckets[0].latest_s >= WINDOW_S:
            bucket = self._buckets.popleft()
            self._spent -= bucket.amount
            bucket.amount = 0


class QuotaUsage(msgspec.Struct, frozen=True):
    """What a key has spent in the last minute.

    requests: how many requests.
    tokens: how many tokens.
    requests_reset_s: in how many seconds all of the former have expired.
    tokens_reset_s: the same for the latter.
    running: how many jobs it has now, in the queue or running.
    """

    requests: int = 0
    tokens: int = 0
    requests_reset_s: float = 0.0
    tokens_reset_s: float = 0.0
    running: int = 0

    def after(self, seconds: float) -> "QuotaUsage":
        """Return the usage later, if nothing more is spent. An earlier expiry of a part is ignored."""
        requests_reset_s, tokens_reset_s = self.requests_reset_s - seconds, self.tokens_reset_s - seconds
        return QuotaUsage(
            self.requests if requests_reset_s > 0 else 0,
            self.tokens if tokens_reset_s > 0 else 0,
            max(0.0, requests_reset_s),
            max(0.0, tokens_reset_s),
            self.running,
        )

    def with_tokens(self, tokens: int) -> "QuotaUsage":
        """Return the usage when so many tokens more are spent now."""
        if not tokens:
            return self
        return msgspec.structs.replace(self, tokens=self.tokens + tokens, tokens_reset_s=WINDOW_S)


class Quota:
    """One key's limits and usage. Without limits, every job is admitted."""

    def __init__(self, limits: KeyLimits) -> None:
        self.requests = _window(limits.requests_per_minute)
        self.tokens = _window(limits.tokens_per_minute)
        self.running = 0
        self._limits = limits
        self._concurrent = limits.concurrent

    def admit(
        self, *, prompt_tokens: int, now_s: float, is_estimate: bool = False, param: str = "prompt"
    ) -> "Charge":
        """Charge one request and the tokens of its prompt, or charge nothing and raise.

        prompt_tokens: the tokens of the prompt.
        now_s: the present time.
        is_estimate: whether the tokens are estimated; above the limit, an estimate is reduced to it.
        param: the request's field with the prompt, for errors.

        Raises `RateLimited` with the time to retry, and `InvalidRequest` for a prompt with more tokens than
        the limit for a minute.
        """
        if is_estimate and self.tokens is not None:
            prompt_tokens = min(prompt_tokens, self.tokens.limit)
        if self.tokens is not None and prompt_tokens > self.tokens.limit:
            raise InvalidRequest(
                f"the prompt has {prompt_tokens} tokens; this API key may use {self.tokens.limit} a minute",
                param=param,
            )
        self.check(prompt_tokens=prompt_tokens, now_s=now_s)
        return Charge(self, prompt_tokens, now_s)

    def check(self, *, prompt_tokens: int = 1, now_s: float) -> None:
        """Raise `RateLimited` if a job with `prompt_tokens`, at most the limit, cannot be admitted now."""
        if self._concurrent is not None and self.running >= self._concurrent:
            raise _refusal(f"{self._concurrent} jobs at a time", CONCURRENT_RETRY_S)
        costs = ((self.requests, 1, "requests"), (self.tokens, prompt_tokens, "tokens"))
        wait_s, window, unit = max(
            (
                (window.wait_s(amount, now_s), window, unit)
                for window, amount, unit in costs
                if window is not None
            ),
            key=lambda found: found[0],
            default=(0.0, None, ""),
        )
        if window is not None and wait_s > 0:
            raise _refusal(f"{window.limit} {unit} a minute", wait_s)

    def usage(self, now_s: float) -> QuotaUsage:
        """Return what has been spent in the last minute."""
        requests, tokens = self.requests, self.tokens
        return QuotaUsage(
            0 if requests is None else requests.spent(now_s),
            0 if tokens is None else tokens.spent(now_s),
            0.0 if requests is None else requests.reset_s(now_s),
            0.0 if tokens is None else tokens.reset_s(now_s),
            self.running,
        )

    def is_idle(self, now_s: float) -> bool:
        """Return whether nothing is spent, and no job runs."""
        return self.usage(now_s) == QuotaUsage()

    def headers(self, now_s: float) -> dict[str, str]:
        """Return OpenAI's headers about limits; none for limits that are not set."""
        return limit_headers(self._limits, self.usage(now_s))


class Charge:
    """What one job costs its key. `end` is called once, when the job ends."""

    def __init__(self, quota: Quota, prompt_tokens: int, now_s: float) -> None:
        self._quota = quota
        self._prompt_tokens = prompt_tokens
        self._answer_tokens = 0
        quota.running += 1
        self._request = quota.requests.spend(1, now_s) if quota.requests is not None else None
        self._prompt = quota.tokens.spend(prompt_tokens, now_s) if quota.tokens is not None else None

    def correct_prompt(self, prompt_tokens: int, now_s: float) -> None:
        """Replace the charge for the prompt's estimated tokens by a charge for its actual tokens."""
        if self._quota.tokens is not None and self._prompt is not None:
            self._quota.tokens.refund(self._prompt, self._prompt_tokens)
            self._prompt = self._quota.tokens.spend(prompt_tokens, now_s)
        self._prompt_tokens = prompt_tokens

    def charge_answer(self, tokens: int, now_s: float) -> None:
        """Charge for the answer: `tokens` in all, less those charged before."""
        if self._quota.tokens is not None and tokens > self._answer_tokens:
            self._quota.tokens.spend(tokens - self._answer_tokens, now_s)
        self._answer_tokens = tokens

    def refund(self) -> None:
        """Refund everything: the job was refused."""
        assert not self._answer_tokens
        if self._quota.requests is not None and self._request is not None:
            self._quota.requests.refund(self._request, 1)
        if self._quota.tokens is not None and self._prompt is not None:
            self._quota.tokens.refund(self._prompt, self._prompt_tokens)

    def end(self) -> None:
        """Stop counting the job as concurrent: it is neither queued nor running."""
        self._quota.running -= 1


class Quotas:
    """The quotas of all configured keys."""

    def __init__(self, api_keys: Iterable[ApiKey]) -> None:
        self._by_key: Mapping[tuple[bytes, KeyLimits], Quota] = {}
        self._unlimited = Quota(KeyLimits())
        self.change(api_keys)

    def change(self, api_keys: Iterable[ApiKey]) -> None:
        """Replace the configured keys. A key with unchanged limits keeps its usage."""
        earlier = self._by_key
        names = [(api_key.digest, api_key.limits) for api_key in api_keys]
        self._by_key = {name: earlier.get(name) or Quota(name[1]) for name in names}

    def of(self, api_key: ApiKey | None) -> Quota:
        """Return a key's quota; without a key, one without limits."""
        if api_key is None:
            return self._unlimited
        quota = self._by_key.get((api_key.digest, api_key.limits))
        # The key may have been changed or removed since the request was authenticated.
        return quota if quota is not None else Quota(api_key.limits)


def limit_headers(limits: KeyLimits, usage: QuotaUsage) -> dict[str, str]:
    """Return OpenAI's headers about limits; none for limits that are not set."""
    headers = {}
    for unit, limit, spent, reset_s in (
        ("requests", limits.requests_per_minute, usage.requests, usage.requests_reset_s),
        ("tokens", limits.tokens_per_minute, usage.tokens, usage.tokens_reset_s),
    ):
        if limit is not None:
            headers[f"x-ratelimit-limit-{unit}"] = str(limit)
            headers[f"x-ratelimit-remaining-{unit}"] = str(max(0, limit - spent))
            headers[f"x-ratelimit-reset-{unit}"] = f"{_rounded_up(reset_s)}s"
    return headers


def _window(limit: int | None) -> QuotaWindow | None:
    return None if limit is None else QuotaWindow(limit)


def _refusal(allowed: str, wait_s: float) -> RateLimited:
    retry_after_s = max(1, _rounded_up(wait_s))
    return RateLimited(
        f"this API key allows {allowed}; try again in {retry_after_s} s",
        retry_after_s=retry_after_s,
        estimated_wait_s=retry_after_s,
    )


def _rounded_up(wait_s: float) -> int:
    """Return whole seconds, rounded up, at most the window: float sums may exceed it slightly."""
    return min(math.ceil(wait_s), int(WINDOW_S))
