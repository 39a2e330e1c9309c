"""Effects that are only recorded, and helpers that build jobs, nodes and limits for a scheduler."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from fairlead._cext.fairqueue import FairQueue, FairQueueEntry
from fairlead.base.errors import FairleadError
from fairlead.base.job import Job, Sampling
from fairlead.generation.gateway import spec_of
from fairlead.nodes.limits import NodeLimits
from fairlead.router.dispatch.effects import Effects, PausedModel
from fairlead.router.dispatch.queue import Tenant
from fairlead.router.dispatch.scheduler import Scheduler
from fairlead.router.dispatch.ticket import LoadRequest, Ticket
from fairlead.router.swap.policy import SwapReason

MODEL = "m"


class FakeNode:
    """The id and the models of a node: all that the scheduler uses of it, besides its limits."""

    def __init__(self, id: str = "node", *models: str) -> None:  # noqa: A002
        self.id = id
        self.models = frozenset(models or {MODEL})

    def __iter__(self) -> Iterator[str | frozenset[str]]:
        return iter((self.id, self.models))


class Ledger:
    """Wraps a fair queue.

    `charged`, `charged_to_teams`: what each tenant and each team has been charged, less its refunds.
    `before`: the entries that were tried, in order, before the one that was popped last, also in calls that
    `fits` ended with an exception. `tried`: those since the last entry that was popped.
    """

    def __init__(self, line: FairQueue) -> None:
        self.charged: defaultdict[object, float] = defaultdict(float)
        self.charged_to_teams: defaultdict[object, float] = defaultdict(float)
        self.before: list[int] = []
        self.tried: dict[int, None] = {}
        self._line = line
        self._unpaid: set[int] = set()  # handles whose pops are charged

    def push(self, tenant: str, cost: float = 1.0, *, retried: bool = False, **options: Any) -> int:
        handle = self._line.push(tenant, cost, retried=retried, **options)
        if not retried:
            self._unpaid.add(handle)
        return handle

    def _waiting(self) -> list[int]:
        return [handle for handle in self._unpaid if handle in self._line]

    def pop(self, fits: Callable[[int], bool | None], *, kinds: int | None = None) -> int:
        tried: list[tuple[int, FairQueueEntry]] = []

        def fits_and_records(handle: int) -> bool | None:
            tried[:] = [(handle, self._line.entry(handle))]
            self.tried[handle] = None
            return fits(handle)

        try:
            handle = self._line.pop(fits_and_records, kinds=kinds)
        except IndexError:
            self.tried.clear()
            raise
        self.before = [other for other in self.tried if other != handle]
        self.tried.clear()
        ((last, entry),) = tried
        assert last == handle
        if handle in self._unpaid:
            self._count(entry.tenant, entry.cost, entry.team_cost)
        return handle

    def pop_many(self, max_count: int, memory_budget: int) -> list[int]:
        self.before = []
        known = {handle: self._line.entry(handle) for handle in self._waiting()}
        handles = self._line.pop_many(max_count, memory_budget)
        for handle in handles:
            if handle in self._unpaid:
                entry = known[handle]
                self._count(entry.tenant, entry.cost, entry.team_cost)
        return handles

    def charge(self, tenant: Tenant, cost: float, *, team_cost: float) -> None:
        self._count(tenant, cost, team_cost)
        self._line.charge(tenant, cost, team_cost=team_cost)

    def refund(self, tenant: Tenant, cost: float, *, team_cost: float) -> None:
        self._count(tenant, -cost, -team_cost)
        self._line.refund(tenant, cost, team_cost=team_cost)

    def _count(self, tenant: object, cost: float, team_cost: float) -> None:
        self.charged[tenant] += cost
        if isinstance(tenant, tuple):
            self.charged_to_teams[tenant[0]] += team_cost

    def __getattr__(self, name: str) -> Any:
        return getattr(self._line, name)

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, handle: int) -> bool:
        return handle in self._line


class RecordedEffects:
    def __init__(self) -> None:
        self.granted: list[Ticket] = []
        self.started: list[tuple[Ticket, int]] = []  # further sequences
        self.paused: list[tuple[Ticket, int]] = []  # suspended sequences
        self.suspensions = 0
        self.all_started: list[Ticket] = []  # the ticket of each sequence, or whole job
        self.refused: dict[Ticket, FairleadError] = {}
        self.stopped: list[Ticket] = []
        self.swaps: list[tuple[str, frozenset[str]]] = []
        self.reasons: list[SwapReason] = []
        self.stopped_models: list[str] = []
        self.loads: dict[LoadRequest, FairleadError | None] = {}
        self.closed_nodes: list[str] = []
        self.pauses: dict[PausedModel, float] = {}
        self.idle_nodes: list[tuple[str, int]] = []
        self.freed: list[tuple[str, int]] = []

    @property
    def models(self) -> "RecordedEffects":
        return self

    def grant(self, ticket: Ticket) -> None:
        self.granted.append(ticket)
        self.all_started.append(ticket)

    def start(self, ticket: Ticket, index: int) -> None:
        self.started.append((ticket, index))
        self.all_started.append(ticket)

    def suspend(self, ticket: Ticket, index: int) -> None:
        self.paused.append((ticket, index))
        self.suspensions += 1

    def resume(self, ticket: Ticket, index: int) -> None:
        self.paused.remove((ticket, index))
        self.all_started.append(ticket)

    def refuse(self, ticket: Ticket, error: FairleadError) -> None:
        assert ticket not in self.refused
        self.refused[ticket] = error

    def stop(self, ticket: Ticket, error: FairleadError) -> None:
        self.stopped.append(ticket)

    def start_swap(self, model: str, evict: frozenset[str], reason: SwapReason) -> None:
        self.reasons.append(reason)
        self.swaps.append((model, evict))

    def stop_model(self, model: str) -> None:
        self.stopped_models.append(model)

    def load_ended(self, request: LoadRequest, error: FairleadError | None) -> None:
        assert request not in self.loads
        self.loads[request] = error

    def seats_freed(self, node_id: str, number: int) -> None:
        self.freed.append((node_id, number))

    def pause(self, pause: PausedModel, pause_s: float) -> None:
        self.pauses[pause] = pause_s

    def node_closed(self, node_id: str) -> None:
        self.closed_nodes.append(node_id)

    def idle(self, node_id: str, models: frozenset[str], used: int) -> None:
        self.idle_nodes.append((node_id, used))


_effects_type: type[Effects] = RecordedEffects  # so that mypy compares them


def job(
    tenant: str = "A",
    *,
    prompt: int = 3,
    max_tokens: int = 1,
    model: str = MODEL,
    cost: float = 1.0,
    tokens: int = 0,
    **options: Any,
) -> Ticket:
    """Return a ticket for a job with one prompt."""
    recorded_job = Job(
        id="r",
        tenant=tenant,
        model=model,
        prompts=(list(range(prompt)),),
        sampling=Sampling(max_tokens=max_tokens),
        **options,
    )
    return Ticket(spec_of(recorded_job, with_prefixes=True), cost=cost, tokens=tokens)


def limits(seats: int, *, longest: int = 100, cache_tokens: int | None = None) -> NodeLimits:
    """Return the limits of a local node that runs all sequences of a job at once."""
    return NodeLimits(seats=seats, max_model_len=longest, cache_tokens=cache_tokens)


def engine_limits(seats: int, *, longest: int = 100, cache_tokens: int | None = None) -> NodeLimits:
    """Return the limits of a node that starts the sequences of a job one by one."""
    return NodeLimits(seats=seats, max_model_len=longest, cache_tokens=cache_tokens, by_sequence=True)


def remote_limits(seats: int, *, longest: int = 100, load: float | None = None) -> NodeLimits:
    """Return the limits of a node that only relays requests, as their clients wrote them."""
    return NodeLimits(seats=seats, max_model_len=longest, load=load, evictable=False, needs_relay=True)


def scheduler(capacity: int = 100, **options: Any) -> tuple[Scheduler, RecordedEffects]:
    effects = RecordedEffects()
    return Scheduler(effects, capacity=capacity, random=Random(0), **options), effects


def submit(to: Scheduler, *tickets: Ticket) -> list[Ticket]:
    for ticket in tickets:
        to.submit(ticket)
    return list(tickets)
