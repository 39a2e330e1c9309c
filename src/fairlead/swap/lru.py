"""Least recently used out, until there is room: by number, by memory, or by both."""

from collections.abc import Mapping, Sequence

from fairlead.swap.policy import EvictionPolicy


class LruPolicy(EvictionPolicy):
    """At most `max_loaded` models, and no more memory than `capacity_mb`; None: no such limit.

    `memory_mb` tells what a model takes, as declared or as measured when it last ran, and may change: it is
    read at each decision. Of a model that is not in it nothing is known: it counts as everything there is,
    so that it is loaded alone, and is measured then.
    """

    def __init__(
        self,
        *,
        max_loaded: int | None = None,
        capacity_mb: float | None = None,
        memory_mb: Mapping[str, float] | None = None,
    ) -> None:
        if max_loaded is not None and max_loaded < 1:
            raise ValueError("maxLoaded: must be at least 1")
        self._max_loaded = max_loaded
        self._capacity_mb = capacity_mb
        self._memory_mb: Mapping[str, float] = {} if memory_mb is None else memory_mb

    def eviction_for(self, target: str, running: Sequence[str]) -> frozenset[str]:
        """See `EvictionPolicy`."""
        staying = list(running)
        evicted = set()
        while staying and not self._has_room(target, staying):
            evicted.add(staying.pop(0))
        return frozenset(evicted)

    def _has_room(self, target: str, staying: Sequence[str]) -> bool:
        if self._max_loaded is not None and len(staying) + 1 > self._max_loaded:
            return False
        if self._capacity_mb is None:
            return True
        needed_mb = sum(self._memory_mb.get(model, self._capacity_mb) for model in (target, *staying))
        return needed_mb <= self._capacity_mb
