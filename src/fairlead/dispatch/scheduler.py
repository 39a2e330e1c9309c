"""Assigns jobs to seats and decides which models to load. Knows no clock, socket or tokenizer.

A pure state machine: events come in as public methods, and actions go out through `Effects`. Every event ends
in `_pump`, the only place where seats are granted and swaps are started. The parts hold all state: waiting
jobs (`Queue`), nodes and their seats (`NodePool`), loads and evictions (`Swaps`), admission
(`JobAdmission`). All changes are synchronous, so in Trio each event is a critical section. Nothing is logged
here: decisions are logged where they are executed.
"""

from collections.abc import Collection, Mapping
from random import Random

from fairlead.dispatch.admission import JobAdmission, shutting_down
from fairlead.dispatch.effects import Effects, SchedulerStatistics
from fairlead.dispatch.node_pool import NodePool
from fairlead.dispatch.node_state import NodeState
from fairlead.dispatch.queue import WAITING_BYTES, Fairness, Queue
from fairlead.dispatch.swaps import Swaps
from fairlead.dispatch.ticket import LoadRequest, Ticket, TicketState
from fairlead.errors import (
    Displaced,
    FairleadError,
    LoadCancelled,
    ModelNotFound,
    NoQueue,
    QueueFull,
    QueueTimeout,
)
from fairlead.job import Job
from fairlead.nodes.node import Node, NodeLimits
from fairlead.swap.policy import EvictionPolicy


