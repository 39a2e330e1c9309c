"""Random schedules in which time passes: each sequence that runs gets one token a tick, and costs it.

So service can be compared between tenants. `SequenceMachine` checks what must hold at each event; this adds
what must hold over time, for teams and for the tenants inside each:

- Under token fairness, the counters of two that wait differ by no more than `Bounds.counters`, whatever was
  suspended, has failed or was cancelled meanwhile. The tokens that they get by weight, while both wait,
  differ by no more than `Bounds.service` (theorem 4.8 of VTC). Whoever starves would fall behind further.
- Under round robin, nobody waits for longer than `Bounds.wait_ticks` without a seat.
- Every sequence that was suspended goes on, and ends.
"""

from collections import Counter
from collections.abc import Collection
from itertools import combinations
from typing import ClassVar, NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from fairlead.router.dispatch.ticket import Ticket, TicketState
from router.dispatch.scheduler_machine import TEAMS, WEIGHTS, SchedulerMachine, SequenceMachine

SEATS = 3
LENGTH = 6  # tokens of a sequence, at most
SEQUENCES = 3  # of a job
ESTIMATE = 3.0  # of a sequence
REFUNDS = SEATS * SEQUENCES * ESTIMATE
QUANTUM = 2  # ticks
BACKLOG = 2  # jobs of a tenant that keeps on sending
TENANTS = "ABCD"


class Bounds(NamedTuple):
    """How far apart two that wait may be.

    A counter that was the lowest when its owner had its last turn has risen since by one estimate, and by the
    tokens of what runs. The other may have fallen by the refunds of its jobs that have begun, of which there
    are as many as seats. What is charged may come as much later.
    """

    lightest: float
    tenants: int

    @property
    def counters(self) -> float:
        return (ESTIMATE + SEATS * LENGTH + REFUNDS) / self.lightest

    @property
    def service(self) -> float:
        return 2 * self.counters + 2 * REFUNDS / self.lightest

    @property
    def wait_ticks(self) -> int:
        """Each turn takes a sequence's length at most; each tenant and team may have two before."""
        return LENGTH * 2 * self.tenants * self.tenants


