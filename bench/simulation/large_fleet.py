"""The real dispatcher and scheduler with hundreds of nodes, in virtual time.

Measures how long grants take, and how they are divided among tenants and classes.
Seats, clients and faults are simulated; the dispatcher, its timer, its estimates and its scheduler are the
server's. The number of waiting jobs is kept constant: a job arrives for each that leaves the queue.
"""

import itertools
import time
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import trio
from msgspec.structs import replace

from fairlead.base.config import QueueConfig
from fairlead.base.errors import FairleadError
from fairlead.base.grant import Grant
from fairlead.nodes.limits import NodeLimits
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.dispatch.job_spec import JobSpec
from fairlead.router.dispatch.node_state import NodeState
from fairlead.router.dispatch.ticket import Ticket, TicketState
from fairlead.router.dispatch.wait_survey import WaitSurvey
from fairlead.router.dispatch.waiter import SeatLoss, Waiter
from simulation.clock import Clock

SEATS = 8
MEAN_SERVICE_S = 0.48  # with 300 nodes, 5,000 jobs a second
TENANTS = 3000
SKEW = 1.1  # the share of the n-th largest tenant is proportional to n ** -SKEW
# For each model: its share of the jobs, and n, where every n-th node has the model.
EVERYWHERE = "everywhere"
MODELS = {
    EVERYWHERE: (0.6, 1),
    "half": (0.18, 2),
    "third": (0.1, 3),
    "rare": (0.02, 30),
    "scarce": (0.1, 100),
}
NORMAL = 1
PRIORITIES = (0, 1, 1, 1, 1, 1, 1, 1, 1, 2)
PROMPTS = 40_000  # shared beginnings of prompts; a third of the jobs have one of them
CANCELLED = 0.02  # of the jobs, while they wait
REJECTED = 0.001  # of the grants, by a node that is full after all
DEATH_EVERY_S = 0.5
DOWN_S = 3.0
REPORT_EVERY_S = 1.0
CHECK_EVERY = 500  # grants
TICK_S = 0.05


def is_common(spec: JobSpec) -> bool:
    """Return whether every node can run the job, and its class is the normal one."""
    return spec.model == EVERYWHERE and spec.priority == NORMAL


