"""The jobs that wait: whose turn it is, what they take, and what each tenant was charged for its turns.

Pure. The order is the `FairQueue` kernel's, which knows handles, tenants and costs; here a handle is a
ticket. Knows no seat: who takes a job out says which fit, and who puts one in whether it must wait at all.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from fairlead._cext.fairqueue import FairQueue
from fairlead.dispatch.bodies import Bodies
from fairlead.dispatch.ticket import Ticket
from fairlead.job import Job

Fairness = Literal["roundRobin", "tokens"]

LINE_ROOM = 2**31
UNBOUNDED = 2**63
WAITING_BYTES = 256 * 1024 * 1024


class Queue:
    """Tickets, first in turn first. Of a ticket it alone writes `handle` and `charged`.

    A ticket that has left, however, is forgotten before the method returns. What a tenant was charged stays,
    and is corrected, while its jobs run. `waiting_bytes` bounds the requests that wait to be passed on
    (`Bodies`).
    """

    def __init__(
        self,
        capacity: int,
        *,
        fairness: Fairness = "roundRobin",
        min_share: float = 0.0,
        tenant_weights: Mapping[str, float] | None = None,
        waiting_bytes: int = WAITING_BYTES,
    ) -> None:
        self.capacity = capacity
        # Whether there is room is asked before (`is_full`, `displace`): a job passes through the line on its
        # way to a free seat, too, and a node that gives one back does not ask.
        self._line = FairQueue(capacity=LINE_ROOM, fairness=fairness, min_share=min_share)
        for tenant, weight in (tenant_weights or {}).items():
            self._line.set_weight(tenant, weight)
        self._tickets: dict[int, Ticket] = {}
        self._bodies = Bodies(waiting_bytes, capacity)

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        """Go through the tickets that wait now, in the order of their arrival; they may leave meanwhile."""
        return iter(list(self._tickets.values()))

    def __contains__(self, ticket: Ticket) -> bool:
        """Whether it waits."""
        return self._tickets.get(ticket.handle) is ticket

    # Joining and leaving -----------------------------------------------------------------------------

    def join(self, ticket: Ticket) -> None:
        """A job waits for its turn."""
        self._add(ticket, self._line.push)

    def rejoin(self, ticket: Ticket) -> None:
        """A job is back from a seat: before all others of its class, and it has been charged."""
        self._add(ticket, self._line.push_front)

    def pop(self, fits: Callable[[Ticket], bool | None]) -> Ticket | None:
        """Take out and charge the first in turn that fits; None if none does.

        `fits` answers None for a job without a seat, which is passed by, and False for one that only lacks
        memory, which is passed eight times at most.
        """
        tickets = self._tickets
        try:
            handle = self._line.pop(lambda handle: fits(tickets[handle]))
        except IndexError:
            return None
        return self._popped(handle)

    def pop_many(self, max_count: int, tokens: int | None) -> list[Ticket]:
        """Take out and charge up to `max_count` jobs in turn, of `tokens` together at most; None: of any.

        As that many calls of `pop`, for jobs that lack nothing but a seat and memory, in one of the kernel.
        """
        handles = self._line.pop_many(max_count, UNBOUNDED if tokens is None else tokens)
        return [self._popped(handle) for handle in handles]

    def remove(self, ticket: Ticket) -> None:
        """A job gives up its turn; it is not charged."""
        self._line.discard(ticket.handle)
        self._forget(ticket)

    # Room --------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether as many wait as may, or more, with those that nodes gave back."""
        return len(self._tickets) >= self.capacity

    def has_bytes_for(self, job: Job) -> bool:
        """Whether this job's request may wait, too."""
        return self._bodies.have_room(job)

    def displace(self, newcomer: Job) -> Ticket | None:
        """Take out the job that has to make room for this one; None if none has, or if it were in vain."""
        # Above the capacity, one less would still leave no room.
        if len(self._tickets) > self.capacity:
            return None
        victim = self._line.displace(newcomer.tenant, priority=newcomer.priority)
        if victim is None:
            return None
        ticket = self._tickets[victim]
        self._forget(ticket)
        return ticket

    # Charges -----------------------------------------------------------------------------------------

    def charge(self, ticket: Ticket, cost: float) -> None:
        """A job that had its turn has cost this much until now; what is above its estimate counts."""
        if cost > ticket.charged:
            self._line.charge(ticket.job.tenant, cost - ticket.charged)
            ticket.charged = cost

    def refund(self, ticket: Ticket, *, down_to: float) -> None:
        """Give back what was charged above that. Charges end with it."""
        self._line.refund(ticket.job.tenant, max(0.0, ticket.charged - down_to))
        ticket.charged = 0.0

    # Turns -------------------------------------------------------------------------------------------

    def position(self, ticket: Ticket) -> int:
        """Return how many leave before this one, under the fairness in force."""
        return self._line.position(ticket.handle)

    def ahead(self, ticket: Ticket) -> list[Job]:
        """Return who leaves before this one, in the order in which they do."""
        return self._ahead(ticket.handle)

    def ahead_of_newcomer(self, tenant: str, priority: int) -> list[Job]:
        """Return who would leave before a job that came now."""
        handle = self._line.push(tenant, priority=priority)
        ahead = self._ahead(handle)
        self._line.discard(handle)
        return ahead

    def _ahead(self, handle: int) -> list[Job]:
        return [self._tickets[other].job for other in self._line.ahead(handle)]

    def _add(self, ticket: Ticket, push: Callable[..., int]) -> None:
        job = ticket.job
        ticket.handle = push(job.tenant, ticket.cost, priority=job.priority, size=ticket.tokens)
        self._tickets[ticket.handle] = ticket
        self._bodies.add(job)

    def _popped(self, handle: int) -> Ticket:
        ticket = self._tickets[handle]
        self._forget(ticket)
        # One that rejoined was charged at its first turn.
        ticket.charged = max(ticket.charged, ticket.cost)
        return ticket

    def _forget(self, ticket: Ticket) -> None:
        """Its entry has left the line."""
        del self._tickets[ticket.handle]
        self._bodies.remove(ticket.job)
