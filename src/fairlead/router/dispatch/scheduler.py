"""Assigns jobs to seats and decides which models to load. Independent of clocks, sockets and text.

A pure state machine: events come in as public methods, and actions go out through `Effects`. Every event ends
in `_pump`, the only place where seats are granted and swaps are started. The parts hold all state: waiting
jobs (`Queue`), nodes and their seats (`NodePool`), the changes of tickets (`Tickets`), loads and evictions
(`Swaps`), admission (`JobAdmission`). All changes are synchronous, so in Trio each event is a critical
section. Nothing is logged here: decisions are logged where they are executed.
"""

from collections.abc import Collection, Iterable, Mapping
from random import Random

from fairlead.base.errors import FairleadError, ModelNotFound, NodesFull, NoOtherNode, NoQueue, QueueFull
from fairlead.nodes.limits import NodeLimits
from fairlead.router.dispatch.admission import JobAdmission, full_error, shutting_down
from fairlead.router.dispatch.effects import Effects, NodeCounts, PausedModel, SchedulerStatistics
from fairlead.router.dispatch.held_sequences import ALL_AT_ONCE, HeldSequences
from fairlead.router.dispatch.job_spec import JobSpec
from fairlead.router.dispatch.kept_seats import KeptSeats
from fairlead.router.dispatch.node_pool import NodePool
from fairlead.router.dispatch.node_state import NodeState
from fairlead.router.dispatch.queue import WAITING_BYTES, Fairness, Queue
from fairlead.router.dispatch.suspension import Suspension
from fairlead.router.dispatch.swaps import Swaps
from fairlead.router.dispatch.tenant_counters import TenantCounters
from fairlead.router.dispatch.ticket import LoadRequest, RunState, Ticket, TicketState
from fairlead.router.dispatch.tickets import Tickets
from fairlead.router.dispatch.wait_survey import QueueOrder
from fairlead.router.swap.policy import EvictionPolicy


