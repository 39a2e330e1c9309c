"""Which model is loaded next, and which are evicted for it. Pure: knows no queue and no process."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from fairlead.dispatch.node_pool import NodePool
from fairlead.dispatch.node_state import NodeState
from fairlead.dispatch.ticket import LoadRequest
from fairlead.job import Job
from fairlead.swap.policy import EvictionPolicy, KeepEverything, SwapReason

# A job starves after this part of its longest wait. The rest is for jobs that starved earlier.
PATIENCE = 2 / 3


class Swap(NamedTuple):
    """A model to load, the models to evict for it, and why those."""

    model: str
    evict: frozenset[str]
    reason: SwapReason


class Swaps:
    """Which models are requested, loading or stopping, and when the next swap may start.

    A busy model is never evicted: it serves the jobs that wait for it, so that swaps are few. Once a job
    starves for another model, the busy one gets no more jobs, and is evicted when it is idle.

    `places` are the scheduler's, of all nodes; a model that is evicted loses its place here.
    """

    def __init__(
        self,
        places: NodePool,
        policy: EvictionPolicy | None = None,
        loadable: frozenset[str] = frozenset(),
    ) -> None:
        self._places = places
        self._policy = policy or KeepEverything()
        self._loadable = loadable
        self._loading: set[str] = set()
        self._stopping: set[str] = set()
        # Jobs and load requests per model, in the order in which the models were first requested, or starved.
        self._wanted: dict[str, int] = {}
        self._starved: dict[str, int] = {}
        # Waiting jobs per model that cannot be relayed to a remote server.
        self._unrelayed: dict[str, int] = {}
        self._wishes: dict[str, LoadRequest] = {}
        self._priorities: Mapping[str, int] = {}

    def arrange(self, policy: EvictionPolicy, loadable: frozenset[str]) -> None:
        """Use this policy and these loadable models from now on."""
        self._policy = policy
        self._loadable = loadable

    def prefer(self, priorities: Mapping[str, int]) -> None:
        """Load requested models with a higher number first; a model without a number has 0."""
        self._priorities = priorities

    # Demand ------------------------------------------------------------------------------------------

    def wanted(self, job: Job) -> None:
        """Count a job that waits for its model."""
        _add(self._wanted, job.model)
        if job.relay is None or job.needs_own_node:
            _add(self._unrelayed, job.model)

    def unwanted(self, job: Job, *, starved: bool) -> None:
        """Stop counting a job that waited."""
        self._want_less(job.model, starved=starved)
        if job.relay is None or job.needs_own_node:
            _subtract(self._unrelayed, job.model)

    def starved(self, model: str) -> None:
        """Count a job or load request whose long wait gives its model precedence over loaded ones."""
        _add(self._starved, model)

    def wants_only(self, models: frozenset[str]) -> bool:
        """Return whether no other models are requested."""
        return self._wanted.keys() <= models

    def wish(self, wish: LoadRequest) -> None:
        """Add a load request without a job. A model has one at a time."""
        assert wish.model not in self._wishes
        self._wishes[wish.model] = wish
        _add(self._wanted, wish.model)

    def is_wished(self, wish: LoadRequest) -> bool:
        """Return whether this load request is still pending."""
        return self._wishes.get(wish.model) is wish

    def wished(self) -> list[str]:
        """Return the models with a load request."""
        return list(self._wishes)

    def unwish(self, model: str) -> LoadRequest | None:
        """Remove and return the load request for a model, if there is one."""
        wish = self._wishes.pop(model, None)
        if wish is not None:
            self._want_less(model, starved=wish.starved)
        return wish

    def _want_less(self, model: str, *, starved: bool) -> None:
        _subtract(self._wanted, model)
        if starved:
            _subtract(self._starved, model)

    # States of models --------------------------------------------------------------------------------

    def is_loadable(self, model: str) -> bool:
        """Return whether a swap could load it."""
        return model in self._loadable

    def ended(self, models: Iterable[str]) -> None:
        """Note that the loads of these models have succeeded or failed."""
        self._loading.difference_update(models)
        self._stopping.difference_update(models)

    def stops(self, models: Iterable[str]) -> None:
        """Note that these have no place any more; their memory is free only when they are `gone`."""
        self._stopping |= set(models) - self._loading

    def gone(self, models: Iterable[str]) -> None:
        """Note that the processes of these models have ended."""
        self._stopping.difference_update(models)

    def give_up(self, model: str) -> bool:
        """Cancel the load of a model; return whether there was one."""
        if model not in self._loading:
            return False
        self._loading.remove(model)
        self._stopping.add(model)
        return True

    def start(self) -> tuple[list[Swap], list[NodeState]]:
        """Start swaps: return them, and the places that need not drain any more.

        The victims of a swap have no places from here on. If one of them is busy, the swap does not start;
        all are marked as draining while a job or load request starves for the model.
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
        """Return the requested models that a swap could load: first the starved ones, the earliest first.

        Of the others, the higher priority comes first, and then the one that was requested first.
        """
        by_priority = sorted(self._wanted, key=lambda model: -self._priorities.get(model, 0))
        by_turn = dict.fromkeys([*self._starved, *by_priority])
        loadable = [model for model in by_turn if model in self._loadable and model not in self._loading]
        missing = [model for model in loadable if self._places.of_ours(model) is None]
        return [model for model in missing if model in self._wishes or not self._is_held(model)]

    def _is_held(self, model: str) -> bool:
        """Return whether nodes that stay can run all jobs that wait for the model."""
        staying = [place.limits for place in self._places.holding(model) if not place.leaving]
        if model in self._unrelayed:
            return any(not limits.needs_relay for limits in staying)
        return bool(staying)

    def _running(self, target: str) -> list[str]:
        """Return stopping models, then loaded ones, idle and least recently used first, then loading ones."""
        by_use = sorted(self._places.ours(), key=lambda place: (place.busy > 0, place.used))
        loaded = (model for place in by_use for model in place.node.models)
        running = dict.fromkeys([*sorted(self._stopping), *loaded, *sorted(self._loading)])
        running.pop(target, None)
        return list(running)

    def _is_spare(self, model: str) -> bool:
        """Return whether the only demand for the model is a request that must not evict."""
        wish = self._wishes.get(model)
        return wish is not None and wish.spare and self._wanted[model] == 1


def _add(counts: dict[str, int], model: str) -> None:
    counts[model] = counts.get(model, 0) + 1


def _subtract(counts: dict[str, int], model: str) -> None:
    """Decrement a count. A model that falls to 0 goes to the end when it is counted again."""
    counts[model] -= 1
    if not counts[model]:
        del counts[model]
