"""The waiting jobs: their order, the size of their requests, and what each tenant was charged.

Pure. The `FairQueue` kernel keeps the order of handles with their tenants and costs. Here each handle is a
ticket's, and each cost is divided by its tenant's weight, and for its team by the team's. Independent of
seats: a function that is passed to `pop` checks which jobs fit.

A job has the team and the team's weight that its key had when it arrived. A reload changes both for new jobs
only; waiting jobs stay in their lines. When a tenant's team changes, its charges beyond others go with it.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Literal

from fairlead._cext.fairqueue import FairQueue
from fairlead.router.dispatch.job_spec import JobSpec, line_of
from fairlead.router.dispatch.line_weights import LineWeights
from fairlead.router.dispatch.node_groups import KINDS, WIDE
from fairlead.router.dispatch.queued_bytes import QueuedBytes
from fairlead.router.dispatch.tenant_counters import TenantCounters
from fairlead.router.dispatch.ticket import Run, Ticket
from fairlead.router.dispatch.wait_survey import Newcomer, QueueOrder

Fairness = Literal["roundRobin", "tokens"]
Tenant = str | int | tuple[str | int, str | int]  # as the kernel names it

UNBOUNDED_JOBS = 2**31
UNBOUNDED_TOKENS = 2**63
WAITING_BYTES = 256 * 1024 * 1024
CLASSES = 8
MOST_SERVICE = 1e300
MAX_MOVED_TENANTS = 10_000
_NOBODY = LineWeights()
_NO_TENANT = -1  # tenants have names; as many numbers below it as there are classes are free, too


class Queue:
    """Tickets in fair order. Only this class writes a ticket's `handle`, `left`, `paid` and `charged`.

    A job takes a turn for each of its sequences. It waits as long as it has no seat; while it runs, its entry
    stays for the sequences that are left, before its tenant's other jobs.

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
        self._by_tokens = fairness == "tokens"
        self.min_share = min_share
        self._teams: dict[str, str] = {}  # of the tenants that are in teams; those seen last are kept
        self._team_weights: dict[str, float] = {}  # of the jobs that came last
        self._tickets: dict[int, Ticket] = {}  # the jobs that wait
        # Jobs that run and have sequences left, and suspended sequences.
        self._begun: dict[int, Ticket | Run] = {}
        # By model: how many entries of each line and class wait, of jobs and of sequences.
        self.waiting: dict[str, Counter[tuple[str, int]]] = {}
        self._weights_of: dict[str, LineWeights] = {}  # by model, of these lines
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
        """Add a job that lost its seats: before all others of its class, and without a new charge.

        That holds for as many sequences as were charged; the others take turns.
        """
        self._add(ticket, retried=True)

    @property
    def has_begun_jobs(self) -> bool:
        """Whether sequences of jobs that run wait for seats."""
        return bool(self._begun)

    def begun(self) -> list[Ticket]:
        """Return the jobs that run and have sequences left, also those of suspended sequences."""
        return [entry.ticket if isinstance(entry, Run) else entry for entry in self._begun.values()]

    def suspended(self) -> list[Run]:
        """Return the suspended sequences."""
        return [entry for entry in self._begun.values() if isinstance(entry, Run)]

    @property
    def kinds(self) -> int:
        """A bit for each number of a kind of which jobs wait."""
        return self._kinds

    @property
    def has_wide_jobs(self) -> bool:
        """Whether jobs wait that take several seats."""
        return bool(self._kinds & WIDE)

    def pop(self, fits: Callable[[Ticket], bool | None], kinds: int | None = None) -> Ticket | Run | None:
        """Take and charge the first sequence in fair order whose job is of these kinds and fits.

        Returns the job, which stays in the queue if it has more sequences; or a sequence that was suspended,
        which is not charged again; None if none fits.

        `fits` returns None for a job without a free seat, which is skipped, and False for a job that lacks
        only cache memory, which is passed at most eight times.
        """
        tickets, begun = self._tickets, self._begun

        def fits_entry(handle: int) -> bool | None:
            entry = tickets.get(handle) or begun[handle]
            return fits(entry.ticket if isinstance(entry, Run) else entry)

        try:
            handle = self._kernel.pop(fits_entry, kinds=kinds)
        except IndexError:
            return None
        return self._dequeued(handle)

    def pop_many(self, max_count: int, tokens: int | None) -> list[Ticket | Run]:
        """Take and charge up to `max_count` jobs in fair order, of `tokens` together at most; None: any.

        Equals that many calls of `pop`, for jobs that need only one seat and cache memory, in one call of the
        kernel. Every waiting job must be such a job.
        """
        handles = self._kernel.pop_many(max_count, UNBOUNDED_TOKENS if tokens is None else tokens)
        return [self._dequeued(handle) for handle in handles]

    def remove(self, ticket: Ticket) -> None:
        """Remove a job, and its sequences that are left or suspended, without charging it."""
        if self._kernel.discard(ticket.handle):
            self._forget(ticket)
        for run in ticket.runs.values():
            self.remove_run(run)

    def suspend(self, run: Run) -> None:
        """Add a suspended sequence: before its tenant's other jobs, and charged already."""
        ticket = run.ticket
        run.handle = self._kernel.push(
            _tenant_in(ticket.job.line),
            0.0,
            priority=ticket.job.priority,
            size=run.tokens,
            kind=ticket.kind,
            begun=True,
        )
        self._begun[run.handle] = run
        self._count(ticket)

    def remove_run(self, run: Run) -> None:
        """Remove a sequence that has ended, if it was suspended."""
        if self._kernel.discard(run.handle):
            del self._begun[run.handle]
            self._uncount(run.ticket)

    def restore(self, ticket: Ticket, begun: int) -> None:
        """Add the sequences that are left of a job that runs; the first `begun` were charged."""
        ticket.left, ticket.paid = max(0, ticket.job.turns - begun), max(1, begun)
        if ticket.left:
            self._push(ticket, ticket.left, begun=True)
            self._begun[ticket.handle] = ticket

    def take_rest(self, ticket: Ticket) -> None:
        """Charge a job for all its sequences that are left, which run at once."""
        if ticket.left:
            self.remove(ticket)
            unpaid = max(0, ticket.job.turns - ticket.paid) * ticket.share
            own, of_team = self._weighted(ticket.job, unpaid)
            self._kernel.charge(_tenant_in(ticket.job.line), own, team_cost=of_team)
            ticket.charged += unpaid
            ticket.left, ticket.paid = 0, ticket.job.turns

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
        victim = self._kernel.displace(_tenant_in(newcomer.line), priority=newcomer.priority)
        if victim is None:
            return None
        ticket = self._tickets[victim]
        self._forget(ticket)
        return ticket

    # Charges -----------------------------------------------------------------------------------------

    def charge(self, ticket: Ticket, cost: float) -> None:
        """Charge a granted job for its cost until now, as far as it exceeds what was charged already."""
        if cost > ticket.charged:
            own, of_team = self._weighted(ticket.job, cost - ticket.charged)
            self._kernel.charge(_tenant_in(ticket.job.line), own, team_cost=of_team)
            ticket.charged = cost

    def refund(self, ticket: Ticket, *, down_to: float) -> None:
        """Refund what was charged above `down_to`. The ticket must not be charged afterwards."""
        excess = max(0.0, ticket.charged - down_to)
        own, of_team = self._weighted(ticket.job, excess)
        self._kernel.refund(_tenant_in(ticket.job.line), own, team_cost=of_team)
        ticket.charged = 0.0

    def counters(self, lines: Iterable[str]) -> TenantCounters:
        """Return the counters of the tenants of these lines, and of their teams.

        That of a member of a team is above the level by as much as it is above the team's own.
        """
        level = self._kernel.counter(_NO_TENANT)
        counters: dict[str, float] = {}
        for line in lines:
            counters[line] = level + self._excess(_tenant_in(line))
            if type(tenant := _tenant_in(line)) is tuple:
                counters[line_of("", str(tenant[0]))] = self._kernel.team_counter(tenant[0])
        return TenantCounters(level, counters)

    def restore_counters(self, excess: Mapping[str, float]) -> None:
        """Raise the counters of lines above that of a new tenant by this much."""
        for line, service in excess.items():
            tenant = _tenant_in(line)
            if type(tenant) is not tuple:
                self._kernel.charge(tenant, service)
            elif tenant[1]:
                self._kernel.charge(tenant, service, team_cost=0.0)
            else:
                self._kernel.charge((tenant[0], _NO_TENANT), 0.0, team_cost=service)

    # Order -------------------------------------------------------------------------------------------

    def position(self, ticket: Ticket) -> int:
        """Return how many jobs leave before this one, under the fairness in force."""
        return len(set(self._kernel.ahead(ticket.handle)))

    def ahead(self, ticket: Ticket) -> list[JobSpec]:
        """Return the jobs that leave before this one, in that order, each as often as it gets a turn."""
        return self._ahead(ticket.handle)

    def ahead_of_newcomer(self, line: str, priority: int) -> list[JobSpec]:
        """Return the jobs that would leave before a job of this line that arrived now; see `ahead`."""
        handle = self._kernel.push(_tenant_in(line), priority=priority)
        ahead = self._ahead(handle)
        self._kernel.discard(handle)
        return ahead

    def order(self) -> QueueOrder:
        """Return all waiting jobs as they leave, and where the next two of each line and class would be.

        Also those of new tenants, and of new members of teams. They are queued for a moment, so that the
        kernel answers. Takes time in proportion to the queue.
        """
        costs: dict[tuple[str | None, int], tuple[float, float]] = {
            (None, priority): (1.0, 1.0) for priority in range(CLASSES)
        }
        for ticket in self._tickets.values():
            job = ticket.job
            costs[job.line, job.priority] = self._weighted(job, ticket.share)
            if job.team:
                costs.setdefault((line_of("", job.team), job.priority), (1.0, 1.0 / job.team_weight))
        newcomers = {
            self._kernel.push(_newcomer(line, priority), own, priority=priority, team_cost=of_team): (
                line,
                priority,
            )
            for (line, priority), both in costs.items()
            for own, of_team in (both, (0.0, 0.0))
        }
        tickets: dict[Ticket, None] = {}  # each at its first turn
        ahead: dict[tuple[str | None, int], list[int]] = {pair: [] for pair in costs}
        for handle in self._kernel.ahead(None):
            if handle in newcomers:
                ahead[newcomers[handle]].append(len(tickets))
            elif handle in self._tickets:
                tickets[self._tickets[handle]] = None
        for handle in newcomers:
            self._kernel.discard(handle)
        return QueueOrder(list(tickets), {pair: Newcomer(*both) for pair, both in ahead.items()})

    def _ahead(self, handle: int) -> list[JobSpec]:
        entries = self._tickets | self._begun
        found = (entries[other] for other in self._kernel.ahead(handle))
        return [entry.ticket.job if isinstance(entry, Run) else entry.job for entry in found]

    def parts(self, model: str, lines: Collection[str]) -> dict[str, float]:
        """Return the part of the whole that is the share of each of these lines.

        It is by weight, of its team's part by weight, among these lines and those that wait for the model.
        Without a team, a line has a part as a team has. Weights count under token fairness only. Takes time
        in proportion to `lines` only.
        """
        waiting = self._weights_of.get(model) or _NOBODY
        added: dict[str, float] = {}  # by unit: the weight of these lines that do not wait
        for line in lines:
            if line not in waiting.entries:
                unit = _unit_of(line)
                added[unit] = added.get(unit, 0.0) + self._line_weight(line)
        whole = waiting.whole + sum(self._unit_weight(unit) for unit in added if not waiting.has(unit))
        parts = {}
        for line in lines:
            unit = _unit_of(line)
            members = waiting.members(unit) + added.get(unit, 0.0)
            parts[line] = self._unit_weight(unit) / whole * self._line_weight(line) / members
        return parts

    def lines(self, model: str) -> Collection[str]:
        """Return the lines that wait for a model."""
        waiting = self._weights_of.get(model)
        return () if waiting is None else waiting.entries.keys()

    def _line_weight(self, line: str) -> float:
        tenant = _tenant_in(line)
        name = str(tenant[1]) if type(tenant) is tuple else line
        return self._weights.get(name, 1.0) if self._by_tokens else 1.0

    def _unit_weight(self, unit: str) -> float:
        tenant = _tenant_in(unit)
        if type(tenant) is not tuple:
            return self._line_weight(unit)
        return self._team_weights.get(str(tenant[0]), 1.0) if self._by_tokens else 1.0

    def _weighted(self, job: JobSpec, cost: float) -> tuple[float, float]:
        """Return what the job's tenant and its team are charged for a cost."""
        # The kernel accepts finite costs only, and stops counting at this much.
        own = min(cost / self._weights.get(job.tenant, 1.0), MOST_SERVICE)
        return own, min(cost / job.team_weight, MOST_SERVICE) if job.team else own

    def _excess(self, tenant: Tenant) -> float:
        """Return by how much a tenant's counter is above that of a new one, of its team if it is in one."""
        other: Tenant = (tenant[0], _NO_TENANT) if type(tenant) is tuple else _NO_TENANT
        return self._kernel.counter(tenant) - self._kernel.counter(other)

    def _move(self, tenant: str, team: str) -> None:
        """Charge a tenant whose team has changed in the new one for what it has received beyond others."""
        earlier = _tenant_in(line_of(tenant, self._teams.pop(tenant, "")))
        now = _tenant_in(line_of(tenant, team))
        owed = self._excess(earlier) - self._excess(now)
        if owed > 0:
            self._kernel.charge(now, owed, team_cost=0.0)
        if team:
            self._teams[tenant] = team
        if len(self._teams) > MAX_MOVED_TENANTS:
            del self._teams[next(iter(self._teams))]

    def _add(self, ticket: Ticket, *, retried: bool) -> None:
        ticket.left = ticket.job.turns
        self._push(ticket, min(max(1, ticket.paid), ticket.left) if retried else ticket.left, retried=retried)
        self._tickets[ticket.handle] = ticket
        self._bodies.add(ticket.job.body_bytes)

    def _push(self, ticket: Ticket, count: int, *, retried: bool = False, begun: bool = False) -> None:
        """Add a ticket's entry for so many of its sequences."""
        job = ticket.job
        if not retried and self._teams.get(job.tenant, "") != job.team:
            self._move(job.tenant, job.team)
        if job.team and self._team_weights.get(job.team) != job.team_weight:
            self._team_weights[job.team] = job.team_weight
            for weights in self._weights_of.values():
                unit = line_of("", job.team)
                weights.reweigh(unit, self._unit_weight(unit))
        own, of_team = self._weighted(job, ticket.share)
        ticket.handle = self._kernel.push(
            _tenant_in(job.line),
            own,
            priority=job.priority,
            size=ticket.tokens,
            kind=ticket.kind,
            count=count,
            retried=retried,
            begun=begun,
            team_cost=of_team,
        )
        self._count(ticket)

    def _dequeued(self, handle: int) -> Ticket | Run:
        """Record that a sequence has been popped; return it if it was suspended, else its job."""
        ticket = self._begun.get(handle)
        if isinstance(ticket, Run):
            del self._begun[handle]
            self._uncount(ticket.ticket)
            return ticket
        if ticket is None:
            ticket = self._begun[handle] = self._tickets.pop(handle)
            self._bodies.remove(ticket.job.body_bytes)
        ticket.left -= 1
        if ticket.job.turns - ticket.left > ticket.paid:  # it was not charged at an earlier node
            ticket.charged += ticket.share
            ticket.paid += 1
        if handle not in self._kernel:
            self._forget(ticket)
            if ticket.left:  # a requeued job: its other sequences take turns
                self._push(ticket, ticket.left, begun=True)
                self._begun[ticket.handle] = ticket
        return ticket

    def _forget(self, ticket: Ticket) -> None:
        """Drop a ticket's entry, which has left the kernel."""
        if self._tickets.pop(ticket.handle, None) is not None:
            self._bodies.remove(ticket.job.body_bytes)
        else:
            del self._begun[ticket.handle]
        self._uncount(ticket)

    def _count(self, ticket: Ticket) -> None:
        """Count an entry of a job."""
        job = ticket.job
        self.waiting.setdefault(job.model, Counter())[job.line, job.priority] += 1
        weights = self._weights_of.setdefault(job.model, LineWeights())
        unit = _unit_of(job.line)
        weights.add(job.line, self._line_weight(job.line), unit, self._unit_weight(unit))
        self._of_kind[ticket.kind] += 1
        self._kinds |= 1 << ticket.kind

    def _uncount(self, ticket: Ticket) -> None:
        job = ticket.job
        self._weights_of[job.model].remove(job.line, self._line_weight(job.line), _unit_of(job.line))
        waiting = self.waiting[job.model]
        waiting[job.line, job.priority] -= 1
        if not waiting[job.line, job.priority]:
            del waiting[job.line, job.priority]
            if not waiting:
                del self.waiting[job.model], self._weights_of[job.model]
        self._of_kind[ticket.kind] -= 1
        if not self._of_kind[ticket.kind]:
            self._kinds &= ~(1 << ticket.kind)


def _tenant_in(line: str) -> Tenant:
    """Return the tenant of a line, as the kernel names it: a pair if it is in a team."""
    if not line.startswith("\0"):
        return line
    team, tenant = line[1:].split("\0", 1)
    return team, tenant


def _unit_of(line: str) -> str:
    """Return what has a part of the whole: the line's team, or the line itself."""
    tenant = _tenant_in(line)
    return line_of("", str(tenant[0])) if type(tenant) is tuple else line


def _newcomer(line: str | None, priority: int) -> Tenant:
    """Return the tenant of a job that is queued for a moment; a free name for a new tenant or member."""
    tenant: Tenant = _NO_TENANT - priority if line is None else _tenant_in(line)
    return (tenant[0], _NO_TENANT - priority) if type(tenant) is tuple and not tenant[1] else tenant
