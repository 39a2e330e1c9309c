"""The waits of a large queue, as of one moment: many estimates share one look at all jobs. Pure.

An exact estimate takes time in proportion to the jobs that wait and run. With thousands of them, an estimate
for each arrival would take longer than all other work of the scheduler, so surveys are made from time to
time.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from fairlead.router.dispatch.awaited_seats import AwaitedSeats
from fairlead.router.dispatch.job_spec import JobSpec, line_of
from fairlead.router.dispatch.ticket import Ticket

# Of a longer queue, only the lengths of so many jobs are predicted; each stands for those around it.
SAMPLED_JOBS = 1024


class Newcomer(NamedTuple):
    """How many jobs leave before a tenant's next one, and before the one after that."""

    first: int
    second: int


class QueueOrder(NamedTuple):
    """All waiting jobs, in the order in which they leave.

    `newcomers` are by line (`JobSpec.line`) and class; the line is None for tenants of which no job of the
    class waits, and that of a team for such members.
    """

    tickets: Sequence[Ticket]
    newcomers: dict[tuple[str | None, int], Newcomer]


class SeatWaits:
    """The wait until a seat is free, by the work that is ahead. `remaining_s`: of the jobs in the seats.

    The work is spread over the seats as if it could be divided; the n-th job has a seat at the latest when
    the n-th running job ends.
    """

    def __init__(self, remaining_s: Sequence[float], seats: int) -> None:
        self.seats = max(seats, 1)
        self.seats_free = max(self.seats - len(remaining_s), 0)
        # After a node went down, more jobs may run than there are seats: the first ones to end free no seat.
        self._free_after_s = [0.0] * self.seats_free + sorted(remaining_s)[-self.seats :]
        self._sums = list(accumulate(self._free_after_s, initial=0.0))
        # How much work fits before the next seat is free.
        self._room_s = [index * end - self._sums[index] for index, end in enumerate(self._free_after_s)]

    def least_s(self, ahead: int) -> float:
        """Return when the seat is free that is left to a job behind `ahead` others."""
        return self._free_after_s[min(ahead, self.seats - 1)]

    def work_s(self, ahead: int, service_s: float) -> float:
        """Return when a seat is free behind `ahead` jobs, which need a seat for `service_s` together."""
        seats = bisect_right(self._room_s, service_s)
        level_s = (service_s + self._sums[seats]) / seats
        if ahead < self.seats:
            return min(level_s, self._free_after_s[ahead])
        # Jobs cannot be divided: when the first seat is free, the others will be for half a job on average.
        return max(level_s - service_s / ahead / 2, self._free_after_s[0])


class SurveyedJob(NamedTuple):
    """What is known of a waiting job: how many seats it takes, and for how long it probably holds them."""

    model: str
    seats: int
    service_s: float


class SurveyedSeat(NamedTuple):
    """A seat of a running job: its node, how long the job has run, and how much longer it probably will."""

    node_id: str
    running_s: float
    remaining_s: float


class ModelWaits:
    """What a job for one model waits for, by its place in the queue as a whole.

    awaited: the seats that free up for it.
    taken: the seats that are taken now.
    waiting: jobs in the order in which they leave.
    step: each of these jobs stands for so many.
    """

    def __init__(
        self,
        awaited: AwaitedSeats,
        taken: Sequence[SurveyedSeat],
        waiting: Sequence[SurveyedJob],
        step: int,
    ) -> None:
        self.awaited = awaited
        own = [seat for seat in taken if awaited.include(seat.node_id)]
        self.running_s = [seat.running_s for seat in own]  # the longest first
        self.seats = SeatWaits([seat.remaining_s for seat in own], awaited.seats)
        self._step = step
        competing = {model: step * awaited.are_awaited_by(model) for model in {job.model for job in waiting}}
        each = [competing[job.model] * (1 if job.seats == 1 else awaited.of(job.seats)) for job in waiting]
        services_s = [job.service_s for job in waiting]
        self._counts = list(accumulate(each, initial=0))
        self._services_s = list(accumulate(map(mul, each, services_s), initial=0.0))
        # By rounds of the seats: the longest wait before, and the longest 90 % bound.
        self.longest_before: list[tuple[float, float]] = []

    def place(self, index: int) -> int:
        """Return the number of the sampled job with about `index` jobs of the queue before it."""
        return min(index // self._step, len(self._counts) - 1)

    def ahead_of(self, index: int) -> tuple[int, float]:
        """Return how many seats the first `index` jobs of the queue take, and their time in seats in all."""
        at = self.place(index)
        return self._counts[at], self._services_s[at]

    def index_of(self, ahead: int) -> int:
        """Return a place in the queue with so many seats competed for before it, or its end."""
        return self._step * min(bisect_right(self._counts, ahead), len(self._counts) - 1)


class WaitSurvey:
    """A survey of all waiting jobs, from which any of their waits is read in constant time.

    made_at: when it was made.
    order: the order in which jobs leave.
    running: how many jobs ran then.
    waits_for: makes the `ModelWaits` of a model, at most once for each.

    `arrivals` and `grants` count the jobs that were queued and granted since. After 5 grants, the job
    that was 17th waits as long as the 12th did in the survey.
    """

    def __init__(
        self, made_at: float, order: QueueOrder, running: int, waits_for: Callable[[str], ModelWaits]
    ) -> None:
        self.made_at = made_at
        self.waiting = len(order.tickets)
        self.size = self.waiting + running
        self.arrivals = 0
        self.grants = 0
        self._order = order
        self._waits_for = waits_for
        self._waits: dict[str, ModelWaits] = {}
        self._queued: dict[tuple[str, int], int] = {}
        self._index_of: dict[Ticket, int] | None = None

    def granted(self) -> None:
        """Record that a job has left the queue."""
        self.grants += 1

    def queued(self, job: JobSpec) -> None:
        """Record that a job has been queued."""
        pair = job.line, job.priority
        self._queued[pair] = self._queued.get(pair, 0) + 1
        self.arrivals += 1

    def waits(self, model: str) -> ModelWaits:
        """Return what a job for the model waits for."""
        if model not in self._waits:
            self._waits[model] = self._waits_for(model)
        return self._waits[model]

    def index_of_newcomer(self, tenant: str, priority: int, team: str = "") -> int:
        """Return about how many jobs would leave before the next one of the tenant, in its team.

        As many jobs arrive as leave, so the survey's answer stays true, except that the tenant itself may
        have queued jobs since.
        """
        newcomers, line = self._order.newcomers, line_of(tenant, team)
        lines = (line, line_of("", team)) if team else (line,)
        known = (newcomers.get((each, priority)) for each in lines)
        newcomer = next(filter(None, known), newcomers[None, priority])
        more = self._queued.get((line, priority), 0)
        return newcomer.first + more * (newcomer.second - newcomer.first)

    def index_of(self, ticket: Ticket) -> int:
        """Return about how many jobs leave before one that waits."""
        if self._index_of is None:
            self._index_of = {waiting: index for index, waiting in enumerate(self._order.tickets)}
        index = self._index_of.get(ticket)
        if index is None:  # queued since
            job = ticket.job
            index = self.index_of_newcomer(job.tenant, job.priority, job.team)
        return max(0, index - self.grants)


def sampled(tickets: Sequence[Ticket]) -> tuple[Sequence[Ticket], int]:
    """Return at most `SAMPLED_JOBS` of the tickets, evenly, and how many each stands for."""
    step = -(-len(tickets) // SAMPLED_JOBS) or 1
    return tickets[::step], step
