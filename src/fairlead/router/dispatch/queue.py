"""The waiting jobs: their order, the size of their requests, and what each tenant was charged.

Pure. The `FairQueue` kernel keeps the order of handles with their tenants and costs; here each handle is a
ticket's, and each cost is divided by its tenant's weight. Independent of seats: a function that is passed to
`pop` checks which jobs fit.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

from fairlead._cext.fairqueue import FairQueue
from fairlead.router.dispatch.job_spec import JobSpec
from fairlead.router.dispatch.node_groups import KINDS, WIDE
from fairlead.router.dispatch.queued_bytes import QueuedBytes
from fairlead.router.dispatch.tenant_counters import TenantCounters
from fairlead.router.dispatch.ticket import Ticket
from fairlead.router.dispatch.wait_survey import Newcomer, QueueOrder

Fairness = Literal["roundRobin", "tokens"]

UNBOUNDED_JOBS = 2**31
UNBOUNDED_TOKENS = 2**63
WAITING_BYTES = 256 * 1024 * 1024
CLASSES = 8
MOST_SERVICE = 1e300
_NO_TENANT = -1  # tenants have names; as many numbers below it as there are classes are free, too


class Queue:
    """Tickets in fair order. Only this class writes a ticket's `handle` and `charged`.

    capacity: how many may wait.
    fairness: what tenants share.
    min_share: the part of the turns that a waiting lower class gets at least.
    tenant_weights: tenants with another weight than 1.
    waiting_bytes: bounds the queued requests for remote nodes (`QueuedBytes`).

    A removed ticket is forgotten before the method returns. What its tenant was charged stays, and is
    corrected while the job runs.
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
        # The kernel has no limit of its own; callers check first (`is_full`, `displace`). A job on its way to
        # a free seat passes through it too, and a requeued job is always accepted.
        self._kernel = FairQueue(capacity=UNBOUNDED_JOBS, fairness=fairness, min_share=min_share)
        self._weights = dict(tenant_weights or {})
        self._tickets: dict[int, Ticket] = {}
        self._kinds = 0
        self._of_kind = [0] * KINDS
        self._bodies = QueuedBytes(waiting_bytes, capacity)

    def __len__(self) -> int:
        """Return the number of waiting jobs."""
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        """Iterate over the tickets that wait now, in order of arrival; tickets may be removed meanwhile."""
        return iter(list(self._tickets.values()))

    def __contains__(self, ticket: Ticket) -> bool:
        """Return whether the ticket waits."""
        return self._tickets.get(ticket.handle) is ticket

    # Adding and removing -----------------------------------------------------------------------------

    def push(self, ticket: Ticket) -> None:
        """Add a job that waits for its turn."""
        self._add(ticket, retried=False)

    def requeue(self, ticket: Ticket) -> None:
        """Add a job that lost its seat: before all others of its class, and without a new charge."""
        self._add(ticket, retried=True)

    @property
    def kinds(self) -> int:
        """A bit for each number of a kind of which jobs wait."""
        return self._kinds

    @property
    def has_wide_jobs(self) -> bool:
        """Whether jobs wait that take several seats."""
        return bool(self._kinds & WIDE)

    def pop(self, fits: Callable[[Ticket], bool | None], kinds: int | None = None) -> Ticket | None:
        """Remove and charge the first job of these kinds in fair order that fits; None if none does.

        `fits` returns None for a job without a free seat, which is skipped, and False for a job that lacks
        only cache memory, which is passed at most eight times.
        """
        tickets = self._tickets
        try:
            handle = self._kernel.pop(lambda handle: fits(tickets[handle]), kinds=kinds)
        except IndexError:
            return None
        return self._dequeued(handle)

    def pop_many(self, max_count: int, tokens: int | None) -> list[Ticket]:
        """Remove and charge up to `max_count` jobs in fair order, of `tokens` together at most; None: any.

        Equals that many calls of `pop`, for jobs that need only one seat and cache memory, in one call of the
        kernel.
        """
        handles = self._kernel.pop_many(max_count, UNBOUNDED_TOKENS if tokens is None else tokens)
        return [self._dequeued(handle) for handle in handles]

    def remove(self, ticket: Ticket) -> None:
        """Remove a job without charging it."""
        self._kernel.discard(ticket.handle)
        self._forget(ticket)

    # Capacity ----------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether `capacity` jobs wait, or more; requeued jobs may exceed it."""
        return len(self._tickets) >= self.capacity

    def has_bytes_for(self, job: JobSpec) -> bool:
        """Return whether this job's request body may wait, too."""
        return self._bodies.has_room(job.body_bytes)

    def displace(self, newcomer: JobSpec) -> Ticket | None:
        """Remove and return the job that must make room for this one; None if there is no such job."""
        # Above the capacity, removing one job would still leave no room.
        if len(self._tickets) > self.capacity:
            return None
        victim = self._kernel.displace(newcomer.tenant, priority=newcomer.priority)
        if victim is None:
            return None
        ticket = self._tickets[victim]
        self._forget(ticket)
        return ticket

    # Charges -----------------------------------------------------------------------------------------

    def charge(self, ticket: Ticket, cost: float) -> None:
        """Charge a granted job for its cost until now, as far as it exceeds what was charged already."""
        if cost > ticket.charged:
            self._kernel.charge(ticket.job.tenant, self._weighted(ticket.job.tenant, cost - ticket.charged))
            ticket.charged = cost

    def refund(self, ticket: Ticket, *, down_to: float) -> None:
        """Refund what was charged above `down_to`. The ticket must not be charged afterwards."""
        excess = max(0.0, ticket.charged - down_to)
        self._kernel.refund(ticket.job.tenant, self._weighted(ticket.job.tenant, excess))
        ticket.charged = 0.0

    def counters(self, tenants: Iterable[str]) -> TenantCounters:
        """Return the counters of these tenants."""
        counter = self._kernel.counter
        return TenantCounters(counter(_NO_TENANT), {tenant: counter(tenant) for tenant in tenants})

    def restore_counters(self, excess: Mapping[str, float]) -> None:
        """Raise the counters of tenants above that of a new tenant by this much."""
        for tenant, service in excess.items():
            self._kernel.charge(tenant, service)

    # Order -------------------------------------------------------------------------------------------

    def position(self, ticket: Ticket) -> int:
        """Return how many jobs leave before this one, under the fairness in force."""
        return len(self._kernel.ahead(ticket.handle))

    def ahead(self, ticket: Ticket) -> list[JobSpec]:
        """Return the jobs that leave before this one, in that order."""
        return self._ahead(ticket.handle)

    def ahead_of_newcomer(self, tenant: str, priority: int) -> list[JobSpec]:
        """Return the jobs that would leave before a job that arrived now, in that order."""
        handle = self._kernel.push(tenant, priority=priority)
        ahead = self._ahead(handle)
        self._kernel.discard(handle)
        return ahead

    def order(self) -> QueueOrder:
        """Return all waiting jobs as they leave, and where the next two of each tenant and class would be.

        The two are queued for a moment, so that the kernel answers. Takes time in proportion to the queue.
        """
        costs: dict[tuple[str | None, int], float] = {(None, priority): 1.0 for priority in range(CLASSES)}
        for ticket in self._tickets.values():
            job = ticket.job
            costs[job.tenant, job.priority] = self._weighted(job.tenant, ticket.cost)
        newcomers = {
            self._kernel.push(_NO_TENANT - priority if tenant is None else tenant, cost, priority=priority): (
                tenant,
                priority,
            )
            for (tenant, priority), each in costs.items()
            for cost in (each, 0.0)
        }
        tickets: list[Ticket] = []
        ahead: dict[tuple[str | None, int], list[int]] = {pair: [] for pair in costs}
        for handle in self._kernel.ahead(None):
            if handle in newcomers:
                ahead[newcomers[handle]].append(len(tickets))
            else:
                tickets.append(self._tickets[handle])
        for handle in newcomers:
            self._kernel.discard(handle)
        return QueueOrder(tickets, {pair: Newcomer(*both) for pair, both in ahead.items()})

    def _ahead(self, handle: int) -> list[JobSpec]:
        return [self._tickets[other].job for other in self._kernel.ahead(handle)]

    def _weighted(self, tenant: str, cost: float) -> float:
        # The kernel accepts finite costs only, and stops counting at this much.
        return min(cost / self._weights.get(tenant, 1.0), MOST_SERVICE)

    def _add(self, ticket: Ticket, *, retried: bool) -> None:
        job = ticket.job
        ticket.handle = self._kernel.push(
            job.tenant,
            self._weighted(job.tenant, ticket.cost),
            priority=job.priority,
            size=ticket.tokens,
            kind=ticket.kind,
            retried=retried,
        )
        self._tickets[ticket.handle] = ticket
        self._of_kind[ticket.kind] += 1
        self._kinds |= 1 << ticket.kind
        self._bodies.add(job.body_bytes)

    def _dequeued(self, handle: int) -> Ticket:
        ticket = self._tickets[handle]
        self._forget(ticket)
        # A requeued job was charged at its first grant.
        ticket.charged = max(ticket.charged, ticket.cost)
        return ticket

    def _forget(self, ticket: Ticket) -> None:
        """Drop a ticket after its entry has left the kernel."""
        del self._tickets[ticket.handle]
        self._of_kind[ticket.kind] -= 1
        if not self._of_kind[ticket.kind]:
            self._kinds &= ~(1 << ticket.kind)
        self._bodies.remove(ticket.job.body_bytes)
