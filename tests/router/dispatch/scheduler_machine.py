"""Random events for a scheduler. All visible state is compared with a plain model of the rules."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fairlead.base.errors import (
    Displaced,
    FairleadError,
    InvalidRequest,
    LoadFailed,
    NoOtherNode,
    QueueFull,
    QueueTimeout,
)
from fairlead.base.job import Relay
from fairlead.nodes.limits import NodeLimits
from fairlead.router.dispatch.effects import PausedModel
from fairlead.router.dispatch.job_spec import JobSpec
from fairlead.router.dispatch.node_state import NodeState
from fairlead.router.dispatch.scheduler import Scheduler
from fairlead.router.dispatch.ticket import LoadRequest, Ticket, TicketState
from fairlead.router.swap.policy import EvictionPolicy, SwapReason
from router.dispatch.recorded import (
    FakeNode,
    Ledger,
    RecordedEffects,
    engine_limits,
    job,
    limits,
    remote_limits,
)

CAPACITY = 5
LATE = 16  # jobs that must be submitted before the server may be drained
RELAY = Relay("/v1/completions", b"{}")
SETTINGS = settings(stateful_step_count=50)


BYPASS = 8  # jobs that may overtake one that needs more seats than are free


class OneAtATime(EvictionPolicy):
    """Keeps one of the models loaded that a swap can load."""

    def eviction_for(self, target: str, running: Sequence[str]) -> frozenset[str]:
        return frozenset(running) & {"x", "y"}


class Full:
    """A model of a node that has rejected jobs, as a plain list of the rules.

    `pauses`: by tenant, None for all: whether it is over, so that one job may try, and whether the node has
    named its length. `rejected`: the tenants whose jobs were rejected since the last success.
    """

    def __init__(self) -> None:
        self.pauses: dict[str | None, tuple[bool, bool]] = {}
        self.rejected: set[str] = set()

    def refuses(self, tenant: str) -> bool:
        return any(not self.pauses.get(whose, (True, False))[0] for whose in (None, tenant))

    def reject(self, tenant: str, *, is_named: bool) -> None:
        is_odd = tenant in self.pauses and None not in self.pauses
        self.pauses[tenant] = False, is_named
        if not is_odd:
            self.rejected.add(tenant)
            self.pauses[None] = False, is_named and len(self.rejected) > 1

    def grant(self, tenant: str) -> bool:
        whose = [each for each in (None, tenant) if each in self.pauses]
        self.pauses |= {each: (False, self.pauses[each][1]) for each in whose}
        return bool(whose)

    def succeed(self, tenant: str) -> None:
        self.rejected.clear()
        self.pauses = {whose: pause for whose, pause in self.pauses.items() if whose not in (None, tenant)}

    def resume(self, *whose: str | None) -> None:
        self.pauses |= {each: (True, self.pauses[each][1]) for each in whose if each in self.pauses}


class Watching(RecordedEffects):
    """Checks each effect at the moment it happens."""

    def __init__(self, machine: "SchedulerMachine") -> None:
        super().__init__()
        self.machine = machine

    def grant(self, ticket: Ticket) -> None:
        super().grant(ticket)
        self.machine.check_grant(ticket)

    def start(self, ticket: Ticket, index: int) -> None:
        super().start(ticket, index)
        self.machine.check_start(ticket, index)

    def suspend(self, ticket: Ticket, index: int) -> None:
        super().suspend(ticket, index)
        self.machine.check_suspension(ticket, index)

    def resume(self, ticket: Ticket, index: int) -> None:
        super().resume(ticket, index)
        self.machine.check_resumption(ticket, index)

    def refuse(self, ticket: Ticket, error: FairleadError) -> None:
        assert ticket.state is not TicketState.GRANTED
        super().refuse(ticket, error)
        self.machine.check_refusal(ticket, error)

    def start_swap(self, model: str, evict: frozenset[str], reason: SwapReason) -> None:
        super().start_swap(model, evict, reason)
        self.machine.check_swap(model, evict)

    def stop_model(self, model: str) -> None:
        super().stop_model(model)
        self.machine.check_stop(model)

    def load_ended(self, request: LoadRequest, error: FairleadError | None) -> None:
        super().load_ended(request, error)
        self.machine.check_load_end(request, error)


class SchedulerMachine(RuleBasedStateMachine):
    """Models "m" and "n" are on fixed nodes; "x" and "y" are loaded by swaps, one at a time.

    The node "far" has "m" and "x", too, but takes only jobs that it can relay. The nodes in `by_sequence`
    start the sequences of a job one by one.

    teams: by tenant, its team; the others are in none.
    weights: of teams, and of tenants. Shares of seats are by weight under token fairness only.
    """

    by_sequence = frozenset({"one", "swap x"})
    preempting = (0,)
    capacity = CAPACITY
    fairness = "roundRobin"

    def __init__(self) -> None:
        super().__init__()
        self.effects = Watching(self)
        self.set_up({}, {})
        self.costs: Counter[str] = Counter()  # per tenant, of its jobs that have ended
        self.order: dict[Ticket, int] = {}  # order of arrival; returned jobs come first
        self.open: list[Ticket] = []  # those that have not ended, and some others
        self.nodes = {
            "one": FakeNode("one", "m"),
            "two": FakeNode("two", "m", "n"),
            "far": FakeNode("far", "m", "x"),
        }
        self.seats: dict[str, int] = {}
        self.loading: set[str] = set()
        self.expired: set[Ticket] = set()
        self.returns: Counter[Ticket] = Counter()
        self.failed_at: dict[Ticket, NodeState] = {}
        self.unsuited: dict[Ticket, set[NodeState]] = {}
        self.full: dict[tuple[NodeState, str], Full] = {}
        self.trials: set[Ticket] = set()
        self.finished: set[Ticket] = set()
        self.loads: list[LoadRequest] = []  # load requests that have not ended
        self.leaving: set[str] = set()  # models that are to be unloaded
        self.dying: set[str] = set()  # models with processes that have not ended yet
        self.newcomer: Ticket | None = None
        # Of jobs that run: the seats of what runs, by its index.
        self.runs: dict[Ticket, dict[int, int]] = {}
        self.begun: dict[Ticket, int] = {}  # and how many of their sequences have begun at their nodes
        self.suspended: dict[Ticket, set[int]] = {}  # and the indexes of those that are suspended
        self.ripe: set[tuple[Ticket, int]] = set()
        self.pauses: Counter[tuple[Ticket, int]] = Counter()  # while the tenant holds more than its share
        self.exchange: tuple[Ticket, int, list[tuple[Ticket, int]]] | None = None
        # How many jobs have overtaken one of several sequences: at least, and at most.
        self.overtakes: dict[Ticket, list[int]] = {}
        self.fresh: dict[NodeState, tuple[int, list[str]]] = {}  # before the latest grant

    def set_up(self, teams: Mapping[str, str], weights: Mapping[str, float]) -> None:
        """Make the scheduler, for tenants in these teams."""
        self.teams, self.weights = teams, weights
        self.subject = Scheduler(
            self.effects,
            capacity=self.capacity,
            random=Random(0),
            fairness=self.fairness,
            tenant_weights={name: weight for name, weight in weights.items() if name not in teams.values()},
            policy=OneAtATime(),
            loadable=frozenset("xy"),
            preempting=self.preempting,
        )
        self.ledger = self.subject._queue._kernel = Ledger(self.subject._queue._kernel)
        self.grant_seats = self.subject._tickets.grant_seats
        self.subject._tickets.grant_seats = self.grant_seats_from_the_first_job
        self.assign = self.subject._nodes.assign
        self.subject._nodes.assign = self.assign_from_idle_seats

    def new_job(self, tenant: str, **options) -> Ticket:
        """Return a job of a tenant, in its team."""
        team = self.teams.get(tenant, "")
        ticket = job(tenant, team=team, team_weight=self.weights.get(team, 1.0), **options)
        self.order[ticket] = len(self.order)
        self.open.append(ticket)
        return ticket

    def submit_job(self, ticket: Ticket, **options) -> None:
        self.newcomer = ticket
        self.subject.submit(ticket, **options)
        self.newcomer = None

    def unit(self, tenant: str) -> str:
        """Return what has a part of the whole: the tenant's team, or the tenant."""
        return self.teams.get(tenant, tenant)

    def parts(self, tenants: Collection[str]) -> dict[str, float]:
        """Return which part of the whole is the share of each of these tenants, which are all there are."""
        weights = self.weights if self.fairness == "tokens" else {}
        whole = sum(weights.get(unit, 1.0) for unit in {self.unit(tenant) for tenant in tenants})
        parts = {}
        for tenant in tenants:
            unit = self.unit(tenant)
            members = sum(weights.get(other, 1.0) for other in tenants if self.unit(other) == unit)
            parts[tenant] = weights.get(unit, 1.0) / whole * weights.get(tenant, 1.0) / members
        return parts

    def tickets(self, *states: TicketState) -> list[Ticket]:
        """Return the tickets in one of these states, none of which is final."""
        self.open = [ticket for ticket in self.open if ticket.state is not TicketState.DONE]
        return [ticket for ticket in self.open if ticket.state in states]

    def grant_seats_from_the_first_job(self) -> None:
        self.ledger.tried.clear()
        self.grant_seats()

    def assign_from_idle_seats(self, ticket: Ticket) -> NodeState:
        self.fresh = self.fresh_seats()
        return self.assign(ticket)

    def fresh_seats(self) -> dict[NodeState, tuple[int, list[str]]]:
        """Return for each node how many seats are free, and who has just left some of them."""
        nodes = self.subject._nodes.values()
        return {node: (node.free, [_tenant_of(line) for line in node.fresh.values()]) for node in nodes}

    def is_kept(self, node: NodeState, ticket: Ticket, fresh: dict[NodeState, tuple[int, list[str]]]) -> bool:
        """Return whether the node's free seats are kept for other tenants than the job's."""
        free, left_by = fresh.get(node, (0, []))
        if not left_by:
            return False
        model, own = ticket.job.model, ticket.job.tenant
        nodes = [each for each in self.with_model(model) if each.id not in self.by_sequence]
        nodes = [each for each in nodes if self.seats[each.id]]
        held: Counter[str] = Counter()
        for other in self.tickets(TicketState.GRANTED):
            if other is not ticket and other.node in nodes:
                held[other.job.tenant] += self.held(other)
        waiting = {own} | {each.job.tenant for each in self.waiting_for(model)}
        left = {tenant for each in nodes for tenant in fresh[each][1]}
        seats = sum(self.seats[each.id] for each in nodes)
        shares = {
            tenant: seats * part for tenant, part in self.parts((+held).keys() | waiting | left).items()
        }
        kept = [tenant for tenant in left_by if held[tenant] < shares[tenant] - 1e-9]
        return bool(kept) and held[own] >= shares[own] - 1e-9 and 0 < free <= len(kept)

    def seats_of(self, job: JobSpec, node: NodeState) -> int:
        """Return how many seats the job takes there at once: one for each sequence, or all."""
        return 1 if node.id in self.by_sequence else min(job.sequences, self.seats[node.id])

    def held(self, ticket: Ticket) -> int:
        """Return how many seats the job holds."""
        is_running = ticket.state is TicketState.GRANTED
        return sum(self.runs.get(ticket, {}).values()) if is_running else 0

    def unbegun(self) -> list[Ticket]:
        """Return the jobs that run and have sequences which have not begun."""
        return [
            ticket
            for ticket in self.tickets(TicketState.GRANTED)
            if ticket.node.id in self.by_sequence and self.begun[ticket] < ticket.job.sequences
        ]

    def all_suspended(self) -> list[tuple[Ticket, int]]:
        """Return the suspended sequences."""
        return [
            (ticket, index)
            for ticket in self.tickets(TicketState.GRANTED)
            for index in sorted(self.suspended.get(ticket, ()))
        ]

    def running(self, model: str) -> list[tuple[Ticket, int]]:
        """Return the sequences of a model that run where they can be suspended, the oldest first."""
        return sorted(
            [
                (ticket, index)
                for ticket in self.tickets(TicketState.GRANTED)
                if ticket.job.model == model and ticket.node.id in self.by_sequence
                if ticket.node is self.subject._nodes.get(ticket.node.id)
                if not (ticket.node.leaving or ticket.node.draining)
                for index in self.runs[ticket]
            ],
            key=lambda run: run[0].runs[run[1]].number,
        )

    def waiting_for(self, model: str) -> list[Ticket]:
        """Return the jobs of a model with sequences that wait for seats."""
        begun = [*self.unbegun(), *(ticket for ticket, _ in self.all_suspended())]
        return [each for each in [*self.tickets(TicketState.QUEUED), *begun] if each.job.model == model]

    def shares(
        self, model: str, running: list[tuple[Ticket, int]], gaining: Collection[str] = ()
    ) -> tuple[Counter[str], dict[str, float]]:
        """Return how many seats each tenant holds, and the share of each that holds some, waits or gains."""
        held = Counter(ticket.job.tenant for ticket, _ in running)
        active = held.keys() | {ticket.job.tenant for ticket in self.waiting_for(model)} | set(gaining)
        seats = sum(
            self.seats.get(node.id, 0)
            for node in self.with_model(model)
            if node.id in self.by_sequence and not (node.leaving or node.draining)
        )
        return held, {tenant: seats * part for tenant, part in self.parts(active).items()}

    def may_pause(self, run: tuple[Ticket, int]) -> bool:
        return run in self.ripe and run[0].runs[run[1]].suspensions < 3

    def forgive(self) -> None:
        for model in {ticket.job.model for ticket, _ in self.pauses}:
            held, shares = self.shares(model, self.running(model))
            for ticket, index in list(self.pauses):
                tenant = ticket.job.tenant
                if ticket.job.model == model and held[tenant] <= shares.get(tenant, 0) + 1e-9:
                    del self.pauses[ticket, index]

    def room(self, node: NodeState) -> int:
        """Return how many of a node's seats are free, also if they are kept for a job."""
        return 0 if node.draining or node.leaving else self.room_for_own(node)

    def room_for_own(self, node: NodeState) -> int:
        """Return how many of a node's seats are free for the jobs that it has."""
        if node.id not in self.seats:
            return 0
        return self.seats[node.id] - sum(
            self.held(ticket) for ticket in self.tickets(TicketState.GRANTED) if ticket.node is node
        )

    def candidates(self, ticket: Ticket) -> set[NodeState]:
        """Return where the job may run now: not where it failed last, if there is another node."""
        taking = self.accepting(ticket.job) - self.unsuited.get(ticket, set())
        taking = taking - {self.failed_at.get(ticket)} or taking
        fresh = self.fresh_seats()
        return {
            node
            for node in taking
            if not (self.is_full_for(node, ticket) or self.is_kept(node, ticket, fresh))
        }

    def is_full_for(self, node: NodeState, ticket: Ticket) -> bool:
        full = self.full.get((node, ticket.job.model))
        return full is not None and full.refuses(ticket.job.tenant)

    def end_trial(self, ticket: Ticket) -> None:
        """Let another job try if this one has left its node without a result."""
        if ticket in self.trials:
            self.trials.remove(ticket)
            self.full[ticket.node, ticket.job.model].resume(None, ticket.job.tenant)

    def leave_node(self, ticket: Ticket) -> None:
        """Let one job try each model of the node that has named no time."""
        if ticket.state is not TicketState.GRANTED:
            return
        for (node, _), full in self.full.items():
            if node is ticket.node:
                full.resume(*[whose for whose, (_, is_named) in full.pauses.items() if not is_named])
        self.end_trial(ticket)

    def with_model(self, model: str) -> set[NodeState]:
        return {node for node in self.subject._nodes.values() if model in node.models}

    def accepting(self, job: JobSpec) -> set[NodeState]:
        """Return where the job could run.

        A remote server needs the request as its client wrote it, and may be closed to new jobs.
        """
        may_be_far = job.body_bytes is not None and self.seats.get("far") != 0
        return {node for node in self.with_model(job.model) if may_be_far or node.id != "far"}

    def swapped(self, node: NodeState) -> frozenset[str]:
        """Return the models that a swap loaded there."""
        return node.models if node.id.startswith("swap") else frozenset()

    def charge_final_cost(self, ticket: Ticket, cost: float) -> None:
        """Record, once, what a ticket that has ended has cost its tenant."""
        self.leave_node(ticket)
        if ticket in self.finished or not ticket.attempts:
            return
        self.finished.add(ticket)
        was_refused = ticket.state is TicketState.DONE
        self.costs[ticket.job.tenant] += min(cost, ticket.charged) if was_refused else cost

    # What must hold at each effect -------------------------------------------------------------------

    def check_grant(self, ticket: Ticket) -> None:
        assert ticket not in self.effects.refused
        assert 1 + self.returns[ticket] == ticket.attempts, "granted twice"
        assert ticket.has_begun or ticket not in self.expired, "granted after its deadline"
        assert ticket.node is not None
        assert ticket.job.model in ticket.node.models
        assert ticket.node.id in self.seats, "a seat on a node that is down"
        self.runs[ticket], self.begun[ticket] = {0: self.seats_of(ticket.job, ticket.node)}, 1
        self.suspended[ticket] = set()
        self.ripe -= {run for run in self.ripe if run[0] is ticket}
        for index in range(ticket.job.sequences):
            self.pauses.pop((ticket, index), None)
        is_exchange = self.check_exchange(ticket)
        assert ticket.seats == self.held(ticket), "not a seat for each sequence"
        assert ticket.node.busy <= self.seats[ticket.node.id], "a seat that was taken"
        self.overtakes.pop(ticket, None)
        if not is_exchange:
            self.check_turn(ticket)
        assert not self.is_full_for(ticket.node, ticket), "a node that has rejected jobs for the model"
        assert not self.is_kept(ticket.node, ticket, self.fresh), "a seat that is kept for other tenants"
        assert ticket.node not in self.unsuited.get(ticket, set()), "a node that has refused the job"
        assert not self.swapped(ticket.node) & self.leaving, "a model that is to be unloaded"
        assert ticket.node in self.accepting(ticket.job), "a job that the node cannot run"
        others = self.accepting(ticket.job) - {self.failed_at.get(ticket)} - self.unsuited.get(ticket, set())
        assert not others or ticket.node in others, "the node where it failed, although another is free"
        for other in self.tickets(TicketState.QUEUED):
            if self.failed_at.get(other) is ticket.node or ticket.node not in self.candidates(other):
                continue
            same_line = (ticket.job.tenant, ticket.job.priority, ticket.job.model) == (
                other.job.tenant,
                other.job.priority,
                other.job.model,
            )
            fewer = ticket.job.sequences < other.job.sequences  # it may overtake one that needs more seats
            assert not same_line or fewer or self.order[ticket] < self.order[other], "FIFO within a tenant"
            higher = other.job.priority < ticket.job.priority
            fits = self.seats_of(other.job, ticket.node) <= self.room(ticket.node) + self.held(ticket)
            assert is_exchange or not (higher and fits), "before a job of a higher class"
        full = self.full.get((ticket.node, ticket.job.model))
        if full is not None and full.grant(ticket.job.tenant):
            self.trials.add(ticket)

    def check_start(self, ticket: Ticket, index: int) -> None:
        node = ticket.node
        assert ticket.state is TicketState.GRANTED
        assert node is self.subject._nodes[node.id], "a sequence on a node that is down"
        assert node.id in self.by_sequence
        assert index == self.begun[ticket] < ticket.job.sequences, "not the next sequence"
        assert self.room_for_own(node) > 0, "a seat that was taken"
        self.begun[ticket] += 1
        self.runs[ticket][index] = 1
        if self.check_exchange(ticket) or node.draining or node.leaving:
            return
        self.check_turn(ticket)
        for other in self.tickets(TicketState.QUEUED):
            higher = other.job.priority < ticket.job.priority
            assert not (higher and node in self.candidates(other)), "before a job of a higher class"

    def check_suspension(self, ticket: Ticket, index: int) -> None:
        self.forgive()
        running = self.running(ticket.job.model)
        assert (ticket, index) in running, "it does not run"
        assert (ticket, index) in self.ripe, "it has not run for a quantum"
        self.pauses[ticket, index] += 1
        assert self.pauses[ticket, index] <= 3, "suspended more than three times"
        assert self.room_for_own(ticket.node) <= 0, "although a seat is free"
        self.exchange = ticket, index, running
        del self.runs[ticket][index]
        self.suspended[ticket].add(index)
        self.ripe.remove((ticket, index))

    def check_exchange(self, gaining: Ticket) -> bool:
        """Check who has lost a seat to this job, if anybody has just now."""
        if self.exchange is None:
            return False
        (victim, index, running), self.exchange = self.exchange, None
        model, job = victim.job.model, gaining.job
        assert job.model == model
        assert gaining.node is victim.node
        if job.priority in self.preempting and victim.job.priority > job.priority:
            below = [run for run in running if run[0].job.priority > job.priority and run in self.ripe]
            assert not any(
                run[0].job.priority > victim.job.priority and self.may_pause(run) for run in below
            ), "not of the lowest class"
            return True
        self.suspended[victim].remove(index)  # the shares before the exchange
        held, shares = self.shares(model, running, {job.tenant})
        above = {tenant: held[tenant] - shares[tenant] for tenant in held}
        self.suspended[victim].add(index)
        assert held[job.tenant] < shares[job.tenant], "for a tenant that has its share"
        assert above[victim.job.tenant] >= 1 - 1e-6, "from a tenant that is not above its share"
        assert victim.job.priority >= job.priority, "from a higher class"
        for run in running[running.index((victim, index)) + 1 :]:
            same = run[0].job.tenant == victim.job.tenant and run[0].job.priority == victim.job.priority
            assert not same or not self.may_pause(run), "not the newest"
        for run in running:
            is_further = above[run[0].job.tenant] > above[victim.job.tenant] + 1e-6
            is_possible = self.may_pause(run) and run[0].job.priority >= job.priority
            assert not is_further or not is_possible, "not of the tenant furthest above"
        return True

    def check_resumption(self, ticket: Ticket, index: int) -> None:
        node = ticket.node
        assert ticket.state is TicketState.GRANTED
        assert node is self.subject._nodes[node.id], "a sequence on a node that is down"
        assert self.room_for_own(node) > 0, "a seat that was taken"
        self.suspended[ticket].remove(index)  # it was suspended
        self.runs[ticket][index] = 1
        if self.check_exchange(ticket) or node.draining or node.leaving:
            return
        self.check_turn(ticket)

    def check_turn(self, granted: Ticket) -> None:
        """At most eight jobs overtake one that needs more seats; after that one node is kept for it.

        Only the first job of those that are alike is counted.
        """
        counted, node = set(), granted.node
        before = {ticket.handle: ticket for ticket in self.tickets(TicketState.QUEUED)}
        for handle in self.ledger.before:
            other = before.get(handle)
            if other is None or other.job.sequences == 1 or node not in self.accepting(other.job):
                continue
            overtakes = self.overtakes.setdefault(other, [0, 0])
            overtakes[1] += 1
            job = other.job
            alike = (job.model, job.sequences, job.body_bytes is None)
            if alike in counted or node not in self.candidates(other):
                continue
            counted.add(alike)
            given = 1 if node.id in self.by_sequence else self.held(granted)
            lacking = self.seats_of(job, node) - self.room(node) - given
            others = {
                near
                for near in self.candidates(other) - {node}
                if self.room(near) > 0 and self.seats_of(job, near) - self.room(near) <= lacking
            }
            assert overtakes[0] < BYPASS or others, "more than eight have overtaken a job"
            overtakes[0] += 1

    def check_refusal(self, ticket: Ticket, error: FairleadError) -> None:
        # A job that a node returned may find that its model no longer loads, or that no node is left which
        # could ever hold it.
        is_hopeless = isinstance(error, LoadFailed | InvalidRequest | NoOtherNode)
        assert not ticket.has_begun or is_hopeless, "refused after its first delta"
        if not isinstance(error, Displaced):
            return
        assert self.newcomer is not None
        assert ticket.attempts == 0, "a displaced job never ran"
        victim, newcomer = ticket.job, self.newcomer.job
        assert victim.priority >= newcomer.priority
        if victim.priority == newcomer.priority:
            # What jobs that run wait for counts, too, but is not displaced.
            begun = [*self.unbegun(), *(ticket for ticket, _ in self.all_suspended())]
            waiting = [other.job for other in [*self.tickets(TicketState.QUEUED), *begun]] + [victim]
            # Tenants of one team are compared within it, all others with their teams.
            is_inside = self.unit(victim.tenant) == self.unit(newcomer.tenant)
            names = [other.tenant if is_inside else self.unit(other.tenant) for other in waiting]
            loser, gainer = [
                each.tenant if is_inside else self.unit(each.tenant) for each in (victim, newcomer)
            ]
            of_class = [
                name for name, other in zip(names, waiting, strict=True) if other.priority == victim.priority
            ]
            assert of_class.count(loser) >= names.count(gainer) + 2

    def check_swap(self, model: str, evict: frozenset[str]) -> None:
        assert model not in self.loading
        for ticket in self.tickets(TicketState.GRANTED):
            holds = ticket.node is not None and self.swapped(ticket.node) & evict
            assert not holds or ticket.node.id not in self.seats, "evicted while it worked"
        self.loading.add(model)
        self.dying.discard(model)  # its last process may still run; the next one waits for its end
        for evicted in evict:
            assert evicted not in self.loading - {model}, "evicted while it was loaded"
            if self.seats.pop(f"swap {evicted}", None) is not None:
                self.dying.add(evicted)
                self.leaving.discard(evicted)
        assert self.dying <= evict, "more than one model has processes"
        spare = [request for request in self.loads if request.model == model and request.only_if_free]
        waits = any(ticket.job.model == model for ticket in self.tickets(TicketState.QUEUED))
        assert waits or not spare or not evict, "evicted for a request that may evict nothing"

    def check_stop(self, model: str) -> None:
        """A model is stopped only if it is to be unloaded, and only without running jobs."""
        assert model in self.leaving | {None}, "stopped without a request"
        self.leaving.discard(model)
        self.dying.add(model)
        for ticket in self.tickets(TicketState.GRANTED):
            assert ticket.node is None or model not in self.swapped(ticket.node), "stopped while it worked"
        if model in self.loading:
            self.loading.remove(model)
        self.seats.pop(f"swap {model}", None)

    def check_load_end(self, request: LoadRequest, error: FairleadError | None) -> None:
        """A load request ends once, and without an error only if its model is loaded."""
        if request in self.loads:
            self.loads.remove(request)
        assert error is not None or f"swap {request.model}" in self.seats

    # Events ------------------------------------------------------------------------------------------

    @rule(model=st.sampled_from("xy"), only_if_free=st.booleans())
    def request_load(self, model, only_if_free) -> None:
        if all(request.model != model for request in self.loads):
            self.loads.append(request := LoadRequest(model, only_if_free=only_if_free))
            self.subject.request_load(request)

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def starve_of_loading(self, data) -> None:
        self.subject.load_starved(data.draw(st.sampled_from(self.loads)))

    @rule(model=st.sampled_from("xy"))
    def unload(self, model) -> None:
        if f"swap {model}" in self.seats or model in self.loading:
            self.leaving.add(model)
        self.subject.unload(model)

    @precondition(lambda self: self.dying)
    @rule(data=st.data())
    def remove_node(self, data) -> None:
        model = data.draw(st.sampled_from(sorted(self.dying)))
        self.dying.remove(model)
        self.subject.stopped(frozenset({model}))

    def idle(self) -> list[NodeState]:
        """Return the nodes that were reported as idle, and that are still up and idle."""
        nodes = self.subject._nodes
        reported = dict.fromkeys(node_id for node_id, _ in self.effects.idle_nodes)
        return [nodes[node_id] for node_id in reported if node_id in nodes and not nodes[node_id].jobs]

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), used=st.booleans())
    def expire(self, data, used) -> None:
        nodes, node = self.subject._nodes, data.draw(st.sampled_from(self.idle()))
        if used and node.used:
            self.subject.expired(node.id, node.used - 1)  # it has had a job since
            assert nodes[node.id] is node
        else:
            (model,) = node.models
            self.leaving.add(model)
            self.subject.expired(node.id, node.used)
            assert nodes.get(node.id) is not node

    @rule(
        tenant=st.sampled_from("ABC"),
        model=st.sampled_from("mmmnxy"),
        priority=st.sampled_from([1, 1, 1, 0, 2]),
        prompt=st.sampled_from([1, 9, 9, 50]),
        stream=st.booleans(),
        no_queue=st.sampled_from([False, False, False, True]),
        cost=st.sampled_from([1.0, 10.0]),
        relay=st.sampled_from([None, RELAY]),
        too_long=st.sampled_from([None, None, None, QueueFull("too long")]),
        n=st.sampled_from([1, 1, 1, 2, 3, 9]),
    )
    def submit(self, tenant, model, priority, prompt, stream, no_queue, cost, relay, too_long, n) -> None:
        ticket = self.new_job(
            tenant,
            model=model,
            priority=priority,
            prompt=prompt,
            stream=stream,
            no_queue=no_queue,
            cost=cost,
            relay=relay,
            n=n,
        )
        refused = set(self.effects.refused)
        self.submit_job(ticket, too_long=too_long)
        assert ticket.state is not TicketState.NEW
        if too_long is not None:
            assert ticket.state is not TicketState.QUEUED
            assert set(self.effects.refused) <= refused | {ticket}, "displaced by a job that was then refused"

    @precondition(lambda self: any(job.job.sequences > 1 for job in self.tickets(TicketState.QUEUED)))
    @rule(tenants=st.lists(st.sampled_from("ABC"), min_size=1, max_size=12))
    def serve_small_jobs(self, tenants) -> None:
        """Let jobs of one seat come and go, one after another, while a job waits that needs more."""
        for tenant in tenants:
            self.submit_job(self.new_job(tenant, relay=RELAY))
            running = self.tickets(TicketState.GRANTED)
            small = [each for each in running if each.seats == 1 and each.node in self.with_model("m")]
            if small:
                self.charge_final_cost(small[0], 1.0)
                self.subject.finished(small[0], cost=1.0)
            self.counts_agree()
            self.no_job_waits_for_free_seats_that_it_could_have()

    @precondition(lambda self: self.order)
    @rule(data=st.data(), cost=st.floats(0, 30))
    def leave_or_finish(self, data, cost) -> None:
        ticket = data.draw(st.sampled_from(list(self.order)))
        if data.draw(st.booleans()):
            cost = ticket.charged if ticket.has_begun else 0.0
            self.charge_final_cost(ticket, cost)
            self.subject.leave(ticket)
        else:
            self.charge_final_cost(ticket, cost)
            self.subject.finished(ticket, cost=cost)
        assert ticket.state is TicketState.DONE

    @precondition(lambda self: self.running("m") or self.running("x"))
    @rule(data=st.data(), most=st.integers(1, 4))
    def ripen(self, data, most) -> None:
        """Let the oldest sequences of a model have run for a quantum, once."""
        model = data.draw(st.sampled_from([model for model in "mx" if self.running(model)]))
        for ticket, index in self.running(model)[:most]:
            if index in self.runs[ticket] and ticket.state is TicketState.GRANTED:
                self.ripe.add((ticket, index))
                self.subject.ripened(ticket, index)

    @precondition(lambda self: self.effects.freed)
    @rule(data=st.data())
    def rest(self, data) -> None:
        """Let a quantum pass after seats were freed."""
        freed = data.draw(st.sampled_from(self.effects.freed))
        self.effects.freed.remove(freed)
        node = self.subject._nodes.get(freed[0])
        fresh = dict(node.fresh) if node else {}
        self.subject.seats_rested(*freed)
        for number, line in node.fresh.items() if node else ():
            assert number > freed[1], "a seat that has been idle for a quantum"
            assert fresh.get(number, line) == line

    @precondition(lambda self: self.held_by_jobs())
    @rule(data=st.data())
    def end_sequence(self, data) -> None:
        self.end_one(*data.draw(st.sampled_from(self.held_by_jobs())))

    def held_by_jobs(self) -> list[tuple[Ticket, int]]:
        """Return all sequences that run or are suspended."""
        granted = self.tickets(TicketState.GRANTED)
        return [(ticket, index) for ticket in granted for index in self.runs[ticket]] + self.all_suspended()

    def end_one(self, ticket: Ticket, index: int) -> None:
        self.runs[ticket].pop(index, None)
        self.suspended[ticket].discard(index)
        self.ripe.discard((ticket, index))
        self.subject.sequence_ended(ticket, index)
        self.subject.sequence_ended(ticket, index)  # again, which changes nothing

    @precondition(lambda self: self.tickets(TicketState.GRANTED))
    @rule(data=st.data(), cost=st.floats(0, 30))
    def start_response(self, data, cost) -> None:
        ticket = data.draw(st.sampled_from(self.tickets(TicketState.GRANTED)))
        if ticket in self.trials:
            self.trials.remove(ticket)
            self.full[ticket.node, ticket.job.model].succeed(ticket.job.tenant)
        self.subject.first_delta(ticket)
        self.subject.charge(ticket, cost)

    @precondition(lambda self: self.tickets(TicketState.GRANTED))
    @rule(
        data=st.data(),
        cause=st.sampled_from(["full", "full", "failed", "unsuited"]),
        named_s=st.sampled_from([None, 30.0]),
    )
    def return_to_queue(self, data, cause, named_s) -> None:
        self.return_job(data.draw(st.sampled_from(self.tickets(TicketState.GRANTED))), cause, named_s)

    def return_job(self, ticket: Ticket, cause: str, named_s: float | None = None) -> None:
        self.order[ticket] = -len(self.order) - self.returns.total()
        self.returns[ticket] += 1
        if cause == "full":
            self.trials.discard(ticket)
            self.failed_at.pop(ticket, None)
            full = self.full.setdefault((ticket.node, ticket.job.model), Full())
            full.reject(ticket.job.tenant, is_named=named_s is not None)
            self.subject.rejected_by_node(ticket, named_s)
        elif cause == "failed":
            self.end_trial(ticket)
            self.failed_at[ticket] = ticket.node
            self.subject.requeued(ticket)
        else:
            self.end_trial(ticket)
            self.unsuited.setdefault(ticket, set()).add(ticket.node)
            self.subject.unsuited(ticket)
        may_wait = ticket.has_begun or not (ticket in self.expired or ticket.job.no_queue)
        is_hopeless = isinstance(self.effects.refused.get(ticket), NoOtherNode)
        assert not is_hopeless or self.accepting(ticket.job) <= self.unsuited[ticket]
        assert not may_wait or is_hopeless or ticket not in self.effects.refused
        assert may_wait or ticket.state is not TicketState.QUEUED

    @precondition(lambda self: self.full)
    @rule(data=st.data())
    def end_pause(self, data) -> None:
        node, model = data.draw(st.sampled_from(list(self.full)))
        full = self.full[node, model]
        whose = data.draw(st.sampled_from([None, *"ABC"]))
        if self.subject._nodes.get(node.id) is node:
            if full.pauses.get(whose, (False, False))[0]:
                del full.pauses[whose]  # nobody has tried
                if whose is None:
                    full.rejected.clear()
            else:
                full.resume(whose)
            self.subject.resume(PausedModel(node.id, model, whose))

    @precondition(lambda self: self.tickets(TicketState.GRANTED, TicketState.QUEUED))
    @rule(data=st.data())
    def pass_deadline(self, data) -> None:
        ticket = data.draw(st.sampled_from(self.tickets(TicketState.GRANTED, TicketState.QUEUED)))
        waits, stopped = ticket.state is TicketState.QUEUED, len(self.effects.stopped)
        self.expired.add(ticket)
        self.subject.deadline(ticket, QueueTimeout("late"))
        assert (waits and not ticket.has_begun) == (ticket in self.effects.refused)
        if not waits:
            stops = ticket.job.stream and not ticket.has_begun
            assert stopped + stops == len(self.effects.stopped)

    @precondition(lambda self: self.tickets(TicketState.QUEUED))
    @rule(data=st.data())
    def starve(self, data) -> None:
        self.subject.starved(data.draw(st.sampled_from(self.tickets(TicketState.QUEUED))))

    @precondition(lambda self: len(self.order) >= LATE)
    @rule()
    def drain(self) -> None:
        self.subject.drain()
        assert self.loads == []
        assert all(ticket.attempts for ticket in self.tickets(TicketState.QUEUED))

    @rule(name=st.sampled_from(["one", "two", "far"]), seats=st.integers(1, 4))
    def node_up(self, name, seats) -> None:
        self.seats[name] = seats
        self.subject.node_up(*self.nodes[name], self.limits(name, seats))

    @rule(name=st.sampled_from(["one", "two", "far"]))
    def node_down(self, name) -> None:
        self.seats.pop(name, None)
        self.subject.node_down(name)

    @precondition(lambda self: self.seats)
    @rule(data=st.data(), seats=st.integers(0, 4))
    def change_seats(self, data, seats) -> None:
        name = data.draw(st.sampled_from(sorted(self.seats)))
        if not self.seats[name] and seats:
            state = self.subject._nodes[name]
            self.full = {key: full for key, full in self.full.items() if key[0] is not state}
        seats = self.seats[name] = seats if name == "far" else max(seats, 1)  # 0: closed
        node = self.nodes.get(name) or FakeNode(name, name[-1])
        self.subject.seats_changed(*node, self.limits(name, seats))

    def limits(self, name: str, seats: int) -> NodeLimits:
        if name == "far":
            return remote_limits(seats)
        return (engine_limits if name in self.by_sequence else limits)(seats, longest=20)

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), loads=st.sampled_from([True, True, False]))
    def swap_ends(self, data, loads) -> None:
        model = data.draw(st.sampled_from(sorted(self.loading)))
        self.loading.remove(model)
        node = FakeNode(f"swap {model}", model)
        if loads:
            self.seats[node.id] = 1
            self.subject.node_up(*node, self.limits(node.id, 1))
        else:
            self.subject.load_failed(node.models, LoadFailed("no such file"))

    # What must hold between events -------------------------------------------------------------------

    @invariant()
    def counts_agree(self) -> None:
        statistics = self.subject.statistics()
        assert len(self.tickets(TicketState.QUEUED)) == statistics.waiting
        assert sum(self.seats.values()) == statistics.seats
        holders = dict.fromkeys(self.subject._nodes.values(), (0, 0))
        for ticket in self.tickets(TicketState.GRANTED):
            if ticket.node in holders:
                jobs, seats = holders[ticket.node]
                holders[ticket.node] = jobs + 1, seats + self.held(ticket)
        assert holders == {node: (node.jobs, node.busy) for node in holders}
        paused = {(node, model) for node in holders for model, full in node.full.items() if full}
        assert {key for key, full in self.full.items() if full.pauses and key[0] in holders} == paused
        for node, model in paused:
            refused = [tenant for tenant in "ABC" if node.full[model].refuses(tenant)]
            assert refused == [tenant for tenant in "ABC" if self.full[node, model].refuses(tenant)]
        assert sum(jobs for jobs, _ in holders.values()) == statistics.running
        assert statistics.waiting <= self.capacity + self.returns.total()
        assert set(self.tickets(TicketState.QUEUED)) == set(self.subject._queue)
        begun = [*self.unbegun(), *(ticket for ticket, _ in self.all_suspended())]
        assert Counter(begun) == Counter(self.subject._queue.begun())
        assert len(self.subject._queue) + len(begun) == len(self.subject._queue._kernel)
        assert Counter(self.effects.paused) >= Counter(self.all_suspended())
        assert self.exchange is None, "a seat that nobody has got"
        reported = Counter(self.effects.freed)
        for node in holders:
            assert len(node.fresh) <= max(0, node.room)
            assert not node.fresh or node.id not in self.by_sequence
            assert not node.fresh or max(node.fresh) <= max(n for at, n in reported if at == node.id)
        for model in {*self.subject._queue.waiting, "m"}:
            waiting = Counter((each.job.line, each.job.priority) for each in self.waiting_for(model))
            assert waiting == self.subject._queue.waiting.get(model, Counter())
        self.forgive()

    @invariant()
    def no_job_waits_for_free_seats_that_it_could_have(self) -> None:
        waiting = self.tickets(TicketState.QUEUED)
        kept = {node for node in self.subject._nodes.values() if node.is_held}
        for ticket in waiting:
            for node in self.candidates(ticket) - kept:
                assert self.room(node) <= 0 or self.seats_of(ticket.job, node) > self.room(node)
        # Each of these nodes is kept for another job, which would be there already if it were before others.
        passed = [ticket for ticket in waiting if ticket.overtaken >= BYPASS]
        assert len(kept) <= len(passed)
        for node in kept:
            assert any(
                node in self.candidates(ticket) and self.seats_of(ticket.job, node) > self.room(node) > 0
                for ticket in passed
            )

    @invariant()
    def no_tenant_waits_below_its_share_while_another_is_above(self) -> None:
        for model in "mx":
            running = self.running(model)
            held, shares = self.shares(model, running)
            for ticket in self.waiting_for(model):
                for run in filter(self.may_pause, running):
                    victim, job = run[0].job, ticket.job
                    own = ticket.node is None or ticket.node is run[0].node
                    if not own or (ticket.node is None and run[0].node not in self.candidates(ticket)):
                        continue
                    if model in run[0].node.closed_models or self.room_for_own(run[0].node):
                        continue  # with fewer seats than before, a seat that is given back is not free
                    is_above = held[victim.tenant] - 1 >= shares[victim.tenant]
                    is_below = held[job.tenant] < shares[job.tenant] - 1e-9
                    is_fair = is_above and is_below and victim.priority >= job.priority
                    preempts = job.priority in self.preempting and victim.priority > job.priority
                    assert not is_fair, "a tenant waits below its share"
                    assert not preempts, "a job waits that preempts"

    @invariant()
    def no_sequence_waits_for_a_free_seat_of_its_node(self) -> None:
        for ticket in [*self.unbegun(), *(ticket for ticket, _ in self.all_suspended())]:
            node = ticket.node
            if self.subject._nodes.get(node.id) is node and ticket.job.model not in node.closed_models:
                assert self.room_for_own(node) <= 0

    @invariant()
    def no_job_waits_that_every_node_has_refused(self) -> None:
        for ticket in self.tickets(TicketState.QUEUED):
            refusing = self.unsuited.get(ticket)
            if refusing and self.accepting(ticket.job) <= refusing:
                model = ticket.job.model
                assert model in "xy", "it waits for a local node"
                assert f"swap {model}" not in self.seats or model in self.leaving

    @invariant()
    def jobs_that_overtake_are_counted(self) -> None:
        for ticket in self.tickets(TicketState.QUEUED):
            least, most = self.overtakes.get(ticket, (0, 0))
            assert least <= ticket.overtaken <= most

    @invariant()
    def node_makes_room_only_while_a_job_starves(self) -> None:
        if any(node.draining for node in self.subject._nodes.values()):
            waiting = self.tickets(TicketState.QUEUED)
            assert any(request.starved for request in self.loads) or any(ticket.starved for ticket in waiting)

    @invariant()
    def requested_swap_starts_when_no_job_runs(self) -> None:
        swapped = {name for name in self.seats if name.startswith("swap")}
        working = any(node.jobs for name, node in self.subject._nodes.items() if name in swapped)
        waiting = {
            ticket.job.model
            for ticket in self.tickets(TicketState.QUEUED)
            if ticket.job.model in "xy" and self.accepting(ticket.job) <= self.unsuited.get(ticket, set())
        }
        if waiting and not working:
            assert self.loading or self.leaving

    @invariant()
    def load_request_ends_when_its_model_is_loaded(self) -> None:
        for request in self.loads:
            assert f"swap {request.model}" not in self.seats or request.model in self.leaving

    @invariant()
    def ticket_ends_once(self) -> None:
        assert len(self.effects.granted) == sum(ticket.attempts for ticket in self.order)
        for ticket in self.effects.refused:
            assert ticket.state is TicketState.DONE

    def every_sequence_ends(self) -> None:
        """Let what runs end: what is suspended or left gets its turn, unless its node is down or full."""
        for _ in range(500):
            self.no_sequence_waits_for_a_free_seat_of_its_node()
            waiting = {
                ticket.node
                for ticket in [*self.unbegun(), *(ticket for ticket, _ in self.all_suspended())]
                if self.subject._nodes.get(ticket.node.id) is ticket.node
                if ticket.job.model not in ticket.node.closed_models
            }
            running = [run for run in self.held_by_jobs() if run[1] in self.runs[run[0]]]
            ending = [run for run in running if run[0].node in waiting]
            if not waiting:
                return
            assert ending, "a sequence waits for ever"
            self.end_one(*ending[0])
        raise AssertionError("a sequence waits for ever")

    def teardown(self) -> None:
        self.every_sequence_ends()
        for ticket in self.order:
            self.charge_final_cost(ticket, ticket.charged if ticket.has_begun else 0.0)
            self.subject.leave(ticket)
        for tenant, charged in self.ledger.charged.items():
            name = tenant[1] if isinstance(tenant, tuple) else tenant
            assert pytest.approx(self.costs[name] / self.weights.get(name, 1.0), abs=1e-6) == charged
        for team, charged in self.ledger.charged_to_teams.items():
            cost = sum(cost for tenant, cost in self.costs.items() if self.teams.get(tenant) == team)
            assert pytest.approx(cost / self.weights.get(team, 1.0), abs=1e-6) == charged
        statistics = self.subject.statistics()
        assert (statistics.waiting, statistics.running) == (0, 0)
        assert not self.subject._queue
        swaps = self.subject._swaps
        assert swaps._starved == {request.model: 1 for request in self.loads if request.starved}
        assert swaps._requested == {request.model: 1 for request in self.loads}
        assert not swaps._local_only
        assert len(self.subject._queue._kernel) == 0
        assert all(node.jobs == node.busy == node.tokens == 0 for node in self.subject._nodes.values())


