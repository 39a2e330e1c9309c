"""Which node a job goes to. Pure: counts in, a choice out; knows no queue and no socket."""

from collections.abc import Iterable
from random import Random

from fairlead.nodes.node import Node, NodeLimits


class Place:
    """A node that is up, and how many of its seats are taken. A node that comes back is a new place.

    `busy` is our own count of the jobs we sent there, never a report: a report is old when it arrives.
    """

    __slots__ = ("busy", "limits", "node")

    def __init__(self, node: Node, limits: NodeLimits) -> None:
        self.node = node
        self.limits = limits
        self.busy = 0

    @property
    def free(self) -> int:
        """Seats that nobody has."""
        return self.limits.seats - self.busy


def choose(places: Iterable[Place], random: Random) -> Place | None:
    """Return the least busy place with a free seat, idle ones first; ties at random; None if all are taken.

    With one kind of node the spec's score, 0.3·load + 0.7·busy/seats, orders as busy/seats alone does; an
    idle node scores 0 and so comes first.
    """
    free = [place for place in places if place.free > 0]
    if not free:
        return None
    least = min(place.busy / place.limits.seats for place in free)
    return random.choice([place for place in free if place.busy / place.limits.seats == least])
