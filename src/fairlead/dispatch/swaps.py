"""Which model is loaded next, and which make room for it (spec 4). Pure: knows no queue and no process."""

from collections.abc import Iterable, Mapping

from fairlead.dispatch.placement import Place
from fairlead.swap.policy import EvictionPolicy


class Swaps:
    """What is being loaded, and when the next swap may start.

    A model that works is never evicted: it goes on with the jobs that wait for it, so that swaps are few,
    until somebody starves for another; then it gets no more jobs, and is evicted when it is idle.
    """

    def __init__(self, policy: EvictionPolicy, loadable: frozenset[str]) -> None:
        self._policy = policy
        self._loadable = loadable
        self._loading: set[str] = set()

    def ended(self, models: frozenset[str]) -> None:
        """These are loaded, or could not be."""
        self._loading -= models

    def start(
        self, wanted: Iterable[str], *, starved: Mapping[str, int], places: dict[str, Place]
    ) -> list[tuple[str, frozenset[str]]]:
        """Return the swaps that start now: what to load, and what to evict; its places are gone from here on.

        `wanted` are the models of waiting jobs in the order of arrival; starved ones come first. Marks the
        places that are to run dry.
        """
        if not self._loadable:
            return []
        for place in places.values():
            place.draining = False
        started = []
        for model in sorted(self._missing(wanted, places), key=lambda model: not starved.get(model)):
            evict = self._policy.eviction_for(model, self._running(places.values()))
            victims = [place for place in places.values() if place.node.models & evict]
            if evict & self._loading or any(place.draining for place in victims):
                continue
            if any(place.busy for place in victims):
                for place in victims:
                    place.draining = bool(starved.get(model))
                continue
            for place in victims:
                del places[place.node.id]
            self._loading.add(model)
            started.append((model, evict))
        return started

    def _running(self, places: Iterable[Place]) -> list[str]:
        """What is loaded, used longest ago first, and what is being loaded."""
        by_use = sorted(places, key=lambda place: (place.busy > 0, place.used))
        return list(
            dict.fromkeys([*(model for place in by_use for model in place.node.models), *self._loading])
        )

    def _missing(self, wanted: Iterable[str], places: Mapping[str, Place]) -> list[str]:
        held = frozenset().union(*(place.node.models for place in places.values()))
        return [model for model in dict.fromkeys(wanted) if model in self._loadable - self._loading - held]
