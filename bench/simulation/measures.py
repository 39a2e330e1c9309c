"""What is read off a run."""

import math
from collections.abc import Iterable, Sequence

from simulation.workload import Request


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that `share` of all do not exceed; 0 of none."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)] if values else 0.0


def waits_s(requests: Iterable[Request]) -> list[float]:
    """Return how long those waited that were granted a seat."""
    return [request.waited_s for request in requests if request.waited_s is not None]


def share_refused(requests: Sequence[Request]) -> float:
    """Return how many of them were refused, for whatever reason, as a fraction."""
    return sum(request.refused is not None for request in requests) / len(requests)
