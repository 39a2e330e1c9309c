"""Decides when the prefix cache is trimmed: at intervals while the engine works, and once when it is idle."""

from typing import NamedTuple

from fairlead.engine.memory import Memory

CLOCK_GRAIN_S = 0.001  # less than this is not worth waiting for


class TrimmedCache(NamedTuple):
    """How many blocks an idle engine evicted, and the ids of empty blocks by group, ascending."""

    evicted: int
    free: list[list[int]]


class CacheTrimming:
    """Trims `memory` at most every `interval_s`. `changed`: something may have been cached since then."""

    def __init__(self, memory: Memory, interval_s: float) -> None:
        self.changed = False
        self._memory = memory
        self._interval_s = interval_s
        self._latest_s: float | None = None

    def trim_if_due(self, now_s: float) -> None:
        """Trim the cache of an engine that works."""
        if self._latest_s is None or now_s - self._latest_s >= self._interval_s:
            self._latest_s = now_s
            self._memory.trim()

    def wait_s(self, now_s: float) -> float | None:
        """Return how long until the cache of an idle engine is trimmed; None: it does not have to be."""
        if not self.changed or self._latest_s is None:
            return None
        left_s = self._latest_s + self._interval_s - now_s
        return left_s if left_s > CLOCK_GRAIN_S else 0.0

    def trim_when_idle(self, now_s: float) -> TrimmedCache | None:
        """Trim the cache of an idle engine, if that is due."""
        if self.wait_s(now_s) != 0.0:
            return None
        self._latest_s, self.changed = now_s, False
        return TrimmedCache(self._memory.trim(), self._memory.free_ids())
