"""Requests with lognormal lengths at random times, and the speed of a node."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

MAX_TOKENS = 4000


@dataclass(slots=True, eq=False)
class Request:
    """A request and its outcome. The server does not use `output_tokens` before the end."""

    tenant: str
    prompt_tokens: int
    output_tokens: int
    submitted_s: float = 0.0
    granted_s: float | None = None
    finished_s: float | None = None
    refused: str | None = None  # the error code

    @property
    def waited_s(self) -> float | None:
        """Seconds from submission to the grant; None without a grant."""
        return None if self.granted_s is None else self.granted_s - self.submitted_s


class Shape(NamedTuple):
    """Lognormal lengths: the median, and sigma of the logarithm."""

    prompt: float
    output: float
    sigma: float = 0.6

    def request(self, tenant: str, random: Random) -> Request:
        """Return a request with random lengths."""
        return Request(
            tenant, _tokens(self.prompt, self.sigma, random), _tokens(self.output, self.sigma, random)
        )

    def mean_service_s(self, speed: "Speed") -> float:
        """Return the mean service time, without the rare cut at `MAX_TOKENS`."""
        mean_factor = math.exp(self.sigma**2 / 2)
        return mean_factor * (speed.prompt_s * self.prompt + speed.output_s * self.output)


class Speed(NamedTuple):
    """Seconds per prompt token and per output token, independent of other seats."""

    prompt_s: float = 0.0004
    output_s: float = 0.02

    def service_s(self, request: Request) -> float:
        """Return the seconds from the grant to the last token."""
        return self.prompt_s * request.prompt_tokens + self.output_s * request.output_tokens

    def progress(self, request: Request, running_s: float) -> tuple[float, int]:
        """Return the prompt and output tokens that are done after `running_s`."""
        prompt_s = self.prompt_s * request.prompt_tokens
        if running_s < prompt_s:
            return running_s / self.prompt_s, 0
        tokens = int((running_s - prompt_s) / self.output_s)
        return request.prompt_tokens, min(tokens, request.output_tokens)


def poisson(rate: float, until_s: float, random: Random) -> Iterator[float]:
    """Yield the arrival times of a Poisson process with `rate` arrivals a second."""
    time_s = random.expovariate(rate)
    while time_s < until_s:
        yield time_s
        time_s += random.expovariate(rate)


def _tokens(median: float, sigma: float, random: Random) -> int:
    return max(1, min(MAX_TOKENS, round(random.lognormvariate(0.0, sigma) * median)))
