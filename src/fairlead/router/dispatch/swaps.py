"""Which model is loaded next, and which are evicted for it. Pure: independent of queues and processes."""

from collections.abc import Iterable, Mapping

from fairlead.base.errors import FairleadError, LoadCancelled
from fairlead.router.dispatch.effects import Effects
from fairlead.router.dispatch.node_pool import NodePool
from fairlead.router.dispatch.node_state import NodeState
from fairlead.router.dispatch.ticket import LoadRequest, Ticket
from fairlead.router.swap.policy import EvictionPolicy, KeepEverything

# A job starves after this part of its longest wait. The rest is for jobs that starved earlier.
STARVATION_SHARE = 2 / 3


class Swaps:
    """Which models are requested, loading or stopping, and when the next swap may start.

    effects: carries out what is decided. Only this class calls the methods of `effects.models`, each after it
        has changed its own state.
    nodes: the scheduler's, local and remote; a swap removes the nodes of the models that it evicts.
    policy: which models may be loaded together; None: no model can be loaded.
    loadable: the models that a swap can load.

    A busy model is never evicted: it serves the jobs that wait for it, so that swaps are few. Once a job
    starves for another model, the busy one gets no more jobs, and is evicted when it is idle.

        seats 1, room for one model, jobs A1 B1 A2 B2 in this order
        A is loaded: A1, then A2 in the same load; B starves meanwhile → A gets no more jobs → B1, B2
    """

    def __init__(
        self,
        effects: Effects,
        nodes: NodePool,
        policy: EvictionPolicy | None = None,
        loadable: frozenset[str] = frozenset(),
    ) -> None:
        self._effects = effects
        self._nodes = nodes
        self._policy = policy or KeepEverything()
        self._loadable = loadable
        self._loading: set[str] = set()
        self._stopping: set[str] = set()
        # Jobs and load requests per model, in the order in which the models were first requested, or starved.
        self._requested: dict[str, int] = {}
        self._starved: dict[str, int] = {}
        # Waiting jobs per model that cannot run on a remote server.
        self._local_only: dict[str, int] = {}
        self._load_requests: dict[str, LoadRequest] = {}
        self._priorities: Mapping[str, int] = {}

    def configure(self, policy: EvictionPolicy, loadable: frozenset[str]) -> None:
        """Use this policy and these loadable models from now on."""
        self._policy = policy
        self._loadable = loadable

    def prioritize(self, priorities: Mapping[str, int]) -> None:
        """Load requested models with a higher number first; a model without a number has 0."""
        self._priorities = priorities

    # Demand ------------------------------------------------------------------------------------------

    def job_queued(self, ticket: Ticket) -> None:
        """Count a job that waits for its model."""
        _add(self._requested, ticket.job.model)
        if ticket.needs_local_node:
            _add(self._local_only, ticket.job.model)

    def job_dequeued(self, ticket: Ticket) -> None:
        """Stop counting a job that waited."""
        self._subtract_request(ticket.job.model, starved=ticket.starved)
        if ticket.needs_local_node:
            _subtract(self._local_only, ticket.job.model)

    def require_local_node(self, ticket: Ticket) -> bool:
        """Let a waiting job that remote servers refuse wait for a load here; return whether one may help."""
        model = ticket.job.model
        if not self.is_loadable(model) or self._nodes.local_with(model) is not None:
            return False
        if not ticket.needs_local_node:
            ticket.needs_local_node = True
            _add(self._local_only, model)
        return True

    def starved(self, model: str) -> None:
        """Count a job or load request that has waited so long that its model precedes loaded ones."""
        _add(self._starved, model)

    def requests_only(self, models: frozenset[str]) -> bool:
        """Return whether no other models are requested."""
        return self._requested.keys() <= models

    def request_load(self, request: LoadRequest, refusal: FairleadError | None) -> None:
        """Add a request for a model without a job, of which a model has one at a time.

        If the model is loaded, the request ends at once. Otherwise `refusal` ends it, if there is one.
        """
        assert request.model not in self._load_requests
        node = self._nodes.local_with(request.model)
        is_loaded = node is not None and not node.leaving
        if is_loaded or refusal is not None:
            self._effects.models.load_ended(request, None if is_loaded else refusal)
        else:
            self._load_requests[request.model] = request
            _add(self._requested, request.model)

    def load_starved(self, request: LoadRequest) -> None:
        """Do as `starved`, for a load request that may have ended already."""
        if self._load_requests.get(request.model) is request and not request.starved:
            request.starved = True
            self.starved(request.model)

    def models_with_load_request(self) -> list[str]:
        """Return the models with a load request."""
        return list(self._load_requests)

    def end_load_request(self, model: str, error: FairleadError | None) -> None:
        """End the load request for a model, if there is one; None: the model is loaded."""
        request = self._load_requests.pop(model, None)
        if request is not None:
            self._subtract_request(model, starved=request.starved)
            self._effects.models.load_ended(request, error)

    def _subtract_request(self, model: str, *, starved: bool) -> None:
        _subtract(self._requested, model)
        if starved:
            _subtract(self._starved, model)

    # States of models --------------------------------------------------------------------------------

    def is_loadable(self, model: str) -> bool:
        """Return whether a swap could load it."""
        return model in self._loadable

    def load_ended(self, models: Iterable[str]) -> None:
        """Record that the loads of these models have succeeded or failed."""
        self._loading.difference_update(models)
        self._stopping.difference_update(models)

    def stopping(self, models: Iterable[str]) -> None:
        """Record that these have no node any more; their memory is free only when they have `stopped`."""
        self._stopping |= set(models) - self._loading

    def stopped(self, models: Iterable[str]) -> None:
        """Record that the processes of these models have ended."""
        self._stopping.difference_update(models)

    def stop(self, models: Iterable[str]) -> None:
        """Stop idle models, which have no node any more."""
        self.stopping(models)
        for model in models:
            self._effects.models.stop_model(model)

    def cancel_load(self, model: str, error: FairleadError | None) -> None:
        """Cancel the load of a model, if it is loading, and end its load request, if there is one."""
        if model in self._loading:
            self._loading.remove(model)
            self._stopping.add(model)
            error = error or LoadCancelled(f"{model} was unloaded before it was ready")
            self.end_load_request(model, error)
            self._effects.models.stop_model(model)

    def report_idle(self, node: NodeState | None) -> None:
        """Report a node that has become idle, if its models can be loaded again."""
        if node is None or node.jobs or node.leaving or not self._nodes.is_current(node):
            return
        if node.limits.evictable and any(map(self.is_loadable, node.models)):
            self._effects.models.idle(node.id, node.models, node.used)

    # Decisions ---------------------------------------------------------------------------------------

    def start(self) -> bool:
        """Start swaps; return whether nodes need not drain any more, and have seats again.

        A swap removes the nodes of the models that it evicts. If one of them is busy, the swap does not
        start; all are marked as draining while a job or load request starves for the model.
        """
        if not self._loadable:
            return False
        draining_before = [node for node in self._nodes.local() if node.draining]
        for node in draining_before:
            node.draining = False
        for model in self._missing() if self._requested else ():
            self._start(model)
        return any(not node.draining for node in draining_before)

    def _start(self, model: str) -> None:
        """Start the swap that loads a model, if it may start now."""
        running = self._running(model)
        evict = self._policy.eviction_for(model, running)
        evicted = [node for node in self._nodes.local() if node.models & evict]
        if evict & self._loading or any(node.draining for node in evicted):
            return
        if evict and self._only_if_free(model):
            return
        if any(node.jobs for node in evicted):
            for node in evicted:
                node.draining = model in self._starved
            return
        for node in evicted:
            self._nodes.remove(node.id)
            self.stopping(node.models)
        self._stopping.discard(model)
        self._loading.add(model)
        self._effects.models.start_swap(model, evict, self._policy.reason_for(model, running))

    def _missing(self) -> list[str]:
        """Return the requested models that a swap could load: first the starved ones, the earliest first.

        Of the others, the higher priority comes first, and then the one that was requested first.
        """
        by_priority = sorted(self._requested, key=lambda model: -self._priorities.get(model, 0))
        by_turn = dict.fromkeys([*self._starved, *by_priority])
        loadable = [model for model in by_turn if model in self._loadable and model not in self._loading]
        missing = [model for model in loadable if self._nodes.local_with(model) is None]
        return [model for model in missing if model in self._load_requests or not self._has_node(model)]

    def _has_node(self, model: str) -> bool:
        """Return whether nodes that stay can run all jobs that wait for the model."""
        staying = [node.limits for node in self._nodes.with_model(model) if not node.leaving]
        if model in self._local_only:
            return any(not limits.needs_relay for limits in staying)
        return bool(staying)

    def _running(self, target: str) -> list[str]:
        """Return stopping models, then loaded ones, idle and least recently used first, then loading ones."""
        by_use = sorted(self._nodes.local(), key=lambda node: (node.jobs > 0, node.used))
        loaded = (model for node in by_use for model in node.models)
        running = dict.fromkeys([*sorted(self._stopping), *loaded, *sorted(self._loading)])
        running.pop(target, None)
        return list(running)

    def _only_if_free(self, model: str) -> bool:
        """Return whether the only demand for the model is a request that must not evict."""
        request = self._load_requests.get(model)
        return request is not None and request.only_if_free and self._requested[model] == 1


def _add(counts: dict[str, int], model: str) -> None:
    counts[model] = counts.get(model, 0) + 1


def _subtract(counts: dict[str, int], model: str) -> None:
    """Decrement a count. A model that falls to 0 goes to the end when it is counted again."""
    counts[model] -= 1
    if not counts[model]:
        del counts[model]
