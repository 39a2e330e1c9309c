"""Decides who sits where. Knows no clock, socket or tokenizer.

A pure state machine: what happens comes in as events (the public methods), what is to be done goes out
through `Effects`, and every event ends in `_pump`, the one place where a seat is given and a swap started.
All state changes are synchronous, so in Trio each event is a critical section. Nothing is logged here:
what was committed is logged where it is carried out.
"""

from collections.abc import Callable, Mapping
from random import Random
from typing import Literal

from fairlead._cext.fairqueue import FairQueue
from fairlead.dispatch.bodies import Bodies
from fairlead.dispatch.effects import Effects, SchedulerStatistics
from fairlead.dispatch.placement import Place, choose
from fairlead.dispatch.prefixes import prefixes_of
from fairlead.dispatch.swaps import Swaps
from fairlead.dispatch.ticket import Ticket, TicketState, Wish
from fairlead.errors import (
    Displaced,
    Draining,
    FairleadError,
    InvalidRequest,
    LoadFailed,
    ModelLoading,
    ModelNotFound,
    NoQueue,
    QueueFull,
    QueueTimeout,
)
from fairlead.job import Job
from fairlead.nodes.node import Node, NodeLimits
from fairlead.swap.policy import EvictionPolicy

Fairness = Literal["roundRobin", "tokens"]

