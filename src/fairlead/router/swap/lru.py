"""Evicts the least recently used models until there is room: by number, by memory, and on each GPU."""

from collections.abc import Mapping, Sequence

from fairlead.router.swap.gpus import Gpus
from fairlead.router.swap.policy import EvictionPolicy


class LruPolicy(EvictionPolicy):
    """Evicts the least recently used models until all bounds hold.

    max_loaded: the most models; None: no such limit.
    capacity_mb: the memory for all of them, in MiB; None: no such limit.
    memory_mb: each model's memory, as declared or as measured when it last ran. It may change, so each
        decision reads it. A model that is not in it counts as all memory: it is loaded alone, and then
        measured.
    gpus: has the memory of each GPU, which the models on it may not exceed; models that are not on it stay.
    """

    def __init__(
        self,
        *,
        max_loaded: int | None = None,
        capacity_mb: float | None = None,
        memory_mb: Mapping[str, float] | None = None,
        gpus: Gpus | None = None,
    ) -> None:
        if max_loaded is not None and max_loaded < 1:
            raise ValueError("maxLoaded: must be at least 1")
        self._max_loaded = max_loaded
        self._capacity_mb = capacity_mb
        self._memory_mb: Mapping[str, float] = {} if memory_mb is None else memory_mb
        self._gpus = gpus or Gpus()

    def eviction_for(self, target: str, running: Sequence[str]) -> frozenset[str]:
        """Return which of the `running` models must stop so that `target` can be loaded."""
        kept = list(running)
        evicted = set()
        while over_limit := self._over_limit(target, kept):
            oldest = over_limit[0]
            kept.remove(oldest)
            evicted.add(oldest)
        return frozenset(evicted)

    def _over_limit(self, target: str, kept: Sequence[str]) -> Sequence[str]:
        """Return the models of which one must be evicted, least recently used first; [] if there is room."""
        if self._max_loaded is not None and len(kept) + 1 > self._max_loaded:
            return kept
        if self._capacity_mb is not None and not self._fit(target, kept, self._capacity_mb):
            return kept
        for gpu in self._gpus.gpus_of.get(target, ()):
            sharing, gpu_mb = self._gpus.on(gpu, kept), self._gpus.total_mb.get(gpu)
            if sharing and not (gpu_mb and self._fit(target, sharing, gpu_mb)):
                return sharing
        return []

    def _fit(self, target: str, others: Sequence[str], capacity_mb: float) -> bool:
        return capacity_mb >= sum(self._memory_mb.get(model, capacity_mb) for model in (target, *others))
