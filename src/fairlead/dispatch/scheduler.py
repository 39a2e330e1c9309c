"""Decides who sits where. Knows no clock, socket or tokenizer.

A pure state machine: what happens comes in as events (the public methods), what is to be done goes out
through `Effects`, and every event ends in `_pump`, the one place where a seat is given and a swap started.
All state changes are synchronous, so in Trio each event is a critical section. Nothing is logged here:
what was committed is logged where it is carried out.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from random import Random
from typing import Literal, Protocol

import msgspec

from fairlead._cext.fairqueue import FairQueue
from fairlead.dispatch.placement import Place, choose
from fairlead.dispatch.swaps import Swaps
from fairlead.dispatch.ticket import Ticket, TicketState
from fairlead.errors import (
    Displaced,
    Draining,
    FairleadError,
    InvalidRequest,
    NoQueue,
    QueueFull,
    QueueTimeout,
)
from fairlead.job import Job
from fairlead.nodes.node import Node, NodeLimits
from fairlead.swap.policy import EvictionPolicy, KeepEverything

Fairness = Literal["roundRobin", "tokens"]

LINE_ROOM = 2**31


class Effects(Protocol):
    """What the scheduler can do to the world. Called synchronously; must not call back into it."""

    def grant(self, ticket: Ticket) -> None:
        """The ticket has a seat at `ticket.place` now."""

    def refuse(self, ticket: Ticket, error: FairleadError) -> None:
        """The ticket will never have a seat (again)."""

    def stop(self, ticket: Ticket, error: FairleadError) -> None:
        """The ticket's job is to end with this error; it leaves when it has."""

    def start_swap(self, model: str, evict: frozenset[str]) -> None:
        """Unload the models of `evict`, which are idle and get no more jobs, then load `model`."""


class SchedulerStatistics(msgspec.Struct, frozen=True):
    """A picture of the counts: jobs waiting and running, and all seats of the nodes that are up."""

    waiting: int
    running: int
    capacity: int
    seats: int


