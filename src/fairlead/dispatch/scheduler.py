"""Decides who sits where. Knows no clock, socket or tokenizer.

A pure state machine: what happens comes in as events (the public methods), what is to be done goes out
through `Effects`, and every event ends in `_pump`, the one place where a seat is given. All state
changes are synchronous, so in Trio each event is a critical section.
"""

from enum import StrEnum
from random import Random
from typing import Protocol

import msgspec

from fairlead._cext.fairqueue import FairQueue
from fairlead.dispatch.placement import Place, choose
from fairlead.errors import Draining, FairleadError, InvalidRequest, QueueFull
from fairlead.job import Job
from fairlead.nodes.node import Node, NodeLimits


class TicketState(StrEnum):
    """QUEUED → GRANTED → DONE; a refusal, or leaving early, skips GRANTED."""

    NEW = "new"
    QUEUED = "queued"
    GRANTED = "granted"
    DONE = "done"


class Ticket:
    """A job's place in the queue, then its seat. Only the scheduler writes to it."""

    __slots__ = ("handle", "job", "place", "state")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.state = TicketState.NEW
        self.handle = -1
        self.place: Place | None = None


class Effects(Protocol):
    """What the scheduler can do to the world. Called synchronously; must not call back into it."""

    def grant(self, ticket: Ticket) -> None:
        """The ticket has a seat at `ticket.place` now."""

    def refuse(self, ticket: Ticket, error: FairleadError) -> None:
        """The ticket will never have one."""


class SchedulerStatistics(msgspec.Struct, frozen=True):
    """A picture of the counts: jobs waiting and running, and all seats of the nodes that are up."""

    waiting: int
    running: int
    capacity: int
    seats: int


class Scheduler:
    """One global fair queue over the seats of all nodes.

    Rules: a job with a free seat never counts against the queue; tenants take turns; a free seat means
    that nobody waits who fits it; every ticket ends exactly once.
    """

    def __init__(self, effects: Effects, *, capacity: int, random: Random) -> None:
        self._effects = effects
        self._random = random
        self._capacity = capacity
        # Even with capacity 0 a job passes through the line on its way to a free seat.
        self._line = FairQueue(capacity=max(capacity, 1))
        self._queued: dict[int, Ticket] = {}
        self._places: dict[str, Place] = {}
        self._draining = False

    # Events of a job ---------------------------------------------------------------------------------

    def submit(self, ticket: Ticket) -> None:
        """A job arrives: it is granted, queued or refused before this returns."""
        assert ticket.state is TicketState.NEW
        refusal = self._refusal(ticket.job)
        if refusal is not None:
            self._refuse(ticket, refusal)
            return
        ticket.handle = self._line.push(ticket.job.tenant, float(ticket.job.prompt_tokens))
        ticket.state = TicketState.QUEUED
        self._queued[ticket.handle] = ticket
        self._pump()

    def leave(self, ticket: Ticket) -> None:
        """A job is over, or its client is gone, in whatever state: its place and its seat are free now."""
        if ticket.state is TicketState.QUEUED:
            self._line.discard(ticket.handle)
            del self._queued[ticket.handle]
        elif ticket.state is TicketState.GRANTED:
            assert ticket.place is not None
            ticket.place.busy -= 1
        ticket.state = TicketState.DONE
        self._pump()

    def position(self, ticket: Ticket) -> int:
        """Return how many waiting jobs leave before this one, under the fairness in force."""
        return self._line.position(ticket.handle)

    # Events of nodes and of the server ---------------------------------------------------------------

    def node_up(self, node: Node, limits: NodeLimits) -> None:
        """A node has seats to give. Seats of an earlier life of it are forgotten."""
        self._forget(node)
        self._places[node.id] = Place(node, limits)
        for ticket in list(self._queued.values()):
            if (error := self._misfit(ticket.job)) is not None:
                self._withdraw(ticket, error)
        self._pump()

    def node_down(self, node: Node) -> None:
        """A node is gone, and its seats with it; who held one finds out from the node."""
        self._forget(node)

    def load_failed(self, node: Node, error: FairleadError) -> None:
        """A node could not load its models: who waits for them is told, unless another node has them."""
        self._forget(node)
        for ticket in list(self._queued.values()):
            model = ticket.job.model
            if model in node.models and not self._holding(model):
                self._withdraw(ticket, error)

    def drain(self) -> None:
        """Take no more jobs and refuse those that wait; the running ones go on."""
        self._draining = True
        for ticket in list(self._queued.values()):
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
        """Give every free seat to the job whose turn it is."""
        while self._queued:
            place = choose(self._places.values(), self._random)
            if place is None:
                return
            ticket = self._queued.pop(self._line.pop())
            place.busy += 1
            ticket.place = place
            ticket.state = TicketState.GRANTED
            self._effects.grant(ticket)

    def _refusal(self, job: Job) -> FairleadError | None:
        if self._draining:
            return Draining("the server is shutting down", retry_after_s=5)
        if (misfit := self._misfit(job)) is not None:
            return misfit
        seat_is_free = any(place.free > 0 for place in self._places.values())
        if len(self._queued) >= self._capacity and not seat_is_free:
            return QueueFull(f"the queue is full: {self._capacity} jobs are waiting")
        return None

    def _misfit(self, job: Job) -> InvalidRequest | None:
        """A job that no node of its model could ever hold would wait for nothing."""
        holding = self._holding(job.model)
        longest = max(map(len, job.prompts)) + 1
        most = max((place.limits.max_model_len for place in holding), default=longest)
        if longest <= most:
            return None
        return InvalidRequest(
            f"the prompt has {longest - 1} tokens; with one for the answer the model holds at most {most}",
            param="prompt",
        )

    def _holding(self, model: str) -> list[Place]:
        return [place for place in self._places.values() if model in place.node.models]

    def _withdraw(self, ticket: Ticket, error: FairleadError) -> None:
        self._line.discard(ticket.handle)
        del self._queued[ticket.handle]
        self._refuse(ticket, error)

    def _refuse(self, ticket: Ticket, error: FairleadError) -> None:
        ticket.state = TicketState.DONE
        self._effects.refuse(ticket, error)

    def _forget(self, node: Node) -> None:
        self._places.pop(node.id, None)