class TokensMachine(SchedulerMachine):
    fairness = "tokens"


TEAMS = ({}, {"A": "red", "B": "red"}, {"A": "red", "B": "red", "C": "blue"})
WEIGHTS = ({}, {"A": 2.0, "red": 3.0}, {"C": 2.0, "D": 0.5, "blue": 2.0})


class SequenceMachine(SchedulerMachine):
    """Many sequences of few tenants at one engine: turns, teams, suspensions, failures and cancels."""

    @initialize(
        seats=st.integers(1, 6),
        other=st.booleans(),
        teams=st.sampled_from(TEAMS),
        weights=st.sampled_from(WEIGHTS),
    )
    def begin(self, seats, other, teams, weights) -> None:
        self.set_up(teams, weights)
        self.node_up("one", seats)
        if other:
            self.node_up("two", 2)

    @rule(
        tenant=st.sampled_from("AAABCD"),
        sequences=st.lists(st.sampled_from([1, 1, 2, 3, 9]), min_size=1, max_size=4),
        priority=st.sampled_from([1, 1, 1, 1, 0, 2]),
        cost=st.sampled_from([1.0, 10.0]),
    )
    def submit(self, tenant, sequences, priority, cost) -> None:
        for n in sequences:
            self.submit_job(self.new_job(tenant, priority=priority, cost=cost, n=n))

    @precondition(lambda self: self.held_by_jobs())
    @rule(ends=st.lists(st.integers(0, 20), min_size=1, max_size=6))
    def serve(self, ends) -> None:
        """Let a quantum pass, and some sequences end, several times."""
        for number in ends:
            self.ripen_all()
            running = self.held_by_jobs()
            if running:
                self.end_one(*running[number % len(running)])

    @rule()
    def ripen_all(self) -> None:
        for ticket, index in self.running("m"):
            if ticket.state is TicketState.GRANTED and index in self.runs[ticket]:
                self.ripe.add((ticket, index))
                self.subject.ripened(ticket, index)

    @rule(seats=st.integers(1, 6), restarts=st.sampled_from([False, False, False, True]))
    def node_changes(self, seats, restarts) -> None:
        if restarts:
            self.node_up("one", seats)
        elif "one" in self.seats:
            self.seats["one"] = seats
            self.subject.seats_changed(*self.nodes["one"], self.limits("one", seats))

    @precondition(lambda self: "one" in self.seats)
    @rule(seats=st.integers(0, 6))
    def fail(self, seats) -> None:
        """Let the engine fail with all that it runs, and perhaps restart with so many seats."""
        self.fail_engine(seats)

    def fail_engine(self, seats: int) -> None:
        failed = self.subject._nodes["one"]
        self.seats.pop("one")
        self.subject.node_down("one")
        for ticket in self.tickets(TicketState.GRANTED):
            if ticket.node is failed:
                self.return_job(ticket, "failed")
                assert not (self.held(ticket) and ticket.node is failed), "a seat of a node that is down"
        if seats:
            self.seats["one"] = seats
            self.subject.node_up(*self.nodes["one"], self.limits("one", seats))

    # What concerns models that swaps load, and remote servers.
    request_load = starve_of_loading = unload = remove_node = expire = serve_small_jobs = None  # type: ignore[assignment]
    swap_ends = starve = change_seats = end_pause = None  # type: ignore[assignment]

    def teardown(self) -> None:
        self.every_job_gets_a_seat()
        super().teardown()

    def every_job_gets_a_seat(self) -> None:
        """Let what runs end, and nothing else arrive: each job that a node could run gets its seats."""
        waits = 1 + sum(ticket.job.sequences for ticket in self.order)
        for _ in range(waits):
            running = [run for run in self.held_by_jobs() if run[1] in self.runs[run[0]]]
            if not any(self.candidates(ticket) for ticket in self.tickets(TicketState.QUEUED)):
                return
            assert running, "a job waits for ever"
            ticket, index = running[0]
            self.end_one(ticket, index)
            if not (self.runs[ticket] or self.suspended[ticket] or self.begun[ticket] < ticket.job.sequences):
                self.charge_final_cost(ticket, 1.0)
                self.subject.finished(ticket, cost=1.0)
        raise AssertionError("a job waits for ever")


class TokensSequenceMachine(SequenceMachine):
    fairness = "tokens"


def _tenant_of(line: str) -> str:
    return line.rsplit("\0", 1)[-1]
