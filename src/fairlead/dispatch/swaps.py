"""Which model is loaded next, and which make room for it (spec 4). Pure: knows no queue and no process."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from fairlead.dispatch.placement import Place
from fairlead.dispatch.places import Places
from fairlead.dispatch.ticket import Wish
from fairlead.job import Job
from fairlead.swap.policy import EvictionPolicy, KeepEverything, SwapReason

# Who waits starves after this part of the bound on its wait: the rest is for others who starve before it.
PATIENCE = 2 / 3


class Swap(NamedTuple):
    """A model to load, the models that it evicts, and why those."""

    model: str
    evict: frozenset[str]
    reason: SwapReason


class Swaps:
    """What is wanted, what is on its way up or down, and when the next swap may start.

    A model that works is never evicted: it goes on with the jobs that wait for it, so that swaps are few,
    until somebody starves for another; then it gets no more jobs, and is evicted when it is idle.

    `places` are those of all nodes, and the scheduler's; a model that is evicted loses its place here.
    """

    def __init__(
        self,
        places: Places,
        policy: EvictionPolicy | None = None,
        loadable: frozenset[str] = frozenset(),
    ) -> None:
        self._places = places
        self._policy = policy or KeepEverything()
        self._loadable = loadable
        self._loading: set[str] = set()
        self._stopping: set[str] = set()
        # Of jobs and wishes together; in the order in which the models began to be wanted, or to starve.
        self._wanted: dict[str, int] = {}
        self._starved: dict[str, int] = {}
        # Of those who want it, they who cannot be passed on to a server elsewhere.
        self._unrelayed: dict[str, int] = {}
        self._wishes: dict[str, Wish] = {}
        self._priorities: Mapping[str, int] = {}

    def arrange(self, policy: EvictionPolicy, loadable: frozenset[str]) -> None:
        """Decide by this policy from now on, and load these models."""
        self._policy = policy
        self._loadable = loadable

    def prefer(self, priorities: Mapping[str, int]) -> None:
        """Of the models that are wanted, load those with the higher number first; 0 of whom none is said."""
        self._priorities = priorities

    # Who wants what ----------------------------------------------------------------------------------

    def wanted(self, job: Job) -> None:
        """A job waits for its model."""
        _add(self._wanted, job.model)
        if job.relay is None or job.needs_own_node:
            _add(self._unrelayed, job.model)

    def unwanted(self, job: Job, *, starved: bool) -> None:
        """A job that waited does not any more."""
        self._want_less(job.model, starved=starved)
        if job.relay is None or job.needs_own_node:
            _subtract(self._unrelayed, job.model)

    def starved(self, model: str) -> None:
        """One who waits has waited so long that this model's turn comes before those of the loaded ones."""
        _add(self._starved, model)

    def wants_only(self, models: frozenset[str]) -> bool:
        """Whether nothing is wanted but these models."""
        return self._wanted.keys() <= models

    def wish(self, wish: Wish) -> None:
        """Somebody wants the model without a job. There is one wish for a model at a time."""
        assert wish.model not in self._wishes
        self._wishes[wish.model] = wish
        _add(self._wanted, wish.model)

    def is_wished(self, wish: Wish) -> bool:
        """Whether this wish is not over yet."""
        return self._wishes.get(wish.model) is wish

    def wished(self) -> list[str]:
        """Return the models for which there is a wish."""
        return list(self._wishes)

    def unwish(self, model: str) -> Wish | None:
        """Return the wish for a model, if there is one: it is over."""
        wish = self._wishes.pop(model, None)
        if wish is not None:
            self._want_less(model, starved=wish.starved)
        return wish

    def _want_less(self, model: str, *, starved: bool) -> None:
        _subtract(self._wanted, model)
        if starved:
            _subtract(self._starved, model)

    # What becomes of models --------------------------------------------------------------------------

    def is_loadable(self, model: str) -> bool:
        """Whether a swap could load it."""
        return model in self._loadable

    def ended(self, models: Iterable[str]) -> None:
        """The load of these is over, well or badly."""
        self._loading.difference_update(models)
        self._stopping.difference_update(models)

    def stops(self, models: Iterable[str]) -> None:
        """These have no place any more, but what they take is not free before they are `gone`."""
        self._stopping |= set(models) - self._loading

    def gone(self, models: Iterable[str]) -> None:
        """The processes of these are no more."""
        self._stopping.difference_update(models)

    def give_up(self, model: str) -> bool:
        """End the load of a model, if it is under way; return whether it was."""
        if model not in self._loading:
            return False
        self._loading.remove(model)
        self._stopping.add(model)
        return True

    def start(self) -> tuple[list[Swap], list[Place]]:
        """Return the swaps that start now: what to load, and what to evict; its places are gone from here on.

        Marks the places that are to run dry, and returns those, too, that are not to any more: nobody starves
        for their room now.
        """
        if not self._loadable:
            return [], []
        dry = [place for place in self._places.values() if place.draining]
        for place in dry:
            place.draining = False
        swaps = list(self._swaps()) if self._wanted else []
        return swaps, [place for place in dry if not place.draining]

    # Decisions ---------------------------------------------------------------------------------------

    def _swaps(self) -> Iterator[Swap]:
        for model in self._missing():
            running = self._running(model)
            evict = self._policy.eviction_for(model, running)
            victims = [place for place in self._places.ours() if place.node.models & evict]
            if evict & self._loading or any(place.draining for place in victims):
                continue
            if evict and self._is_spare(model):
                continue
            if any(place.busy for place in victims):
                for place in victims:
                    place.draining = model in self._starved
                continue
            for place in victims:
                self._places.remove(place.node.id)
                self.stops(place.node.models)
            self._stopping.discard(model)
            self._loading.add(model)
            yield Swap(model, evict, self._policy.reason_for(model, running))

    def _missing(self) -> list[str]:
        """What is wanted and could be loaded: first who starves, then who waits.

        Among these the higher priority comes first, and then who has waited longest.
        """
        by_priority = sorted(self._wanted, key=lambda model: -self._priorities.get(model, 0))
        by_turn = dict.fromkeys([*self._starved, *by_priority])
        loadable = [model for model in by_turn if model in self._loadable and model not in self._loading]
        missing = [model for model in loadable if self._places.of_ours(model) is None]
        return [model for model in missing if model in self._wishes or not self._is_held(model)]

    def _is_held(self, model: str) -> bool:
        """Whether all who wait for the model can have it from nodes that are there."""
        staying = [place.limits for place in self._places.holding(model) if not place.leaving]
        if model in self._unrelayed:
            return any(not limits.needs_relay for limits in staying)
        return bool(staying)

    def _running(self, target: str) -> list[str]:
        """What is on its way out, what is loaded, used longest ago first, and what is being loaded."""
        by_use = sorted(self._places.ours(), key=lambda place: (place.busy > 0, place.used))
        loaded = (model for place in by_use for model in place.node.models)
        running = dict.fromkeys([*sorted(self._stopping), *loaded, *sorted(self._loading)])
        running.pop(target, None)
        return list(running)

    def _is_spare(self, model: str) -> bool:
        """Whether nobody wants it but a wish that is not to evict anything."""
        wish = self._wishes.get(model)
        return wish is not None and wish.spare and self._wanted[model] == 1


def _add(counts: dict[str, int], model: str) -> None:
    counts[model] = counts.get(model, 0) + 1


def _subtract(counts: dict[str, int], model: str) -> None:
    """Count one less. Who is not counted any more is at the end when it is counted again."""
    counts[model] -= 1
    if not counts[model]:
        del counts[model]
