"""Nodes that can run the same jobs, in the order in which they get them. Pure.

So a grant looks at the few nodes that come first, however many there are.
"""

from bisect import bisect_left, insort
from collections.abc import Callable

from fairlead.router.dispatch.job_spec import JobSpec
from fairlead.router.dispatch.node_state import NodeState, Score

# The queue filters by a 64-bit mask. Kinds that share a bit are checked in Python.
KINDS = 64
# The last bits are for jobs that take several seats, so that many numbers of sequences crowd out no others.
WIDE_KINDS = 16
WIDE = (1 << KINDS) - (1 << KINDS - WIDE_KINDS)


class JobKind:
    """Jobs that the same nodes can run, those of `groups`, and that take equally many `seats`.

    `open`: the groups in which the model is not full. `job` is one of the jobs. `shares_number`: other kinds
    have the same number.
    """

    __slots__ = ("groups", "job", "number", "open", "seats", "shares_number")

    def __init__(self, job: JobSpec, number: int) -> None:
        self.job = job
        self.seats = job.seats
        self.number = number
        self.shares_number = False
        self.groups: dict[NodeGroup, None] = {}
        self.open: dict[NodeGroup, None] = {}


class NodeGroup:
    """Nodes that can run the same jobs. Those with a free seat are kept by their score.

    `free` are these nodes. `closed` are the models that are full on all of its nodes, and `kinds` has a bit
    for each kind of job that they can run now. `limits_cache`: not
    every node with a free seat has cache for every job. Scores are computed when nodes are compared: on a
    busy fleet few are.
    """

    __slots__ = (
        "_by_score",
        "_score_of",
        "_scores",
        "_unsorted",
        "closed",
        "evictable",
        "free",
        "kinds",
        "limits_cache",
        "models",
        "nodes",
    )

    def __init__(self, models: frozenset[str], closed: frozenset[str], *, evictable: bool) -> None:
        self.models = models
        self.closed = closed
        self.evictable = evictable
        self.kinds = 0
        self.limits_cache = False
        self.nodes: dict[NodeState, None] = {}
        self.free: dict[NodeState, None] = {}
        self._unsorted: dict[NodeState, None] = {}
        self._scores: list[Score] = []  # in order
        self._by_score: dict[Score, dict[NodeState, None]] = {}
        self._score_of: dict[NodeState, Score] = {}

    def accepts(self, job: JobSpec) -> bool:
        """Return whether the nodes can run such a job at all."""
        return next(iter(self.nodes)).accepts(job)

    def has_seats(self, seats: int) -> bool:
        """Return whether a node has free seats for a job that takes so many, or all of its own."""
        if seats == 1:
            return bool(self.free)
        return any(node.free >= node.seats_for(seats) for node in self.free)

    def update(self, node: NodeState) -> None:
        """Record that the node has another score, or that it has no free seat."""
        if node.free > 0:
            self.free[node] = self._unsorted[node] = None
        elif node in self.free:
            del self.free[node]
            self._drop(node)

    def remove(self, node: NodeState) -> None:
        """Forget a node."""
        del self.nodes[node]
        self.free.pop(node, None)
        self._drop(node)

    def best(self, suits: Callable[[NodeState], bool] | None) -> tuple[Score, list[NodeState]] | None:
        """Return the nodes with a free seat and the lowest score of those that suit; None if none does.

        Without `suits`, all do.
        """
        for node in list(self._unsorted):
            self._drop(node)
            score = self._score_of[node] = node.score
            if score not in self._by_score:
                self._by_score[score] = {}
                insort(self._scores, score)
            self._by_score[score][node] = None
        for score in self._scores:
            nodes = self._by_score[score]
            if suiting := list(nodes) if suits is None else [node for node in nodes if suits(node)]:
                return score, suiting
        return None

    def _drop(self, node: NodeState) -> None:
        """Take a node out of the order of scores."""
        self._unsorted.pop(node, None)
        score = self._score_of.pop(node, None)
        if score is not None:
            nodes = self._by_score[score]
            del nodes[node]
            if not nodes:
                del self._by_score[score]
                del self._scores[bisect_left(self._scores, score)]
