"""How long a wait will be, from how long the last jobs took. Pure: knows no clock and no queue."""

import math
from collections import deque
from random import Random

KEPT_JOBS = 100


class MeanEstimate:
    """`queue.estimate: mean` (seed 000, FR-011): mean service time × jobs ahead ÷ seats."""

    def __init__(self) -> None:
        self._service_s: deque[float] = deque(maxlen=KEPT_JOBS)
        self._wait_s: deque[float] = deque(maxlen=KEPT_JOBS)

    def granted(self, wait_s: float) -> None:
        """Note how long a job waited for its seat."""
        self._wait_s.append(wait_s)

    def finished(self, service_s: float) -> None:
        """Note how long a job held its seat."""
        self._service_s.append(service_s)

    @property
    def mean_wait_s(self) -> float:
        """Mean over the last 100 grants; 0 when there were none."""
        return _mean(self._wait_s)

    @property
    def mean_service_s(self) -> float:
        """Mean over the last 100 jobs; 0 when there were none."""
        return _mean(self._service_s)

    def wait_s(self, *, ahead: int, seats: int, oldest_running_s: float) -> int:
        """Return whole seconds until a job with `ahead` jobs before it gets a seat.

        Three waiting, 10 s each, one seat: 30. Before any job has finished, the age of the oldest running
        one stands in for the mean: service takes at least that long.
        """
        service_s = self.mean_service_s if self._service_s else oldest_running_s
        return math.ceil(service_s * ahead / max(seats, 1))


def retry_after_s(estimated_wait_s: int, random: Random) -> int:
    """Return when to come back, in seconds, 1…60: about the estimate, spread so that not all do at once."""
    return min(60, max(1, math.ceil(estimated_wait_s / 2 * (1 + random.random()))))


def _mean(values: deque[float]) -> float:
    return sum(values) / len(values) if values else 0.0