class Scheduler:
    """One global fair queue over the seats of all nodes.

    `loadable` are the models that a swap can load, as `policy` allows; with `rejects_loading` no job waits
    for a load. `waiting_bytes` bounds the queued requests for remote nodes (`QueuedBytes`). With `suspends`,
    sequences pause for jobs of tenants that hold fewer seats than their share, and of the classes
    `preempting` (`suspension.py`), and where they cannot, seats are kept for such tenants for a quantum
    (`kept_seats.py`). Guarantees: a job with free seats never counts against the queue; while seats are free,
    no job that fits them waits, unless they are kept for another; a model with work in flight is never
    evicted; every ticket ends once.
    """

    def __init__(
        self,
        effects: Effects,
        *,
        capacity: int,
        random: Random,
        fairness: Fairness = "roundRobin",
        min_share: float = 0.0,
        tenant_weights: Mapping[str, float] | None = None,
        policy: EvictionPolicy | None = None,
        loadable: frozenset[str] = frozenset(),
        rejects_loading: bool = False,
        waiting_bytes: int = WAITING_BYTES,
        suspends: bool = True,
        preempting: Collection[int] = (),
    ) -> None:
        self._effects = effects
        self._queue = Queue(
            capacity,
            fairness=fairness,
            min_share=min_share,
            tenant_weights=tenant_weights,
            waiting_bytes=waiting_bytes,
        )
        self._nodes = NodePool(random)
        self._swaps = Swaps(effects, self._nodes, policy, loadable)
        self._kept = KeptSeats(self._queue, self._nodes) if suspends else None
        self._tickets = Tickets(effects, self._queue, self._nodes, self._swaps, kept=self._kept)
        self._suspension = Suspension(self._queue, self._nodes, preempting=preempting) if suspends else None
        self._unsuited: dict[Ticket, None] = {}  # queued jobs that a node has refused, and some of the past
        self._rejects_loading = rejects_loading
        self._admission = JobAdmission(self._queue, self._nodes, self._swaps, rejects_loading=rejects_loading)

    # Events of a job ---------------------------------------------------------------------------------

    def submit(self, ticket: Ticket, *, too_long: QueueFull | None = None) -> None:
        """Grant, queue or refuse a new job; with `too_long`, refuse it rather than queue it."""
        job = ticket.job
        if self._kept is not None and self._nodes.with_fresh_seats():
            self._kept.update(job)
        refusal = self._admission.refusal(job, too_long=too_long) or self._tickets.make_room(job)
        if refusal is not None:
            self._tickets.refuse(ticket, refusal)
            return
        self._tickets.enqueue(ticket)
        self._pump()

    def restore(
        self, ticket: Ticket, node_id: str, held: HeldSequences = ALL_AT_ONCE, *, charged: float = 0.0
    ) -> None:
        """Give a new job the seats that it holds already, from an earlier scheduler that has charged for it.

        The node may be down; its seats are counted when it comes up. The charge is part of the tenant's
        counter (`restore_counters`), and at least the expected cost of the sequences that have begun. The
        others wait for their turns.
        """
        self._tickets.restore(ticket, node_id, held, charged=charged)

    def restore_counters(self, excess: Mapping[str, float]) -> None:
        """Raise the counters of tenants above that of a new tenant, as an earlier scheduler reported them."""
        self._queue.restore_counters(excess)

    def leave(self, ticket: Ticket) -> None:
        """End a job after its client disconnected, in any state; it is charged for what it used."""
        self.finished(ticket, cost=ticket.charged if ticket.has_begun else 0.0)

    def finished(self, ticket: Ticket, *, cost: float) -> None:
        """End a job, which has cost this much, and refund what was charged in excess."""
        node = self._tickets.end(ticket, cost)
        if node is not None:
            self._tickets.left_node(ticket, node)
        self._pump()
        self._swaps.report_idle(node)

    def sequence_ended(self, ticket: Ticket, index: int) -> None:
        """Free the seat of a sequence that has ended before its job."""
        self._tickets.sequence_ended(ticket, index)
        self._pump()

    def ripened(self, ticket: Ticket, index: int) -> None:
        """Record that a sequence has run for a quantum, so that it may be suspended."""
        run = ticket.runs.get(index)
        if run is not None and run.state is RunState.RUNNING and not run.is_ripe:
            run.is_ripe = True
            self._pump()

    def seats_rested(self, node_id: str, number: int) -> None:
        """Record that a quantum has passed since the report of `Effects.seats_freed` with this number."""
        node = self._nodes.get(node_id)
        if node is not None and node.fresh:
            self._nodes.rested(node, number)
            self._pump()

    def first_delta(self, ticket: Ticket) -> None:
        """Record that a job's answer has begun; its deadline does not apply any more."""
        ticket.has_begun = True
        if ticket.node is not None and (ticket.is_trial or ticket.node.has_failed):
            ticket.node.has_failed = False
            self._tickets.succeeded(ticket)
            self._pump()

    def charge(self, ticket: Ticket, cost: float) -> None:
        """Charge a job for its cost until now, as far as it exceeds the estimate."""
        self._tickets.charge(ticket, cost)

    def requeued(self, ticket: Ticket) -> None:
        """Requeue a job after its node failed, unless its deadline has passed; another node is preferred."""
        self.node_failed(ticket)
        self.stale(ticket)

    def unsuited(self, ticket: Ticket) -> None:
        """Requeue a job that its node refused because of its set-up; if all have, end it."""
        self.node_failed(ticket)
        assert ticket.node is not None
        ticket.unsuited += (ticket.node,)
        self._requeue(ticket)

    def stale(self, ticket: Ticket) -> None:
        """Requeue a job, with a preference for another node."""
        ticket.failed_at = ticket.node
        self._requeue(ticket)

    def node_failed(self, ticket: Ticket) -> None:
        """Make the job's node the last to get jobs, until one of them begins or `recovered`."""
        if ticket.node is not None:
            ticket.node.has_failed = True

    def recovered(self, node_id: str) -> None:
        """Record that a node has not failed for a while."""
        if (node := self._nodes.get(node_id)) is not None:
            node.has_failed = False

    def rejected_by_node(
        self, ticket: Ticket, named_s: float | None = None, *, is_limit: bool = False
    ) -> None:
        """Requeue a job that its node rejected as full, and pause the model there."""
        self._tickets.rejected(ticket, named_s, is_limit=is_limit)
        if ticket.late is not None:
            ticket.late = self.full_error(ticket.job) or ticket.late
        ticket.failed_at = None
        self._requeue(ticket)

    def resume(self, pause: PausedModel) -> None:
        """Let one job try a model of a node after a pause."""
        node = self._nodes.get(pause.node_id)
        if node is not None and pause.model in node.full:
            self._tickets.resume(node, pause)
            self._pump()

    def deadline(self, ticket: Ticket, error: FairleadError) -> None:
        """End the wait of a job. A stream waits for its first delta, other jobs for their seat."""
        ticket.late = error
        if ticket.has_begun:
            return
        if ticket.state is TicketState.QUEUED:
            self._tickets.withdraw(ticket, error)
            self._pump()
        elif ticket.state is TicketState.GRANTED and ticket.job.stream:
            self._effects.stop(ticket, error)

    def starved(self, ticket: Ticket) -> None:
        """Record that a job has waited so long that its model takes precedence over those that are loaded."""
        if ticket.state is TicketState.QUEUED and not ticket.starved:
            ticket.starved = True
            self._swaps.starved(ticket.job.model)
            self._pump()

    # Events of models --------------------------------------------------------------------------------

    def configure_models(self, policy: EvictionPolicy, loadable: frozenset[str]) -> None:
        """Load these models from now on, and evict others for them as this policy says."""
        self._swaps.configure(policy, loadable)
        self._pump()

    def prioritize(self, priorities: Mapping[str, int]) -> None:
        """Load requested models with a higher number first; a model without a number has 0."""
        self._swaps.prioritize(priorities)
        self._pump()

    def remove_model(self, model: str, error: FairleadError | None = None) -> None:
        """Stop serving a model; its waiting jobs end unless another node has it."""
        self._fail(model, error or ModelNotFound(f"the model {model} is not served any more", param="model"))
        self._pump()

    def request_load(self, request: LoadRequest) -> None:
        """Queue a request for a model without a job, at the position of a job that arrives now."""
        self._swaps.request_load(request, self._admission.load_refusal(request))
        self._pump()

    def allow_eviction(self, request: LoadRequest) -> None:
        """Allow a load request to evict other models from now on."""
        request.only_if_free = False
        self._pump()

    def load_starved(self, request: LoadRequest) -> None:
        """Record that a load request has waited so long that it takes precedence over loaded models."""
        self._swaps.load_starved(request)
        self._pump()

    def unload(self, model: str, error: FairleadError | None = None) -> None:
        """Stop a local model once its jobs have finished; if it is still loading, at once."""
        if (node := self._nodes.local_with(model)) is not None:
            self._nodes.leave(node)
        else:
            self._swaps.cancel_load(model, error)
        if error is not None:
            self._fail(model, error)
        self._pump()

    def expired(self, node_id: str, used: int) -> None:
        """Unload a node's idle models after their time to live, unless it was `used` meanwhile."""
        node = self._nodes.get(node_id)
        if node is not None and node.used == used and not node.jobs:
            self._nodes.leave(node)
            self._pump()

    def stopped(self, models: frozenset[str]) -> None:
        """Record that the processes of these models have ended and hold no memory any more."""
        self._swaps.stopped(models)
        self._pump()

    def load_failed(self, models: frozenset[str], error: FairleadError) -> None:
        """End the load requests for these models, and the jobs that no other node can run."""
        self._swaps.load_ended(models)
        for model in models:
            self._fail(model, error)
        self._pump()

    # Events of nodes and of the server ---------------------------------------------------------------

    def node_up(self, node_id: str, models: frozenset[str], limits: NodeLimits) -> None:
        """Add a node with loaded models. Seats of an earlier run of it are forgotten."""
        node = self._nodes.add(node_id, models, limits)
        if limits.evictable:
            self._swaps.load_ended(models)
            for model in models:
                self._swaps.end_load_request(model, None)
        for ticket in self._queue:
            if (error := self._nodes.length_error(ticket.job)) is not None:
                self._tickets.withdraw(ticket, error)
        self._pump()
        self._swaps.report_idle(node)

    def node_down(self, node_id: str) -> None:
        """Remove a node and its seats; jobs that held one get their error from the node."""
        node = self._nodes.remove(node_id)
        if node is not None and node.limits.evictable:
            self._swaps.stopping(node.models)
        self._pump()

    def seats_changed(self, node_id: str, models: frozenset[str], limits: NodeLimits) -> None:
        """Replace a node's models and limits. Running jobs keep their seats."""
        if self._nodes.change(node_id, models, limits):
            self._pump()

    def close_node(self, node_id: str) -> None:
        """Give a remote node no more jobs, not even after it restarts; its running jobs finish."""
        if self._nodes.close(node_id):
            self._pump()
        else:
            self._effects.node_closed(node_id)

    def reopen_node(self, node_id: str) -> None:
        """Allow a node of this name to get jobs the next time it comes up."""
        self._nodes.reopen(node_id)

    def drain(self) -> None:
        """Accept no jobs, and refuse waiting jobs and loads; started jobs go on, even after a failure."""
        self._admission.drain()
        for model in self._swaps.models_with_load_request():
            self._swaps.end_load_request(model, shutting_down())
        for ticket in self._queue:
            if not ticket.attempts:
                self._tickets.withdraw(ticket, shutting_down())
        self._pump()

    # Queries -----------------------------------------------------------------------------------------

    def full_error(self, job: JobSpec) -> NodesFull | None:
        """Return the error of a job that waits because all nodes that could run it are full; None if not."""
        return full_error(self._nodes, job)

    def counters(self, lines: Iterable[str]) -> TenantCounters:
        """Return the counters of the tenants of these lines, and of their teams."""
        return self._queue.counters(lines)

    def position(self, ticket: Ticket) -> int:
        """Return how many waiting jobs leave before this one, under the fairness in force."""
        return self._queue.position(ticket)

    def jobs_ahead(self, ticket: Ticket) -> list[JobSpec]:
        """Return the waiting jobs that leave before this one, in the order in which they do."""
        return self._queue.ahead(ticket)

    def waiting_jobs(self) -> list[JobSpec]:
        """Return all waiting jobs, in order of arrival."""
        return [ticket.job for ticket in self._queue]

    def waiting(self) -> int:
        """Return the number of waiting jobs."""
        return len(self._queue)

    def queue_order(self) -> QueueOrder:
        """Return all waiting jobs in the order in which they leave, and where newcomers would be."""
        return self._queue.order()

    def has_free_seat(self, model: str, seats: int = 1) -> bool:
        """Return whether a node with the model has free seats for a job that takes so many."""
        return self._nodes.has_seats_with(model, seats)

    def has_wide_jobs(self) -> bool:
        """Return whether a job waits that takes several seats."""
        return self._queue.has_wide_jobs

    def jobs_ahead_of_newcomer(
        self, model: str, line: str, priority: int, seats: int = 1
    ) -> list[JobSpec] | None:
        """Return the jobs that would leave before one that arrived now; None if its seats are free."""
        if self._nodes.has_seats_with(model, seats):
            return None
        return self._queue.ahead_of_newcomer(line, priority)

    def is_served(self, model: str) -> bool:
        """Return whether a node has the model, or a swap could load it."""
        return bool(self._nodes.with_model(model)) or self._swaps.is_loadable(model)

    def must_load(self, job: JobSpec) -> bool:
        """Return whether the job's model would have to be loaded for it."""
        return self._admission.must_load(job)

    def nodes(self) -> Collection[NodeState]:
        """Return the state of each node that is up."""
        return self._nodes.values()

    def node_counts(self, node_id: str) -> NodeCounts | None:
        """Return the counts of a node; None if it is not up."""
        node = self._nodes.get(node_id)
        return None if node is None else NodeCounts(node.busy, node.draining or node.leaving)

    def statistics(self) -> SchedulerStatistics:
        """Return the current counts."""
        nodes = self._nodes.values()
        return SchedulerStatistics(
            waiting=len(self._queue),
            running=sum(node.jobs for node in nodes),
            capacity=self._queue.capacity,
            seats=sum(node.limits.seats for node in nodes),
        )

    # Decisions ---------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Grant free seats in fair order, remove idle nodes that are leaving, and start swaps."""
        if self._unsuited:
            self._refuse_unsuited()
        self._tickets.grant_seats()
        nodes = len(self._nodes)
        self._remove_leaving_nodes()
        # Nodes that need not drain for a starving job any more have seats again. And a job that failed on one
        # node may have another seat there, once the only other node is gone.
        if self._swaps.start() or len(self._nodes) < nodes:
            self._tickets.grant_seats()
        if self._suspension is not None:
            while self._queue.waiting and any(
                self._tickets.exchange(*exchange) for exchange in self._suspension.exchanges()
            ):
                pass
        for node, number in self._nodes.take_freed():
            self._effects.seats_freed(node.id, number)

    def _remove_leaving_nodes(self) -> None:
        for node in self._nodes.idle_and_leaving():
            self._nodes.remove(node.id)
            if node.limits.evictable:
                self._swaps.stop(node.models)
            else:
                self._effects.node_closed(node.id)

    def _requeue(self, ticket: Ticket) -> None:
        node = self._tickets.requeue(ticket)
        self._tickets.end_trial(ticket, node)
        if ticket.unsuited:
            self._unsuited[ticket] = None
        self._pump()
        self._swaps.report_idle(node)
        if ticket in self._queue and ticket.job.no_queue and not ticket.has_begun:
            message = "the node failed, no other seat is free, and the request must not be queued"
            self._tickets.withdraw(ticket, self.full_error(ticket.job) or NoQueue(message))
            self._pump()

    def _refuse_unsuited(self) -> None:
        """End the waiting jobs that all nodes which could run them have refused because of their set-up.

        If their model can be loaded here, they wait for that.
        """
        for ticket in list(self._unsuited):
            if ticket.state is not TicketState.QUEUED:
                del self._unsuited[ticket]
            elif self._nodes.is_unsuited_everywhere(ticket) and not self._may_be_loaded_for(ticket):
                del self._unsuited[ticket]
                self._tickets.withdraw(ticket, NoOtherNode("no other node serves the request"))

    def _may_be_loaded_for(self, ticket: Ticket) -> bool:
        may_wait = not (ticket.job.no_queue or self._rejects_loading)
        return may_wait and self._swaps.require_local_node(ticket)

    def _fail(self, model: str, error: FairleadError) -> None:
        """End what waits for a model: its load request, and the jobs that no other node can run."""
        self._swaps.end_load_request(model, error)
        self._tickets.fail_waiting(model, error)