class Scheduler:
    """One global fair queue over the seats of all nodes.

    `loadable` are the models that a swap can load, as `policy` allows; with `rejects_loading` no job waits
    for a load. `waiting_bytes` bounds the queued requests for remote nodes (`Bodies`). Guarantees: a job with
    a free seat never counts against the queue; while a seat is free, no job that fits it waits; a model with
    work in flight is never evicted; every ticket ends once.
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
    ) -> None:
        self._effects = effects
        self._queue = Queue(
            capacity,
            fairness=fairness,
            min_share=min_share,
            tenant_weights=tenant_weights,
            waiting_bytes=waiting_bytes,
        )
        self._places = NodePool(random)
        self._swaps = Swaps(self._places, policy, loadable)
        self._admission = JobAdmission(
            self._queue, self._places, self._swaps, rejects_loading=rejects_loading
        )

    # Events of a job ---------------------------------------------------------------------------------

    def submit(self, ticket: Ticket, *, too_long: QueueFull | None = None) -> None:
        """Grant, queue or refuse a new job before returning.

        With `too_long`, the job is refused with that rather than queued.
        """
        assert ticket.state is TicketState.NEW
        refusal = self._admission.refusal(ticket.job, too_long=too_long) or self._make_room(ticket.job)
        if refusal is not None:
            self._refuse(ticket, refusal)
            return
        self._queue.join(ticket)
        self._waits(ticket)
        self._pump()

    def leave(self, ticket: Ticket) -> None:
        """End a job whose client disconnected, in whatever state; it is charged for what it used."""
        self.finished(ticket, cost=ticket.charged if ticket.has_begun else 0.0)

    def finished(self, ticket: Ticket, *, cost: float) -> None:
        """End a job, which has cost this much, and refund what was charged in excess."""
        self.charge(ticket, cost)
        if ticket.state is TicketState.QUEUED:
            self._queue.remove(ticket)
            self._waits_no_more(ticket)
        place = None
        if ticket.state is TicketState.GRANTED:
            place = self._places.vacate(ticket)
            place.is_full = False
        self._queue.refund(ticket, down_to=cost)
        ticket.state = TicketState.DONE
        self._pump()
        self._note_idle(place)

    def first_delta(self, ticket: Ticket) -> None:
        """Note that a job's answer has begun; its deadline does not apply any more."""
        ticket.has_begun = True

    def charge(self, ticket: Ticket, cost: float) -> None:
        """Charge a job for its cost until now, as far as it exceeds the estimate."""
        if ticket.attempts and ticket.state is not TicketState.DONE:
            self._queue.charge(ticket, cost)

    def returned(self, ticket: Ticket) -> None:
        """Requeue a job whose node failed: before all others of its class, for another node if one is up.

        It is charged once and keeps its first deadline. If that has passed, the job is refused, unless its
        answer has begun.
        """
        ticket.failed_at = ticket.place
        self._return(ticket)

    def turned_away(self, ticket: Ticket) -> None:
        """Requeue a job of a full node, which gets none until it finishes one or `has_room` is called."""
        assert ticket.place is not None
        ticket.place.is_full = True
        self._return(ticket)

    def has_room(self, place: NodeState) -> None:
        """Note that a node that rejected a job may have room again."""
        place.is_full = False
        self._pump()

    def deadline(self, ticket: Ticket, error: QueueTimeout) -> None:
        """End the wait of a job. A stream waits until its first delta, other jobs until their seat."""
        ticket.late = error
        if ticket.has_begun:
            return
        if ticket.state is TicketState.QUEUED:
            self._withdraw(ticket, error)
            self._pump()
        elif ticket.state is TicketState.GRANTED and ticket.job.stream:
            self._effects.stop(ticket, error)

    def starved(self, ticket: Ticket) -> None:
        """Note that a job has waited so long that its model takes precedence over those that are loaded."""
        if ticket.state is TicketState.QUEUED and not ticket.starved:
            ticket.starved = True
            self._swaps.starved(ticket.job.model)
            self._pump()

    # Events of models --------------------------------------------------------------------------------

    def arrange(self, policy: EvictionPolicy, loadable: frozenset[str]) -> None:
        """Load these models from now on, and evict others for them as this policy says."""
        self._swaps.arrange(policy, loadable)
        self._pump()

    def prefer(self, priorities: Mapping[str, int]) -> None:
        """Load requested models with a higher number first; a model without a number has 0."""
        self._swaps.prefer(priorities)
        self._pump()

    def forget(self, model: str, error: FairleadError | None = None) -> None:
        """Stop serving a model: what waits for it ends, unless another node has it."""
        error = error or ModelNotFound(f"the model {model} is not served any more", param="model")
        self._end_wish(model, error)
        self._tell_waiting(model, error)
        self._pump()

    def wish(self, wish: LoadRequest) -> None:
        """Queue a request for a model without a job, in the turn of a job that arrived now."""
        place = self._places.of_ours(wish.model)
        is_loaded = place is not None and not place.leaving
        refusal = None if is_loaded else self._admission.refusal_of_wish(wish)
        if is_loaded or refusal is not None:
            self._effects.wish_ended(wish, refusal)
        else:
            self._swaps.wish(wish)
            self._pump()

    def strengthen(self, wish: LoadRequest) -> None:
        """Allow a load request to evict other models from now on."""
        wish.spare = False
        self._pump()

    def wish_starved(self, wish: LoadRequest) -> None:
        """Note that a load request has waited so long that it takes precedence over loaded models."""
        if self._swaps.is_wished(wish) and not wish.starved:
            wish.starved = True
            self._swaps.starved(wish.model)
            self._pump()

    def unload(self, model: str, error: FairleadError | None = None) -> None:
        """Stop a model of ours once its jobs have finished; if it is still loading, at once.

        With `error`, what waits for it ends with that: a load request, and the jobs that no other node can
        run. Otherwise the jobs wait for its next load.
        """
        if (place := self._places.of_ours(model)) is not None:
            place.leaving = True
        elif self._swaps.give_up(model):
            self._end_wish(model, error or LoadCancelled(f"{model} was unloaded before it was ready"))
            self._effects.stop_model(model)
        if error is not None:
            self._end_wish(model, error)
            self._tell_waiting(model, error)
        self._pump()

    def expired(self, place: NodeState, used: int) -> None:
        """Unload a node's idle models, whose time to live is over, unless it was `used` meanwhile."""
        if place.used == used and not place.busy and self._places.is_current(place):
            place.leaving = True
            self._pump()

    def gone(self, models: frozenset[str]) -> None:
        """Note that the processes of these models have ended and hold no memory any more."""
        self._swaps.gone(models)
        self._pump()

    # Events of nodes and of the server ---------------------------------------------------------------

    def node_up(self, node: Node, limits: NodeLimits) -> None:
        """Add a node, whose models are loaded. Seats of an earlier run of it are forgotten."""
        place = self._places.add(node, limits)
        if limits.evictable:
            self._swaps.ended(node.models)
            for model in node.models:
                self._end_wish(model, None)
        for ticket in self._queue:
            if (error := self._places.misfit(ticket.job)) is not None:
                self._withdraw(ticket, error)
        self._pump()
        self._note_idle(place)

    def node_down(self, node: Node) -> None:
        """Remove a node and its seats; jobs that held one get their error from the node."""
        place = self._places.remove(node.id)
        if place is not None and place.limits.evictable:
            self._swaps.stops(node.models)
        self._pump()

    def seats_changed(self, node: Node, limits: NodeLimits) -> None:
        """Replace a node's limits. Running jobs keep their seats."""
        if (place := self._places.get(node.id)) is not None:
            place.limits = limits
            self._pump()

    def load_failed(self, node: Node, error: FairleadError) -> None:
        """End the load requests for a node's models, and the jobs that no other node can run."""
        self._places.remove(node.id)
        self._swaps.ended(node.models)
        for model in node.models:
            self._end_wish(model, error)
            self._tell_waiting(model, error)
        self._pump()

    def close(self, node_id: str) -> None:
        """Give a remote node no more jobs, not even after it restarts; its running jobs finish."""
        if self._places.close(node_id):
            self._pump()
        else:
            self._effects.closed(node_id)

    def reopen(self, node_id: str) -> None:
        """Allow a node of this name to get jobs the next time it comes up."""
        self._places.reopen(node_id)

    def drain(self) -> None:
        """Accept no jobs, and refuse waiting jobs and loads; started jobs go on, even after a failure."""
        self._admission.drain()
        for model in self._swaps.wished():
            self._end_wish(model, shutting_down())
        for ticket in self._queue:
            if not ticket.attempts:
                self._withdraw(ticket, shutting_down())
        self._pump()

    # Queries -----------------------------------------------------------------------------------------

    def position(self, ticket: Ticket) -> int:
        """Return how many waiting jobs leave before this one, under the fairness in force."""
        return self._queue.position(ticket)

    def jobs_ahead(self, ticket: Ticket) -> list[Job]:
        """Return the waiting jobs that leave before this one, in the order in which they do."""
        return self._queue.ahead(ticket)

    def waiting_jobs(self) -> list[Job]:
        """Return all waiting jobs, in order of arrival."""
        return [ticket.job for ticket in self._queue]

    def foretell(self, model: str, tenant: str, priority: int) -> list[Job] | None:
        """Return the jobs that would leave before one that arrived now; None if a seat is free for it."""
        if any(place.free > 0 for place in self._places.holding(model)):
            return None
        return self._queue.ahead_of_newcomer(tenant, priority)

    def must_load(self, job: Job) -> bool:
        """Return whether the job's model would have to be loaded for it."""
        return self._admission.must_load(job)

    def place(self, node_id: str) -> NodeState | None:
        """Return the place of a node, if it is up."""
        return self._places.get(node_id)

    def places(self) -> Collection[NodeState]:
        """Return the places of all nodes that are up."""
        return self._places.values()

    def statistics(self) -> SchedulerStatistics:
        """Return the current counts."""
        places = self._places.values()
        return SchedulerStatistics(
            waiting=len(self._queue),
            running=sum(place.busy for place in places),
            capacity=self._queue.capacity,
            seats=sum(place.limits.seats for place in places),
        )

    # Decisions ---------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Grant free seats in fair order, remove idle nodes that are leaving, and start swaps."""
        self._give_seats()
        self._let_go()
        # Nodes that need not drain for a starving job any more have seats again.
        if self._start_swaps():
            self._give_seats()

    def _give_seats(self) -> None:
        while self._queue and self._places.free():
            tickets = self._next_in_turn()
            if not tickets:
                break
            for ticket in tickets:
                self._waits_no_more(ticket)
                self._places.seat(ticket)
                ticket.state = TicketState.GRANTED
                ticket.attempts += 1
                self._effects.grant(ticket)

    def _next_in_turn(self) -> list[Ticket]:
        """Remove the next job that fits a free seat, or several at once where any seat suits each of them."""
        place = self._places.with_several_seats()
        if place is not None and self._swaps.wants_only(place.node.models):
            return self._queue.pop_many(place.free, place.tokens_left)
        ticket = self._queue.pop(self._places.fit)
        return [] if ticket is None else [ticket]

    def _let_go(self) -> None:
        for place in self._places.idle_and_leaving():
            self._places.remove(place.node.id)
            if not place.limits.evictable:
                self._effects.closed(place.node.id)
                continue
            self._swaps.stops(place.node.models)
            for model in place.node.models:
                self._effects.stop_model(model)

    def _start_swaps(self) -> list[NodeState]:
        """Start swaps; return the nodes that need not drain any more, and have seats again."""
        swaps, relieved = self._swaps.start()
        for swap in swaps:
            self._effects.start_swap(swap.model, swap.evict, swap.reason)
        return relieved

    def _make_room(self, job: Job) -> QueueFull | None:
        """Displace a job if a newcomer must wait and the queue is full; return why the newcomer may not."""
        if not self._queue.is_full or self._places.free_for(job):
            return None
        displaced = self._queue.displace(job)
        if displaced is None:
            nodes = "all nodes are busy" if self._places.holding(job.model) else "no node is ready"
            return QueueFull(f"{nodes} and the queue is full ({len(self._queue)} waiting)")
        self._waits_no_more(displaced)
        self._refuse(displaced, Displaced("the queue is full, and others with fewer jobs in it came"))
        return None

    # What follows from a decision --------------------------------------------------------------------

    def _waits(self, ticket: Ticket) -> None:
        """Note that a ticket has joined the queue."""
        ticket.state = TicketState.QUEUED
        self._swaps.wanted(ticket.job)

    def _waits_no_more(self, ticket: Ticket) -> None:
        """Note that a ticket has left the queue."""
        self._swaps.unwanted(ticket.job, starved=ticket.starved)
        ticket.starved = False

    def _return(self, ticket: Ticket) -> None:
        assert ticket.state is TicketState.GRANTED
        place = self._places.vacate(ticket)
        if ticket.late is None or ticket.has_begun:
            self._queue.rejoin(ticket)
            self._waits(ticket)
        else:
            self._refuse(ticket, ticket.late)
        self._pump()
        self._note_idle(place)
        if ticket in self._queue and ticket.job.no_queue and not ticket.has_begun:
            self._withdraw(ticket, NoQueue("the node failed, no other seat is free, and it is not to wait"))
            self._pump()

    def _withdraw(self, ticket: Ticket, error: FairleadError) -> None:
        self._queue.remove(ticket)
        self._waits_no_more(ticket)
        self._refuse(ticket, error)

    def _refuse(self, ticket: Ticket, error: FairleadError) -> None:
        ticket.state = TicketState.DONE
        if not ticket.has_begun:
            self._queue.refund(ticket, down_to=0.0)
        self._effects.refuse(ticket, error)

    def _tell_waiting(self, model: str, error: FairleadError) -> None:
        """Refuse each job that waits for the model, unless a node that stays can run it."""
        for ticket in self._queue:
            if ticket.job.model == model and all(place.leaving for place in self._places.taking(ticket.job)):
                self._withdraw(ticket, error)

    def _end_wish(self, model: str, error: FairleadError | None) -> None:
        if (wish := self._swaps.unwish(model)) is not None:
            self._effects.wish_ended(wish, error)

    def _note_idle(self, place: NodeState | None) -> None:
        """Report that a place has become idle, if its models can be loaded again."""
        if place is None or place.busy or place.leaving or not self._places.is_current(place):
            return
        if place.limits.evictable and any(map(self._swaps.is_loadable, place.node.models)):
            self._effects.idle(place)
