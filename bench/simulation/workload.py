"""What comes in: requests with lognormal lengths, at random times; and how fast a node works them off."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

MAX_TOKENS = 4000


@dataclass(slots=True, eq=False)
class Request:
    """One request, and what becomes of it. Only the simulation knows `output_tokens` before it is over."""

    tenant: str
    prompt_tokens: int
    output_tokens: int
    submitted_s: float = 0.0
    granted_s: float | None = None
    finished_s: float | None = None
    refused: str | None = None  # the code of the error

    @property
    def waited_s(self) -> float | None:
        """Seconds from submission to the seat; None if it never had one."""
        return None if self.granted_s is None else self.granted_s - self.submitted_s


class Shape(NamedTuple):
    """Lognormal lengths: the median, and sigma of the logarithm."""

    prompt: float
    output: float
    sigma: float = 0.6

    def request(self, tenant: str, random: Random) -> Request:
        """Draw one."""
        return Request(
            tenant, _tokens(self.prompt, self.sigma, random), _tokens(self.output, self.sigma, random)
        )

    def mean_service_s(self, speed: "Speed") -> float:
        """Return how long one takes on average; lengths cut off at `MAX_TOKENS` are too rare to matter."""
        stretch = math.exp(self.sigma**2 / 2)
        return stretch * (speed.prompt_s * self.prompt + speed.output_s * self.output)


class Speed(NamedTuple):
    """How long a seat takes for a token, whatever the other seats do."""

    prompt_s: float = 0.0004
    output_s: float = 0.02

    def service_s(self, request: Request) -> float:
        """From the grant to the last token."""
        return self.prompt_s * request.prompt_tokens + self.output_s * request.output_tokens

    def progress(self, request: Request, running_s: float) -> tuple[float, int]:
        """Return prompt and output tokens done after `running_s` in the seat."""
        prompt_s = self.prompt_s * request.prompt_tokens
        if running_s < prompt_s:
            return running_s / self.prompt_s, 0
        tokens = int((running_s - prompt_s) / self.output_s)
        return request.prompt_tokens, min(tokens, request.output_tokens)


def poisson(rate: float, until_s: float, random: Random) -> Iterator[float]:
    """Yield the times of arrivals, `rate` a second on average."""
    time_s = random.expovariate(rate)
    while time_s < until_s:
        yield time_s
        time_s += random.expovariate(rate)


def _tokens(median: float, sigma: float, random: Random) -> int:
    return max(1, min(MAX_TOKENS, round(random.lognormvariate(0.0, sigma) * median)))