LINE_ROOM = 2**31
WAITING_BYTES = 256 * 1024 * 1024
LOADING_RETRY_S = 5


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
        self._random = random
        self._capacity = capacity
        # The bound is held in `_refusal`: a job passes through the line on its way to a free seat, too, and
        # only the scheduler knows of seats.
        self._line = FairQueue(capacity=LINE_ROOM, fairness=fairness, min_share=min_share)
        for tenant, weight in (tenant_weights or {}).items():
            self._line.set_weight(tenant, weight)
        self._rejects_loading = rejects_loading
        self._queued: dict[int, Ticket] = {}
        self._bodies = Bodies(waiting_bytes, capacity)
        self._places: dict[str, Place] = {}
        self._closed: set[str] = set()
        self._swaps = Swaps(self._places, policy, loadable)
        self._draining = False
        self._grants = 0

    # Events of a job ---------------------------------------------------------------------------------

    def submit(self, ticket: Ticket) -> None:
        """A job arrives: it is granted, queued or refused before this returns."""
        assert ticket.state is TicketState.NEW
        refusal = self._refusal(ticket.job)
        if refusal is not None:
            self._refuse(ticket, refusal)
            return
        self._enqueue(ticket, self._line.push)
        self._pump()

    def leave(self, ticket: Ticket) -> None:
        """A job's client is gone, in whatever state: its place or seat is free, and it cost what it used."""
        self.finished(ticket, cost=ticket.charged if ticket.has_begun else 0.0)

    def finished(self, ticket: Ticket, *, cost: float) -> None:
        """A job is over and has cost this much; what was charged too much is given back."""
        self.charge(ticket, cost)
        if ticket.state is TicketState.QUEUED:
            self._line.discard(ticket.handle)
            self._dequeue(ticket)
        place = None
        if ticket.state is TicketState.GRANTED:
            place = self._vacate(ticket)
            place.is_full = False
        self._refund(ticket, down_to=cost)
        ticket.state = TicketState.DONE
        self._pump()
        self._note_idle(place)

    def first_delta(self, ticket: Ticket) -> None:
        """A job's answer has begun: it has waited its wait."""
        ticket.has_begun = True

    def charge(self, ticket: Ticket, cost: float) -> None:
        """A job has cost this much until now; what is above its estimate counts from now on."""
        if ticket.attempts and ticket.state is not TicketState.DONE and cost > ticket.charged:
            self._line.charge(ticket.job.tenant, cost - ticket.charged)
            ticket.charged = cost

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

    def position(self, ticket: Ticket) -> int:
        """Return how many waiting jobs leave before this one, under the fairness in force."""
        return self._line.position(ticket.handle)

    def jobs_ahead(self, ticket: Ticket) -> list[Job]:
        """Return the waiting jobs that leave before this one, in the order in which they do."""
        return self._ahead(ticket.handle)

    def waiting_jobs(self) -> list[Job]:
        """Return all jobs that wait, in the order of their arrival."""
        return [ticket.job for ticket in self._queued.values()]

    def foretell(self, model: str, tenant: str, priority: int) -> list[Job] | None:
        """Return who would leave before a job that came now; None if a seat is free for it."""
        if any(place.free > 0 for place in self._holding(model)):
            return None
        handle = self._line.push(tenant, priority=priority)
        ahead = self._ahead(handle)
        self._line.discard(handle)
        return ahead

    def must_load(self, job: Job) -> bool:
        """Whether the job's model would have to be loaded for it."""
        return self._swaps.is_loadable(job.model) and not self._taking(job)

    def place(self, node_id: str) -> Place | None:
        """Return the place of a node, if it is up."""
        return self._places.get(node_id)

    # Events of models --------------------------------------------------------------------------------

    def arrange(self, policy: EvictionPolicy, loadable: frozenset[str]) -> None:
        """Load these models from now on, and make room for them as this policy says."""
        self._swaps.arrange(policy, loadable)
        self._pump()

    def forget(self, model: str) -> None:
        """A model is not served any more: nobody need wait for it, unless another node has it."""
        error = ModelNotFound(f"the model {model} is not served any more", param="model")
        self._end_wish(model, error)
        self._tell_waiting(model, error)
        self._pump()

    def wish(self, wish: Wish) -> None:
        """A model is wanted without a job. Its turn is that of a job that came now."""
        place = self._swaps.place_of(wish.model)
        if place is not None and not place.leaving:
            self._effects.wish_ended(wish, None)
        elif self._draining:
            self._effects.wish_ended(wish, _draining())
        elif not self._swaps.is_loadable(wish.model):
            self._effects.wish_ended(wish, ModelNotFound(f"{wish.model} is no model of this server"))
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

    def unload(self, model: str) -> None:
        """A model of ours is to go: it finishes the jobs that it has. If it is only being loaded, at once.

        Who waits for it, or will, waits for its next load.
        """
        if (place := self._swaps.place_of(model)) is not None:
            place.leaving = True
        elif self._swaps.give_up(model):
            self._end_wish(model, LoadFailed(f"{model} was unloaded before it was ready"))
            self._effects.stop_model(model)
        self._pump()

    def expired(self, place: Place, used: int) -> None:
        """A place has had no job for as long as its models are kept, unless it was `used` meanwhile."""
        if place.used == used and not place.busy and self._places.get(place.node.id) is place:
            place.leaving = True
            self._pump()

    def gone(self, models: frozenset[str]) -> None:
        """Nothing is left of the processes of these models, nor of what they took."""
        self._swaps.gone(models)
        self._pump()

    # Events of nodes and of the server ---------------------------------------------------------------

    def node_up(self, node: Node, limits: NodeLimits) -> None:
        """A node has seats to give; its models are loaded. Seats of an earlier life of it are forgotten."""
        place = self._places[node.id] = Place(node, limits)
        place.leaving = node.id in self._closed
        if limits.evictable:
            self._swaps.ended(node.models)
            for model in node.models:
                self._end_wish(model, None)
        for ticket in list(self._queued.values()):
            if (error := self._misfit(ticket.job)) is not None:
                self._withdraw(ticket, error)
        self._pump()
        self._note_idle(place)

    def node_down(self, node: Node) -> None:
        """A node is gone, and its seats with it; who held one finds out from the node."""
        place = self._places.pop(node.id, None)
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
        self._places.pop(node.id, None)
        self._swaps.ended(node.models)
        for model in node.models:
            self._end_wish(model, error)
            self._tell_waiting(model, error)
        self._pump()

    def close(self, node_id: str) -> None:
        """A node elsewhere is to have no more jobs, in its next lives neither; it finishes those it has."""
        self._closed.add(node_id)
        if (place := self._places.get(node_id)) is None:
            self._effects.closed(node_id)
        else:
            place.leaving = True
            self._pump()

    def reopen(self, node_id: str) -> None:
        """A node of this name may have jobs again, from its next life on."""
        self._closed.discard(node_id)

    def drain(self) -> None:
        """Take no more jobs and refuse those that wait; the running ones go on, after a failure too."""
        self._draining = True
        for ticket in [ticket for ticket in self._queued.values() if not ticket.attempts]:
            self._withdraw(ticket, _draining())

    def statistics(self) -> SchedulerStatistics:
        """Return the counts now."""
        places = self._places.values()
        return SchedulerStatistics(
            waiting=len(self._queued),
            running=sum(place.busy for place in places),
            capacity=self._capacity,
            seats=sum(place.limits.seats for place in places),
        )

    # Decisions ---------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Give every free seat to the job whose turn it is, let go who is to leave, start swaps."""
        while self._queued and any(place.free > 0 for place in self._places.values()):
            try:
                ticket = self._queued[self._line.pop(self._fits)]
            except IndexError:
                break
            self._dequeue(ticket)
            place = ticket.place = self._choose(ticket)
            place.take(ticket.tokens)
            self._grants += 1
            place.used = self._grants
            ticket.state = TicketState.GRANTED
            # A retry was charged at its first grant.
            ticket.charged = max(ticket.charged, ticket.cost)
            ticket.attempts += 1
            self._effects.grant(ticket)
        self._let_go()
        self._start_swaps()

    def _fits(self, handle: int) -> bool | None:
        """Answer the line: None when no seat is there for this job, False when its memory is not."""
        ticket = self._queued[handle]
        if self._candidates(ticket):
            return True
        return False if any(place.free > 0 for place in self._open_to(ticket)) else None

    def _candidates(self, ticket: Ticket) -> list[Place]:
        open_to = self._open_to(ticket)
        return [place for place in open_to if place.free > 0 and place.holds(ticket.tokens)]

    def _choose(self, ticket: Ticket) -> Place:
        candidates = self._candidates(ticket)
        if len(self._places) == 1:
            return candidates[0]
        # Also where there is only one free seat: what its node is given now counts when there are more.
        prefixes = prefixes_of(ticket.job)
        place = choose(candidates, self._random, ticket.job, prefixes)
        place.remember(ticket.job, prefixes)
        return place

    def _open_to(self, ticket: Ticket) -> list[Place]:
        """Where the job may run at all: not again where it failed, unless there is nothing else."""
        taking = self._taking(ticket.job)
        if ticket.failed_at is None:
            return taking
        return [place for place in taking if place is not ticket.failed_at] or taking

    def _let_go(self) -> None:
        for place in [place for place in self._places.values() if place.leaving and not place.busy]:
            del self._places[place.node.id]
            if not place.limits.evictable:
                self._effects.closed(place.node.id)
                continue
            self._swaps.stops(place.node.models)
            for model in place.node.models:
                self._effects.stop_model(model)

    def _start_swaps(self) -> None:
        for model, evict in self._swaps.start():
            self._effects.start_swap(model, evict)

    def _refusal(self, job: Job) -> FairleadError | None:
        if self._draining:
            return _draining()
        if (misfit := self._misfit(job)) is not None:
            return misfit
        if any(place.free > 0 for place in self._taking(job)):
            return None
        if self._rejects_loading and self.must_load(job):
            return ModelLoading(f"the model {job.model} is being loaded", retry_after_s=LOADING_RETRY_S)
        if job.no_queue:
            return NoQueue("no seat is free, and the request does not want to wait")
        if not self._bodies.have_room(job):
            return QueueFull("the queue is full: the requests that wait are too large together")
        if len(self._queued) < self._capacity:
            return None
        # With jobs that nodes gave back above the capacity, one less would still leave no room.
        in_vain = len(self._queued) > self._capacity
        victim = None if in_vain else self._line.displace(job.tenant, priority=job.priority)
        if victim is None:
            return QueueFull(f"the queue is full: {self._capacity} jobs are waiting")
        displaced = self._queued[victim]
        self._dequeue(displaced)
        self._refuse(displaced, Displaced("the queue is full, and others with fewer jobs in it came"))
        return None

    def _misfit(self, job: Job) -> InvalidRequest | None:
        """A job that no node of its model could ever hold would wait for nothing."""
        longest = max(map(len, job.prompts), default=0) + 1
        most = max((place.limits.max_model_len for place in self._taking(job)), default=longest)
        if longest <= most:
            return None
        return InvalidRequest(
            f"the prompt has {longest - 1} tokens; with one for the answer the model holds at most {most}",
            param="prompt",
        )

    def _holding(self, model: str) -> list[Place]:
        return [place for place in self._places.values() if model in place.node.models]

    def _taking(self, job: Job) -> list[Place]:
        return [place for place in self._places.values() if place.takes(job)]

    def _ahead(self, handle: int) -> list[Job]:
        return [self._queued[other].job for other in self._line.ahead(handle)]

    # Book-keeping ------------------------------------------------------------------------------------

    def _enqueue(self, ticket: Ticket, push: Callable[..., int]) -> None:
        job = ticket.job
        ticket.handle = push(job.tenant, ticket.cost, priority=job.priority, size=ticket.tokens)
        ticket.state = TicketState.QUEUED
        self._queued[ticket.handle] = ticket
        self._bodies.add(job)
        self._swaps.wanted(job)

    def _dequeue(self, ticket: Ticket) -> None:
        """Forget a ticket whose entry has left the line."""
        del self._queued[ticket.handle]
        self._bodies.remove(ticket.job)
        self._swaps.unwanted(ticket.job, starved=ticket.starved)
        ticket.starved = False

    def _return(self, ticket: Ticket) -> None:
        assert ticket.state is TicketState.GRANTED
        place = self._vacate(ticket)
        if ticket.late is None or ticket.has_begun:
            self._enqueue(ticket, self._line.push_front)
        else:
            self._refuse(ticket, ticket.late)
        self._pump()
        self._note_idle(place)
        still_waits = self._queued.get(ticket.handle) is ticket
        if still_waits and ticket.job.no_queue and not ticket.has_begun:
            self._withdraw(ticket, NoQueue("the node failed, no other seat is free, and it is not to wait"))

    def _vacate(self, ticket: Ticket) -> Place:
        place, ticket.place = ticket.place, None
        assert place is not None
        place.give_back(ticket.tokens)
        return place

    def _refund(self, ticket: Ticket, *, down_to: float) -> None:
        """Give back what was charged above that. Charges end with it."""
        self._line.refund(ticket.job.tenant, max(0.0, ticket.charged - down_to))
        ticket.charged = 0.0

    def _note_idle(self, place: Place | None) -> None:
        """Tell that a place has nothing to do, if that is new."""
        if place is None or place.busy or place.leaving or self._places.get(place.node.id) is not place:
            return
        if place.limits.evictable and any(map(self._swaps.is_loadable, place.node.models)):
            self._effects.idle(place)

    def _end_wish(self, model: str, error: FairleadError | None) -> None:
        if (wish := self._swaps.unwish(model)) is not None:
            self._effects.wish_ended(wish, error)

    def _tell_waiting(self, model: str, error: FairleadError) -> None:
        """Refuse who waits for a model that no node has for it, or will have much longer."""
        for ticket in [ticket for ticket in self._queued.values() if ticket.job.model == model]:
            if all(place.leaving for place in self._taking(ticket.job)):
                self._withdraw(ticket, error)

    def _withdraw(self, ticket: Ticket, error: FairleadError) -> None:
        self._line.discard(ticket.handle)
        self._dequeue(ticket)
        self._refuse(ticket, error)

    def _refuse(self, ticket: Ticket, error: FairleadError) -> None:
        ticket.state = TicketState.DONE
        if not ticket.has_begun:
            self._refund(ticket, down_to=0.0)
        self._effects.refuse(ticket, error)


def _draining() -> Draining:
    return Draining("the server is shutting down", retry_after_s=5)
