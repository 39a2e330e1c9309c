"""One look at the queue for the job that leaves next, while jobs wait that take several seats. Pure.

The queue tries its jobs in fair order. A job that needs more seats than are free on any of its nodes is
passed over, and the queue begins again without all jobs of its kind, which do not fit either. Once eight jobs
have overtaken it, the free seats of one node are kept for it: jobs before it may still take them, jobs behind
it may not.

Example: 8 seats, 5 of them taken; tenant A's job needs 8, and tenant B has 20 jobs of one seat.
B's jobs take the 3 free seats and 5 that become free. Then all seats that become free are kept until A's job
has 8, and after it B's other jobs follow.
"""

from fairlead.router.dispatch.node_groups import JobKind
from fairlead.router.dispatch.node_pool import NodePool
from fairlead.router.dispatch.ticket import Ticket

# As often as the kernel lets a job be passed that lacks cache memory.
BYPASS = 8


class SeatSearch:
    """One look at the queue. `kinds` has a bit for each kind of job that may still fit.

    `passed`: the jobs that were passed over, the first of each kind.
    """

    def __init__(self, nodes: NodePool, kinds: int) -> None:
        self.kinds = kinds
        self.passed: dict[Ticket, None] = {}
        self._nodes = nodes
        self._short: set[JobKind] = set()  # kinds that need more seats than are free

    def fits(self, ticket: Ticket) -> bool | None:
        """Return what `NodePool.fits` does. Raise `LacksSeats` for the first of a kind that lacks seats."""
        if ticket.job.seats == 1 or ticket.node is not None:
            return self._nodes.fits(ticket)
        if ticket in self.passed or self._nodes.kind(ticket.job) in self._short:
            return None
        fits = self._nodes.fits(ticket)
        if fits is None and self._nodes.has_free(ticket):
            raise LacksSeats(ticket)
        return fits

    def pass_over(self, ticket: Ticket) -> None:
        """Try only other jobs from now on; keep seats for this one if enough have overtaken it."""
        nodes = self._nodes
        self.passed[ticket] = None
        if not nodes.avoided(ticket):  # otherwise another job of its kind may fit where this one failed
            kind = nodes.kind(ticket.job)
            self._short.add(kind)
            if not kind.shares_number:
                self.kinds &= ~(1 << kind.number)
        if ticket.overtaken >= BYPASS:
            nodes.hold_back(ticket)
            self.kinds &= nodes.kinds_with_free_seat()

    def count(self, granted: Ticket) -> None:
        """Count that a job has been granted seats for which the jobs that were passed over wait."""
        for ticket in self.passed:
            ticket.overtaken += self._nodes.waits_for_node_of(ticket, granted)


class LacksSeats(Exception):
    """A job needs more seats than are free on any node that it waits for."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
