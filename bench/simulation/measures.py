"""Figures of a simulation."""

import math
from collections.abc import Iterable, Sequence

from simulation.workload import Request


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that `share` of the values do not exceed; 0 without values."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)] if values else 0.0


def waits_s(requests: Iterable[Request]) -> list[float]:
    """Return the waits of the requests that got a seat."""
    return [request.waited_s for request in requests if request.waited_s is not None]


def share_refused(requests: Sequence[Request]) -> float:
    """Return the fraction of the requests that was refused, for any reason."""
    return sum(request.refused is not None for request in requests) / len(requests)