class ScheduleMachine(SequenceMachine):
    """Tenants that keep on sending jobs to one engine, for hundreds of ticks.

    lengths: the tokens of each sequence.
    tokens: those that each has got at its node.
    ages: the ticks since each began or went on.
    best: the tokens that each job has got at one of its nodes; only those beyond are charged.
    leads: by how much the first of a pair has got more than the second since both wait.
    waits: for how many ticks each tenant or team has waited without a seat.
    spread: of all schedules: the largest difference that was found, by level, for a weight of 1.
    seen: of all schedules: how often things have happened.
    longest_wait: of all schedules: in ticks.
    """

    capacity = 200
    spread: ClassVar[Counter[str]] = Counter()
    seen: ClassVar[Counter[str]] = Counter()
    longest_wait = 0

    def __init__(self) -> None:
        super().__init__()
        self.lengths: dict[Ticket, list[int]] = {}
        self.tokens: Counter[tuple[Ticket, int]] = Counter()
        self.ages: Counter[tuple[Ticket, int]] = Counter()
        self.best: Counter[Ticket] = Counter()
        self.leads: dict[tuple[str, str], float] = {}
        self.waits: Counter[str] = Counter()
        self.one_class = True

    @initialize(
        seats=st.integers(1, SEATS),
        teams=st.sampled_from(TEAMS),
        weights=st.sampled_from(WEIGHTS),
        one_class=st.sampled_from([True, True, False]),
        always=st.sampled_from(["", "AC", "AB", TENANTS, TENANTS]),
    )
    def begin(self, seats, teams, weights, one_class, always) -> None:
        self.set_up(teams, weights)
        self.one_class, self.always = one_class, always
        self.bounds = Bounds(min([1.0, *weights.values()]), len(TENANTS))
        SchedulerMachine.node_up(self, "one", seats)

    @rule(
        tenant=st.sampled_from(TENANTS),
        lengths=st.lists(st.integers(1, LENGTH), min_size=1, max_size=SEQUENCES),
        estimate=st.sampled_from([0.0, 1.0, ESTIMATE]),
        priority=st.sampled_from([1, 1, 0, 2]),
        count=st.integers(1, 4),
    )
    def submit(self, tenant, lengths, estimate, priority, count) -> None:
        for _ in range(count):
            self.send(tenant, lengths, estimate, 1 if self.one_class else priority)

    def send(self, tenant: str, lengths: list[int], estimate: float, priority: int = 1) -> None:
        ticket = self.new_job(tenant, n=len(lengths), cost=estimate * len(lengths), priority=priority)
        self.lengths[ticket] = lengths
        self.submit_job(ticket)

    @rule(
        ticks=st.integers(1, 40),
        busy=st.sets(st.sampled_from(TENANTS), max_size=len(TENANTS)),
        lengths=st.lists(st.integers(1, LENGTH), min_size=1, max_size=SEQUENCES),
        estimate=st.sampled_from([0.0, 1.0, ESTIMATE]),
    )
    def run_for(self, ticks, busy, lengths, estimate) -> None:
        """Let time pass. The busy tenants always have jobs that wait, each of other lengths."""
        for _ in range(ticks):
            for shift, tenant in enumerate(sorted(busy | set(self.always))):
                while sum(each.job.tenant == tenant for each in self.tickets(TicketState.QUEUED)) < BACKLOG:
                    self.send(tenant, [(length + shift) % LENGTH + 1 for length in lengths], estimate)
            self.check_time(self.tick())

    def tick(self) -> Counter[str]:
        """Return what each tenant has got."""
        self.seen["ticks"] += 1
        got: Counter[str] = Counter()
        for ticket in self.tickets(TicketState.GRANTED):
            running = list(self.runs[ticket])
            for index in running:
                self.tokens[ticket, index] += 1
                self.ages[ticket, index] += 1
            if running:
                self.subject.first_delta(ticket)
                self.subject.charge(ticket, cost := self.cost(ticket))
                got[ticket.job.tenant] += max(0.0, cost - self.best[ticket])
                self.best[ticket] = max(self.best[ticket], cost)
        for run in self.running("m"):
            ticket, index = run
            if ticket.state is not TicketState.GRANTED or index not in self.runs[ticket]:
                continue  # suspended by what has happened in this tick
            if self.tokens[run] >= self.lengths[ticket][index]:
                self.seen["ended"] += 1
                self.end_one(*run)
                self.finish_if_done(ticket)
            elif self.ages[run] >= QUANTUM:
                self.ripe.add(run)
                self.subject.ripened(*run)
        return got

    def cost(self, ticket: Ticket) -> float:
        return float(sum(self.tokens[ticket, index] for index in range(ticket.job.sequences)))

    def finish_if_done(self, ticket: Ticket) -> None:
        if self.begun[ticket] == ticket.job.sequences and not (self.runs[ticket] or self.suspended[ticket]):
            self.charge_final_cost(ticket, cost := self.cost(ticket))
            self.subject.finished(ticket, cost=cost)

    @rule(data=st.data())
    @precondition(lambda self: self.tickets(TicketState.QUEUED, TicketState.GRANTED))
    def cancel(self, data) -> None:
        ticket = data.draw(st.sampled_from(self.tickets(TicketState.QUEUED, TicketState.GRANTED)))
        self.seen["cancelled"] += 1
        self.seen["cancelled while suspended"] += bool(self.suspended.get(ticket))
        self.charge_final_cost(ticket, ticket.charged if ticket.has_begun else 0.0)
        self.subject.leave(ticket)

    @precondition(lambda self: "one" in self.seats)
    @rule(seats=st.integers(0, SEATS))
    def fail(self, seats) -> None:
        self.seen["failures"] += 1
        self.seen["suspended at a failure"] += len(self.all_suspended())
        self.fail_engine(seats)

    @rule(seats=st.integers(1, SEATS))
    def node_changes(self, seats) -> None:
        if "one" not in self.seats:
            SchedulerMachine.node_up(self, "one", seats)
        self.seats["one"] = seats
        self.subject.seats_changed(*self.nodes["one"], self.limits("one", seats))

    # What takes no time, or ends sequences that have tokens to come.
    serve = ripen_all = ripen = end_sequence = leave_or_finish = start_response = None  # type: ignore[assignment]
    return_to_queue = pass_deadline = drain = node_up = node_down = rest = None  # type: ignore[assignment]

    # Effects

    def check_grant(self, ticket: Ticket) -> None:
        super().check_grant(ticket)
        for index in range(ticket.job.sequences):
            self.tokens.pop((ticket, index), None)
        self.ages[ticket, 0] = 0

    def check_start(self, ticket: Ticket, index: int) -> None:
        super().check_start(ticket, index)
        self.ages[ticket, index] = 0

    def check_resumption(self, ticket: Ticket, index: int) -> None:
        super().check_resumption(ticket, index)
        self.seen["resumed"] += 1
        self.ages[ticket, index] = 0

    # What must hold over time

    def check_time(self, got: Counter[str]) -> None:
        if not self.one_class or "one" not in self.seats:
            self.waits.clear()
            self.leads.clear()
            return
        waiting = {ticket.job.tenant for ticket in self.waiting_for("m")}
        units = {self.unit(tenant) for tenant in waiting}
        if self.fairness == "tokens":
            self.check_service("teams", units, self.by_unit(got))
            for unit in sorted(units):
                inside = {tenant for tenant in waiting if self.unit(tenant) == unit}
                self.check_service("tenants of a team", inside, got)
            self.leads = {pair: lead for pair, lead in self.leads.items() if {*pair} <= waiting | units}
        served = {ticket.job.tenant for ticket, _ in self.running("m")}
        hungry = (waiting | units) - served - {self.unit(tenant) for tenant in served}
        self.waits = Counter({name: self.waits[name] + 1 for name in hungry})
        longest = max(self.waits.values(), default=0)
        type(self).longest_wait = max(self.longest_wait, longest)
        if self.fairness == "roundRobin":
            assert longest <= self.bounds.wait_ticks, "somebody starves"

    def by_unit(self, got: Counter[str]) -> Counter[str]:
        of_units: Counter[str] = Counter()
        for tenant, tokens in got.items():
            of_units[self.unit(tenant)] += tokens
        return of_units

    def check_service(self, level: str, names: Collection[str], got: Counter[str]) -> None:
        for first, second in combinations(sorted(names), 2):
            apart = abs(self.counter(first) - self.counter(second))
            assert apart <= self.bounds.counters, f"counters of {level} are too far apart"
            lead = self.leads.get((first, second), 0.0)
            lead += got[first] / self.weight(first) - got[second] / self.weight(second)
            self.leads[first, second] = lead
            assert abs(lead) <= self.bounds.service, f"what {level} get is too far apart"
            for what, difference in (("counters", apart), ("service", abs(lead))):
                key = f"{level}, {what}"
                self.spread[key] = max(self.spread[key], difference * self.bounds.lightest)

    def weight(self, name: str) -> float:
        return self.weights.get(name, 1.0)

    def counter(self, name: str) -> float:
        kernel = self.ledger
        if name in self.teams.values():
            return kernel.team_counter(name)
        team = self.teams.get(name)
        return kernel.counter((team, name) if team else name)


class TokensScheduleMachine(ScheduleMachine):
    fairness = "tokens"
