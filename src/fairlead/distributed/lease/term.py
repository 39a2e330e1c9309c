"""A term: the time during which one process is the leader."""

import math
import time
from collections.abc import Callable

# Unlike time.monotonic(), it also runs while the machine is suspended, where the system has such a clock.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def running_time_s() -> float:
    """Return the seconds of a clock that runs while the process is stopped or the machine is suspended."""
    return time.clock_gettime(_CLOCK)


class Term:
    """One term of a leader. Check `is_valid()` synchronously before each act that only the leader may do.

    `epoch` is greater than that of every earlier term, as far as the lease knows. `valid_until_s` is on the
    clock `now_s`. A term whose time has passed cannot be extended.
    """

    def __init__(
        self, epoch: int, valid_until_s: float = math.inf, now_s: Callable[[], float] = running_time_s
    ) -> None:
        self.epoch = epoch
        self._now_s = now_s
        self._valid_until_s = valid_until_s

    @property
    def valid_until_s(self) -> float:
        """When the term ends unless it is extended."""
        return self._valid_until_s

    def is_valid(self) -> bool:
        """Return whether this process is still the leader."""
        return self._now_s() < self._valid_until_s

    def extend(self, valid_until_s: float) -> None:
        """Move the end to a later time."""
        if self.is_valid():
            self._valid_until_s = max(self._valid_until_s, valid_until_s)

    def raise_epoch(self, epoch: int) -> bool:
        """Use this epoch if it is higher. Return False if this process does not lead any more."""
        if not self.is_valid():
            return False
        self.epoch = max(self.epoch, epoch)
        return True

    def end(self) -> None:
        """End the term now."""
        self._valid_until_s = -math.inf
