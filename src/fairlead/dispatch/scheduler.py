"""Decides who sits where. Knows no clock, socket or tokenizer.

A pure state machine: what happens comes in as events (the public methods), what is to be done goes out
through `Effects`, and every event ends in `_pump`, the one place where a seat is given and a swap started.
It has no state but that of its parts: who waits (`Queue`), who sits (`Places`), which models are to come and
go (`Swaps`), who is let in (`Admission`). All changes are synchronous, so in Trio each event is a critical
section. Nothing is logged here: what was committed is logged where it is carried out.
"""

from collections.abc import Collection, Mapping
from random import Random

from fairlead.dispatch.admission import Admission, shutting_down
from fairlead.dispatch.effects import Effects, SchedulerStatistics
from fairlead.dispatch.placement import Place
from fairlead.dispatch.places import Places
from fairlead.dispatch.queue import WAITING_BYTES, Fairness, Queue
from fairlead.dispatch.swaps import Swaps
from fairlead.dispatch.ticket import Ticket, TicketState, Wish
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

    `loadable` are models that a swap can load, as `policy` allows; with `rejects_loading` no job waits for
    that. `waiting_bytes` bounds the requests that wait to be passed on (`Bodies`). Rules: a job with a free
    seat never counts against the queue; a free seat that fits means that nobody waits who could have it; a
    model with work in flight is never evicted; every ticket ends once.
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
        self._places = Places(random)
        self._swaps = Swaps(self._places, policy, loadable)
        self._admission = Admission(self._queue, self._places, self._swaps, rejects_loading=rejects_loading)

    # Events of a job ---------------------------------------------------------------------------------

    def submit(self, ticket: Ticket, *, too_long: QueueFull | None = None) -> None:
        """A job arrives: it is granted, queued or refused before this returns.

        It is refused with `too_long`, if given, rather than have it wait.
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
        """A job's client is gone, in whatever state: its place or seat is free, and it cost what it used."""
        self.finished(ticket, cost=ticket.charged if ticket.has_begun else 0.0)

    def finished(self, ticket: Ticket, *, cost: float) -> None:
        """A job is over and has cost this much; what was charged too much is given back."""
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
        """A job's answer has begun: it has waited its wait."""
        ticket.has_begun = True

    def charge(self, ticket: Ticket, cost: float) -> None:
        """A job has cost this much until now; what is above its estimate counts from now on."""
        if ticket.attempts and ticket.state is not TicketState.DONE:
            self._queue.charge(ticket, cost)

    def returned(self, ticket: Ticket) -> None:
        """A job's node failed: to the front of its line, and charged once; for another node, if one is up.

        Its deadline is still the first one. If that has passed in its seat, it will not get another; but once
        its answer has begun, it has waited its wait.
        """
        ticket.failed_at = ticket.place
        self._return(ticket)

    def turned_away(self, ticket: Ticket) -> None:
        """As `returned`, but its node is only full: until it has finished a job, or `has_room` is called."""
        assert ticket.place is not None
        ticket.place.is_full = True
        self._return(ticket)

    def has_room(self, place: Place) -> None:
        """It may be that a place that turned a job away would not do so now."""
        place.is_full = False
        self._pump()

    def deadline(self, ticket: Ticket, error: QueueTimeout) -> None:
        """A job's time to wait is over. A stream waits until its first delta, all others until their seat."""
        ticket.late = error
        if ticket.has_begun:
            return
        if ticket.state is TicketState.QUEUED:
            self._withdraw(ticket, error)
            self._pump()
        elif ticket.state is TicketState.GRANTED and ticket.job.stream:
            self._effects.stop(ticket, error)

    def starved(self, ticket: Ticket) -> None:
        """A job has waited so long that its model's turn comes before those of the models that are loaded."""
        if ticket.state is TicketState.QUEUED and not ticket.starved:
            ticket.starved = True
            self._swaps.starved(ticket.job.model)
            self._pump()

    # Events of models --------------------------------------------------------------------------------

    def arrange(self, policy: EvictionPolicy, loadable: frozenset[str]) -> None:
        """Load these models from now on, and make room for them as this policy says."""
        self._swaps.arrange(policy, loadable)
        self._pump()

    def prefer(self, priorities: Mapping[str, int]) -> None:
        """Of the models that are wanted, load those with the higher number first; 0 of whom none is said."""
        self._swaps.prefer(priorities)
        self._pump()

    def forget(self, model: str, error: FairleadError | None = None) -> None:
        """A model is not served any more: what waits for it ends, unless another node has it."""
        error = error or ModelNotFound(f"the model {model} is not served any more", param="model")
        self._end_wish(model, error)
        self._tell_waiting(model, error)
        self._pump()

    def wish(self, wish: Wish) -> None:
        """A model is wanted without a job. Its turn is that of a job that came now."""
        place = self._places.of_ours(wish.model)
        is_loaded = place is not None and not place.leaving
        refusal = None if is_loaded else self._admission.refusal_of_wish(wish)
        if is_loaded or refusal is not None:
            self._effects.wish_ended(wish, refusal)
        else:
            self._swaps.wish(wish)
            self._pump()

    def strengthen(self, wish: Wish) -> None:
        """A wish may evict other models, too, from now on."""
        wish.spare = False
        self._pump()

    def wish_starved(self, wish: Wish) -> None:
        """A wish has waited so long that its turn comes before those of the models that are loaded."""
        if self._swaps.is_wished(wish) and not wish.starved:
            wish.starved = True
            self._swaps.starved(wish.model)
            self._pump()

    def unload(self, model: str, error: FairleadError | None = None) -> None:
        """A model of ours is to go: it finishes the jobs that it has. If it is only being loaded, at once.

        With `error`, what waits for it ends with that: a request to load it, and the jobs that no other node
        can run. Otherwise the jobs wait for its next load.
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

    def expired(self, place: Place, used: int) -> None:
        """A place has had no job for as long as its models are kept, unless it was `used` meanwhile."""
        if place.used == used and not place.busy and self._places.is_current(place):
            place.leaving = True
            self._pump()

    def gone(self, models: frozenset[str]) -> None:
        """Nothing is left of the processes of these models, nor of what they took."""
        self._swaps.gone(models)
        self._pump()

    # Events of nodes and of the server ---------------------------------------------------------------

    def node_up(self, node: Node, limits: NodeLimits) -> None:
        """A node has seats to give; its models are loaded. Seats of an earlier life of it are forgotten."""
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
        """A node is gone, and its seats with it; who held one finds out from the node."""
        place = self._places.remove(node.id)
        if place is not None and place.limits.evictable:
            self._swaps.stops(node.models)
        self._pump()

    def seats_changed(self, node: Node, limits: NodeLimits) -> None:
        """A node has more or fewer seats than before. Who sits keeps the seat."""
        if (place := self._places.get(node.id)) is not None:
            place.limits = limits
            self._pump()

    def load_failed(self, node: Node, error: FairleadError) -> None:
        """A node could not load its models: who waits for them is told, unless another node has them."""
        self._places.remove(node.id)
        self._swaps.ended(node.models)
        for model in node.models:
            self._end_wish(model, error)
            self._tell_waiting(model, error)
        self._pump()

    def close(self, node_id: str) -> None:
        """A node elsewhere is to have no more jobs, in its next lives neither; it finishes those it has."""
        if self._places.close(node_id):
            self._pump()
        else:
            self._effects.closed(node_id)

    def reopen(self, node_id: str) -> None:
        """A node of this name may have jobs again, from its next life on."""
        self._places.reopen(node_id)

    def drain(self) -> None:
        """Take no more jobs and refuse what waits, jobs and loads; what runs goes on, after a failure too."""
        self._admission.drain()
        for model in self._swaps.wished():
            self._end_wish(model, shutting_down())
        for ticket in self._queue:
            if not ticket.attempts:
                self._withdraw(ticket, shutting_down())
        self._pump()

    # Questions ---------------------------------------------------------------------------------------

    def position(self, ticket: Ticket) -> int:
        """Return how many waiting jobs leave before this one, under the fairness in force."""
        return self._queue.position(ticket)

    def jobs_ahead(self, ticket: Ticket) -> list[Job]:
        """Return the waiting jobs that leave before this one, in the order in which they do."""
        return self._queue.ahead(ticket)

    def waiting_jobs(self) -> list[Job]:
        """Return all jobs that wait, in the order of their arrival."""
        return [ticket.job for ticket in self._queue]

    def foretell(self, model: str, tenant: str, priority: int) -> list[Job] | None:
        """Return who would leave before a job that came now; None if a seat is free for it."""
        if any(place.free > 0 for place in self._places.holding(model)):
            return None
        return self._queue.ahead_of_newcomer(tenant, priority)

    def must_load(self, job: Job) -> bool:
        """Whether the job's model would have to be loaded for it."""
        return self._admission.must_load(job)

    def place(self, node_id: str) -> Place | None:
        """Return the place of a node, if it is up."""
        return self._places.get(node_id)

    def places(self) -> Collection[Place]:
        """Return the places of all nodes that are up."""
        return self._places.values()

    def statistics(self) -> SchedulerStatistics:
        """Return the counts now."""
        places = self._places.values()
        return SchedulerStatistics(
            waiting=len(self._queue),
            running=sum(place.busy for place in places),
            capacity=self._queue.capacity,
            seats=sum(place.limits.seats for place in places),
        )

    # Decisions ---------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Give every free seat to the job whose turn it is, let go who is to leave, start swaps."""
        self._give_seats()
        self._let_go()
        # Places for whose room nobody starves any more have seats again.
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
        """Take out the next job that fits a free seat, or several at once where all could have every seat."""
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

    def _start_swaps(self) -> list[Place]:
        """Return the places that need not make room any more, and have seats again."""
        swaps, relieved = self._swaps.start()
        for swap in swaps:
            self._effects.start_swap(swap.model, swap.evict, swap.reason)
        return relieved

    def _make_room(self, job: Job) -> QueueFull | None:
        """Let a newcomer who has to wait displace another if the queue is full; return why it may not."""
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
        """It has joined the queue."""
        ticket.state = TicketState.QUEUED
        self._swaps.wanted(ticket.job)

    def _waits_no_more(self, ticket: Ticket) -> None:
        """It has left the queue."""
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
        """Refuse who waits for a model that no node has for it, or will have much longer."""
        for ticket in self._queue:
            if ticket.job.model == model and all(place.leaving for place in self._places.taking(ticket.job)):
                self._withdraw(ticket, error)

    def _end_wish(self, model: str, error: FairleadError | None) -> None:
        if (wish := self._swaps.unwish(model)) is not None:
            self._effects.wish_ended(wish, error)

    def _note_idle(self, place: Place | None) -> None:
        """Tell that a place has nothing to do, if that is new."""
        if place is None or place.busy or place.leaving or not self._places.is_current(place):
            return
        if place.limits.evictable and any(map(self._swaps.is_loadable, place.node.models)):
            self._effects.idle(place)
