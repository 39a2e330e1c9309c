"""Which sequence has to pause, so that a job that waits gets its seat. Pure.

The decision list, for each model with jobs that wait:

1. A job of a class that preempts takes the seat of the newest sequence of the lowest class below its own.
2. A job whose tenant holds fewer seats than its share takes the seat of the newest sequence of the tenant
   that is furthest above its own share. A tenant is above if it has its share without that seat, too. So one
   seat is never taken away, and a tenant that loses one never falls below its share.

A sequence is suspended only after a quantum, and at most three times until its tenant is within its share.
Its class is not higher than that of the job, unless jobs of that class hold less than `min_share` of the
seats.

The share of a tenant is its part by weight of the model's seats, among those that hold seats or wait. Tenants
of a team divide its part.
Example: 8 seats, all A's; B sends two jobs: the shares are 4 and 4, and B gets two of A's seats. C sends one
job: the shares are 2⅔, and C gets another of A's. A goes on with 5, and gets more when B and C have finished.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from fairlead.router.dispatch.node_pool import NodePool
from fairlead.router.dispatch.queue import Queue
from fairlead.router.dispatch.ticket import Run, Ticket

MOST_SUSPENSIONS = 3


class SeatExchange(NamedTuple):
    """A sequence that may be suspended, and whether a job may have its seat."""

    victim: Run
    may_have: Callable[[Ticket], bool]


class Suspension:
    """Finds exchanges.

    queue: what waits.
    nodes: what runs.
    preempting: the indexes of the classes that preempt.
    """

    def __init__(self, queue: Queue, nodes: NodePool, *, preempting: Collection[int] = ()) -> None:
        self._queue = queue
        self._nodes = nodes
        self._preempting = sorted(preempting)

    def exchanges(self) -> Iterator[SeatExchange]:
        """Yield what may be exchanged, the best first. The first one that succeeds ends the search."""
        for model, waiting in list(self._queue.waiting.items()):
            nodes = self._nodes.suspending(model)
            runs = [run for node in nodes for run in node.runs]
            if any(run.is_ripe for run in runs):
                runs.sort(key=lambda run: -run.number)
                shares = _Shares(self._queue, model, runs, seats=sum(node.limits.seats for node in nodes))
                shares.forgive(self._queue.suspended())
                # Where a seat is free, what waits must not have it: its node has rejected it as full.
                taken = {node for node in nodes if node.room <= 0 and model not in node.closed_models}
                victims = [run for run in runs if run.ticket.node in taken and _may_pause(run)]
                yield from self._for_classes(model, waiting, victims)
                yield from shares.exchanges(victims)

    def _for_classes(
        self, model: str, waiting: Counter[tuple[str, int]], victims: list[Run]
    ) -> Iterator[SeatExchange]:
        for preempting in self._preempting:
            if any(priority == preempting for _, priority in waiting):
                below = [run for run in victims if run.ticket.job.priority > preempting]
                # The newest of the lowest class: the newest comes first, and `max` takes the first.
                victim = max(below, key=lambda run: run.ticket.job.priority, default=None)
                if victim is not None:
                    yield SeatExchange(victim, _is_of(model, preempting))


class _Shares:
    """The seats that each line holds of a model, and its share of them. `runs` has the newest first."""

    def __init__(self, queue: Queue, model: str, runs: list[Run], *, seats: int) -> None:
        self._model = model
        self._runs = runs
        self._seats = seats
        self._least = queue.min_share * seats  # of each class that waits
        self._held = Counter(run.ticket.job.line for run in runs)
        self._of_class = Counter(run.ticket.job.priority for run in runs)
        self._parts = queue.parts(model, self._held)  # of the others only that they hold none is needed
        waiting = queue.lines(model)
        holding = [line for line in self._held if line in waiting]
        self._is_anybody_below = len(waiting) > len(holding) or any(
            self._held[line] < self.share(line) for line in holding
        )

    def share(self, line: str) -> float:
        """Return the seats that are the share of a line which holds some."""
        return self._seats * self._parts[line]

    def forgive(self, suspended: Collection[Run]) -> None:
        """Count no suspensions of the sequences of a tenant that is within its share."""
        for run in (*self._runs, *suspended):
            job = run.ticket.job
            if run.suspensions and job.model == self._model:
                held = self._held[job.line]
                if not held or held <= self.share(job.line):
                    run.suspensions = 0

    def exchanges(self, victims: Collection[Run]) -> Iterator[SeatExchange]:
        above = {
            line: held - self.share(line)
            for line, held in self._held.items()
            if held - 1 >= self.share(line) - 1e-9
        }
        if not above or not self._is_anybody_below:
            return
        of_line: defaultdict[str, list[Run]] = defaultdict(list)
        for run in victims:
            if run.ticket.job.line in above:
                of_line[run.ticket.job.line].append(run)
        for line in sorted(of_line, key=lambda line: -above[line]):
            tried = set()
            for run in of_line[line]:
                priority = run.ticket.job.priority
                if priority not in tried:  # older ones of the same class are for the same jobs
                    tried.add(priority)
                    yield SeatExchange(run, self._is_below(priority))

    def _is_below(self, victim_priority: int) -> Callable[[Ticket], bool]:
        def may_have(ticket: Ticket) -> bool:
            job = ticket.job
            held = self._held[job.line]
            if job.model != self._model or (held and held >= self.share(job.line)):
                return False
            return job.priority <= victim_priority or self._of_class[job.priority] + 1 <= self._least

        return may_have


def _may_pause(run: Run) -> bool:
    # A portion of texts to embed takes about one step: it is over before it could pause.
    return run.is_ripe and run.suspensions < MOST_SUSPENSIONS and not run.ticket.job.is_embedding


def _is_of(model: str, priority: int) -> Callable[[Ticket], bool]:
    return lambda ticket: ticket.job.model == model and ticket.job.priority == priority