class SimulationClock(trio.abc.Clock):
    """Trio's clock, which shows the time of a simulation."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def start_clock(self) -> None:
        """See `trio.abc.Clock`."""

    def current_time(self) -> float:
        """See `trio.abc.Clock`."""
        return self._clock.now_s

    def deadline_to_sleep_time(self, _deadline: float) -> float:
        """See `trio.abc.Clock`; nothing ever waits for the time to pass."""
        return 0.0


class SimulatedJob(Waiter):
    """A job. It adds itself to a list of its fleet when it is granted, refused or stopped."""

    __slots__ = ("attempt", "began_at", "fleet", "service_s", "tokens")

    def __init__(self, fleet: "LargeFleet", ticket: Ticket, service_s: float, tokens: int) -> None:
        super().__init__(ticket)
        self.fleet = fleet
        self.service_s = service_s
        self.tokens = tokens
        self.began_at: float | None = None
        self.attempt = 0

    def generated(self) -> int:
        """See `Waiter`."""
        if self.began_at is None:
            return 0
        return min(self.tokens, int(self.tokens * (self.fleet.clock.now_s - self.began_at) / self.service_s))

    def granted(self) -> None:
        """See `Waiter`."""
        self.fleet.started.append(self)

    def started(self, _index: int, _grant: Grant) -> None:
        """See `Waiter`."""

    def paused(self, _index: int, *, is_paused: bool) -> None:
        """See `Waiter`."""

    def refused(self, _error: FairleadError) -> None:
        """See `Waiter`."""
        self.fleet.ended.append(self)

    def stopped(self, _error: FairleadError) -> None:
        """See `Waiter`."""
        self.fleet.ended.append(self)


class LargeFleet:
    """A fleet of `nodes` under load, with `waiting` jobs in the queue.

    `spent_s`: the seconds of each call of the dispatcher, by kind, without its surveys (`WaitSurvey`), which
    are in `surveys_s`. `counts`: what has happened. `turns`: the first grants of jobs of the normal class, by
    tenant.
    `backlogged`: the tenants that always had a waiting job of this class that every node can run.
    """

    def __init__(self, queue: QueueConfig, *, nodes: int, waiting: int, seed: int = 1) -> None:
        self.clock = Clock()
        self.started: list[SimulatedJob] = []
        self.ended: list[SimulatedJob] = []
        self.spent_s: defaultdict[str, list[float]] = defaultdict(list)
        self.counts: Counter[str] = Counter()
        self.turns: Counter[str] = Counter()
        self.longest_wait_s = [0.0] * len(queue.classes)
        self.seat_seconds = 0.0
        self.idle_seconds = 0.0
        self.surveys_s: list[float] = []
        self._random = Random(seed)
        self._target = waiting
        self._numbers = itertools.count()
        self._waiting: dict[SimulatedJob, None] = {}
        self._waiting_of: Counter[str] = Counter()
        self.backlogged: dict[str, int] = {}
        self._running: dict[SimulatedJob, None] = {}
        self._weights = list(itertools.accumulate((n + 1) ** -SKEW for n in range(TENANTS)))
        self._models = list(itertools.accumulate(share for share, _ in MODELS.values()))
        self._names = list(MODELS)
        self._models_of = {
            f"node-{number}": frozenset(name for name, (_, every) in MODELS.items() if number % every == 0)
            for number in range(nodes)
        }
        self._queue = queue
        self._dispatcher = Dispatcher(queue, random=Random(seed))
        self._make_survey = self._dispatcher.estimator.new_survey
        self._dispatcher.estimator.new_survey = self._survey  # type: ignore[method-assign]

    async def run(self, warm_up: int, grants: int) -> None:
        """Run until `warm_up` jobs were granted; then reset the counts, and run until `grants` more were."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._dispatcher.run)
            for name in self._models_of:
                self._node_up(name)
                self.clock.after(self._random.random() * REPORT_EVERY_S, partial(self._report, name))
            self._refill()
            self.clock.every(DEATH_EVERY_S, self._kill_a_node)
            await self._run_until(warm_up)
            for counted in (self.counts, self.turns, self.spent_s):
                counted.clear()
            self.surveys_s.clear()
            self.longest_wait_s = [0.0] * len(self.longest_wait_s)
            self.seat_seconds = self.idle_seconds = 0.0
            self.backlogged = {tenant: count for tenant, count in self._waiting_of.items() if count}
            await self._run_until(grants)
            nursery.cancel_scope.cancel()

    async def _run_until(self, grants: int) -> None:
        while self.counts["granted"] < grants:
            self.clock.run(self.clock.now_s + TICK_S)
            before = time.perf_counter()
            await trio.lowlevel.checkpoint()  # the timer's alarms: deadlines, charges
            await trio.lowlevel.checkpoint()
            self.spent_s["timer"].append(time.perf_counter() - before)
            self._settle()
            states = self._dispatcher.scheduler.nodes()
            self.seat_seconds += TICK_S * sum(node.limits.seats for node in states)
            self.idle_seconds += TICK_S * sum(max(0, node.free) for node in states)

    def _timed(self, kind: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        surveys = len(self.surveys_s)
        before = time.perf_counter()
        call(*arguments, **options)
        spent_s = time.perf_counter() - before
        self.spent_s[kind].append(spent_s - sum(self.surveys_s[surveys:]))
        self.counts[kind] += 1
        self._settle()

    def _survey(self) -> WaitSurvey:
        before = time.perf_counter()
        survey = self._make_survey()
        for model in MODELS:
            survey.waits(model)
        self.surveys_s.append(time.perf_counter() - before)
        return survey

    # Jobs --------------------------------------------------------------------------------------------

    def _refill(self) -> None:
        while len(self._waiting) < self._target:
            random, number = self._random, next(self._numbers)
            tenant = f"tenant-{bisect(self._weights, random.random() * self._weights[-1])}"
            model = self._names[bisect(self._models, random.random() * self._models[-1])]
            prompt, tokens = random.randint(50, 2000), random.randint(10, 400)
            begins = random.randrange(PROMPTS) if random.random() < 1 / 3 else -number
            of_tenant = hash((begins, tenant))  # tenants share no prefixes
            spec = JobSpec(
                request_id=f"request-{number}",
                tenant=tenant,
                model=model,
                priority=random.choice(PRIORITIES),
                stream=True,
                prompt_tokens=prompt,
                longest_prompt=prompt,
                prompt_cache_tokens=prompt,
                max_tokens=1000,
                prefixes=(of_tenant, of_tenant + 1)[: (prompt >= 64) + (prompt >= 256)],
                body_bytes=4 * prompt,
            )
            service_s = 2 * MEAN_SERVICE_S * (0.1 * prompt / 1025 + 0.9 * tokens / 205) / 2
            self._submit(spec, service_s, tokens)

    def _submit(self, spec: JobSpec, service_s: float, tokens: int) -> None:
        tickets: list[Ticket] = []
        self._timed("ticket", lambda: tickets.append(self._dispatcher.new_ticket(spec)))
        job = SimulatedJob(self, tickets[0], service_s, tokens)
        self._waiting[job] = None
        self._waiting_of[spec.tenant] += is_common(spec)
        self._timed("submit", self._dispatcher.submit, job)
        if self._random.random() < CANCELLED:
            delay_s = self._random.random() * self._target * MEAN_SERVICE_S / SEATS / len(self._models_of)
            self.clock.after(delay_s, partial(self._cancel, job))

    def _cancel(self, job: SimulatedJob) -> None:
        if job in self._waiting:
            self.counts["cancelled"] += 1
            self._end(job)
            self._refill()

    def _settle(self) -> None:
        """Start and end jobs as the dispatcher has decided."""
        while self.started or self.ended:
            started, self.started = self.started, []
            for job in started:
                self._start(job)
            ended, self.ended = self.ended, []
            for job in ended:
                self.counts["refused"] += 1
                self._end(job)

    def _start(self, job: SimulatedJob) -> None:
        spec, now_s = job.ticket.job, self.clock.now_s
        self._leave_queue(job)
        self._running[job] = None
        self.counts["granted"] += 1
        if job.ticket.attempts == 1:
            self.turns[spec.tenant] += spec.priority == NORMAL
            wait_s = now_s - job.arrived_at
            self.longest_wait_s[spec.priority] = max(self.longest_wait_s[spec.priority], wait_s)
        if self.counts["granted"] % CHECK_EVERY == 0:
            self.clock.after(0.0, self._check)
        job.attempt += 1
        if self._random.random() < REJECTED:
            self.clock.after(0.001, partial(self._reject, job, job.attempt))
            return
        self.clock.after(0.1 * job.service_s, partial(self._begin, job, job.attempt))
        self.clock.after(job.service_s, partial(self._finish, job, job.attempt))

    def _begin(self, job: SimulatedJob, attempt: int) -> None:
        if job in self._running and job.attempt == attempt:
            job.began_at = self.clock.now_s
            self._timed("begin", self._dispatcher.scheduler.first_delta, job.ticket)

    def _finish(self, job: SimulatedJob, attempt: int) -> None:
        if job in self._running and job.attempt == attempt:
            self.counts["finished"] += 1
            self._end(job)
            self._refill()

    def _reject(self, job: SimulatedJob, attempt: int) -> None:
        if job in self._running and job.attempt == attempt:
            self.counts["rejected"] += 1
            self._requeue(job, is_full=True)

    def _requeue(self, job: SimulatedJob, *, is_full: bool) -> None:
        del self._running[job]
        self._waiting[job] = None
        self._waiting_of[job.ticket.job.tenant] += is_common(job.ticket.job)
        self._timed("requeue", self._dispatcher.requeue, job, SeatLoss("full" if is_full else "failed"))

    def _end(self, job: SimulatedJob) -> None:
        if job in self._running:
            del self._running[job]
        else:
            self._leave_queue(job)
        self._timed("end", self._dispatcher.end, job)

    def _leave_queue(self, job: SimulatedJob) -> None:
        tenant = job.ticket.job.tenant
        del self._waiting[job]
        self._waiting_of[tenant] -= is_common(job.ticket.job)
        if not self._waiting_of[tenant]:
            self.backlogged.pop(tenant, None)

    # Nodes -------------------------------------------------------------------------------------------

    def _limits(self, load: float) -> NodeLimits:
        return NodeLimits(
            seats=SEATS,
            max_model_len=8192,
            load=load,
            evictable=False,
            needs_relay=True,
        )

    def _node_up(self, name: str) -> None:
        self._timed(
            "node", self._dispatcher.scheduler.node_up, name, self._models_of[name], self._limits(0.0)
        )

    def _report(self, name: str) -> None:
        """Report a node's load, as the probes of remote nodes do."""
        state = next((node for node in self._dispatcher.scheduler.nodes() if node.id == name), None)
        if state is not None:
            limits = replace(state.limits, load=round(state.busy / SEATS, 2))
            self._timed("report", self._dispatcher.scheduler.seats_changed, name, state.models, limits)
        self.clock.after(REPORT_EVERY_S, partial(self._report, name))

    def _kill_a_node(self) -> None:
        up = [node.id for node in self._dispatcher.scheduler.nodes()]
        name = self._random.choice(up)
        jobs = [job for job in self._running if job.ticket.node is not None and job.ticket.node.id == name]
        self._timed("node", self._dispatcher.scheduler.node_down, name)
        self.counts["died"] += 1
        for job in jobs:  # a job that has begun fails over only if it can be repeated
            if job.began_at is None or self._random.random() < 0.5:
                self.counts["failed over"] += 1
                self._requeue(job, is_full=False)
            else:
                self.counts["failed"] += 1
                self._end(job)
        self._refill()
        self.clock.after(DOWN_S, partial(self._node_up, name))

    # Invariants --------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Assert that no job waits that fits a free seat, and that all counts agree."""
        states = dict.fromkeys(self._dispatcher.scheduler.nodes(), 0)
        for job in self._running:
            if job.ticket.node in states:
                states[job.ticket.node] += 1
        assert states == {node: node.busy for node in states}
        assert all(node.busy <= SEATS for node in states)
        statistics = self._dispatcher.scheduler.statistics()
        assert (statistics.waiting, statistics.running) == (len(self._waiting), sum(states.values()))
        free = [node for node in states if node.free > 0]
        models = frozenset(itertools.chain.from_iterable(node.models for node in free))
        for job in self._waiting if free else ():
            assert job.ticket.state is TicketState.QUEUED
            if job.ticket.job.model in models:
                assert not self._could_run(job, free, list(states)), "a job waits that fits a free seat"
        self.counts["checks"] += 1

    def _could_run(self, job: SimulatedJob, free: list[NodeState], states: list[NodeState]) -> bool:
        accepting = [node for node in states if job.ticket.job.model in node.models]
        others = [node for node in accepting if node is not job.ticket.failed_at] or accepting
        return any(node in free for node in others)

    def conclude(self) -> None:
        """Assert that every grant has an end, or its job still runs."""
        counts = self.counts
        ended = sum(counts[what] for what in ("finished", "failed", "failed over", "rejected"))
        assert abs(counts["granted"] - ended) <= SEATS * len(self._models_of)
        self._check()