class Scheduler:
    """One global fair queue over the seats of all nodes.

    `loadable` are models that a swap can load, as `policy` allows. Rules: a job with a free seat never
    counts against the queue; a free seat that fits means that nobody waits who could have it; a model with
    work in flight is never evicted; every ticket ends exactly once.
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
    ) -> None:
        self._effects = effects
        self._random = random
        self._capacity = capacity
        # The bound is held in `_refusal`: a job passes through the line on its way to a free seat, too, and
        # only the scheduler knows of seats.
        self._line = FairQueue(capacity=LINE_ROOM, fairness=fairness, min_share=min_share)
        for tenant, weight in (tenant_weights or {}).items():
            self._line.set_weight(tenant, weight)
        self._swaps = Swaps(policy or KeepEverything(), loadable)
        self._queued: dict[int, Ticket] = {}
        self._starved: Counter[str] = Counter()
        self._places: dict[str, Place] = {}
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
        elif ticket.state is TicketState.GRANTED:
            self._vacate(ticket).is_full = False
        self._refund(ticket, down_to=cost)
        ticket.state = TicketState.DONE
        self._pump()

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
            self._starved[ticket.job.model] += 1
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

    # Events of nodes and of the server ---------------------------------------------------------------

    def node_up(self, node: Node, limits: NodeLimits) -> None:
        """A node has seats to give; its models are loaded. Seats of an earlier life of it are forgotten."""
        self._places[node.id] = Place(node, limits)
        self._swaps.ended(node.models)
        for ticket in list(self._queued.values()):
            if (error := self._misfit(ticket.job)) is not None:
                self._withdraw(ticket, error)
        self._pump()

    def node_down(self, node: Node) -> None:
        """A node is gone, and its seats with it; who held one finds out from the node."""
        self._places.pop(node.id, None)
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
        for ticket in list(self._queued.values()):
            model = ticket.job.model
            if model in node.models and not self._holding(model):
                self._withdraw(ticket, error)
        self._pump()

    def drain(self) -> None:
        """Take no more jobs and refuse those that wait; the running ones go on, after a failure too."""
        self._draining = True
        for ticket in [ticket for ticket in self._queued.values() if not ticket.attempts]:
            self._withdraw(ticket, Draining("the server is shutting down", retry_after_s=5))

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
        """Give every free seat to the job whose turn it is, then start the swaps that can be."""
        while self._queued and any(place.free > 0 for place in self._places.values()):
            try:
                ticket = self._queued[self._line.pop(self._fits)]
            except IndexError:
                break
            self._dequeue(ticket)
            place = ticket.place = choose(self._candidates(ticket), self._random)
            place.take(ticket.tokens)
            self._grants += 1
            place.used = self._grants
            ticket.state = TicketState.GRANTED
            # A retry was charged at its first grant.
            ticket.charged = max(ticket.charged, ticket.cost)
            ticket.attempts += 1
            self._effects.grant(ticket)
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

    def _open_to(self, ticket: Ticket) -> list[Place]:
        """Where the job may run at all: not again where it failed, unless there is nothing else."""
        holding = self._holding(ticket.job.model)
        if ticket.failed_at is None:
            return holding
        return [place for place in holding if place is not ticket.failed_at] or holding

    def _start_swaps(self) -> None:
        wanted = (ticket.job.model for ticket in self._queued.values())
        for model, evict in self._swaps.start(wanted, starved=self._starved, places=self._places):
            self._effects.start_swap(model, evict)

    def _refusal(self, job: Job) -> FairleadError | None:
        if self._draining:
            return Draining("the server is shutting down", retry_after_s=5)
        if (misfit := self._misfit(job)) is not None:
            return misfit
        if any(place.free > 0 for place in self._holding(job.model)):
            return None
        if job.no_queue:
            return NoQueue("no seat is free, and the request does not want to wait")
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
        holding = self._holding(job.model)
        longest = max(map(len, job.prompts), default=0) + 1
        most = max((place.limits.max_model_len for place in holding), default=longest)
        if longest <= most:
            return None
        return InvalidRequest(
            f"the prompt has {longest - 1} tokens; with one for the answer the model holds at most {most}",
            param="prompt",
        )

    def _holding(self, model: str) -> list[Place]:
        return [place for place in self._places.values() if model in place.node.models]

    def _ahead(self, handle: int) -> list[Job]:
        return [self._queued[other].job for other in self._line.ahead(handle)]

    # Book-keeping ------------------------------------------------------------------------------------

    def _enqueue(self, ticket: Ticket, push: Callable[..., int]) -> None:
        job = ticket.job
        ticket.handle = push(job.tenant, ticket.cost, priority=job.priority, size=ticket.tokens)
        ticket.state = TicketState.QUEUED
        self._queued[ticket.handle] = ticket

    def _dequeue(self, ticket: Ticket) -> None:
        """Forget a ticket whose entry has left the line."""
        del self._queued[ticket.handle]
        if ticket.starved:
            ticket.starved = False
            self._starved[ticket.job.model] -= 1

    def _return(self, ticket: Ticket) -> None:
        assert ticket.state is TicketState.GRANTED
        self._vacate(ticket)
        if ticket.late is None or ticket.has_begun:
            self._enqueue(ticket, self._line.push_front)
        else:
            self._refuse(ticket, ticket.late)
        self._pump()
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

    def _withdraw(self, ticket: Ticket, error: FairleadError) -> None:
        self._line.discard(ticket.handle)
        self._dequeue(ticket)
        self._refuse(ticket, error)

    def _refuse(self, ticket: Ticket, error: FairleadError) -> None:
        ticket.state = TicketState.DONE
        if not ticket.has_begun:
            self._refund(ticket, down_to=0.0)
        self._effects.refuse(ticket, error)
