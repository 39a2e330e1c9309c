"""Nodes that can run the same jobs, in the order in which they get them. Pure.

So a grant looks at the few nodes that come first, however many there are.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection

from fairlead.dispatch.job_spec import JobSpec
from fairlead.dispatch.node_state import NodeState, Score

# A number of kinds that the queue can tell apart; more share numbers, and are told apart one by one.
KINDS = 64


class JobKind:
    """Jobs that the same nodes can run: those of `groups`. `job` is one of them."""

    __slots__ = ("groups", "job", "number")

    def __init__(self, job: JobSpec, number: int) -> None:
        self.job = job
        self.number = number
        self.groups: dict[NodeGroup, None] = {}


class NodeGroup:
    """Nodes that can run the same jobs. Those with a free seat are kept by their score.

    `kinds` has a bit for each kind of job that they can run.
    """

    __slots__ = ("_by_score", "_score_of", "_scores", "evictable", "kinds", "models", "nodes")

    def __init__(self, models: frozenset[str], *, evictable: bool) -> None:
        self.models = models
        self.evictable = evictable
        self.kinds = 0
        self.nodes: dict[NodeState, None] = {}
        self._scores: list[Score] = []  # in order
        self._by_score: dict[Score, dict[NodeState, None]] = {}
        self._score_of: dict[NodeState, Score] = {}

    @property
    def has_free_seat(self) -> bool:
        """Whether a node has a free seat."""
        return bool(self._score_of)

    @property
    def free(self) -> Collection[NodeState]:
        """The nodes with a free seat."""
        return self._score_of.keys()

    def accepts(self, job: JobSpec) -> bool:
        """Return whether the nodes can run such a job at all."""
        return next(iter(self.nodes)).accepts(job)

    def update(self, node: NodeState) -> None:
        """Note the node's present score, or that it has no free seat."""
        score = node.score if node.free > 0 else None
        before = self._score_of.get(node)
        if score == before:
            return
        if before is not None:
            self._drop(node, before)
        if score is not None:
            self._score_of[node] = score
            if score not in self._by_score:
                self._by_score[score] = {}
                insort(self._scores, score)
            self._by_score[score][node] = None

    def remove(self, node: NodeState) -> None:
        """Forget a node."""
        del self.nodes[node]
        if node in self._score_of:
            self._drop(node, self._score_of[node])

    def best(self, suits: Callable[[NodeState], bool]) -> tuple[Score, list[NodeState]] | None:
        """Return the nodes with a free seat and the lowest score of those that suit; None if none does."""
        for score in self._scores:
            if nodes := [node for node in self._by_score[score] if suits(node)]:
                return score, nodes
        return None

    def _drop(self, node: NodeState, score: Score) -> None:
        del self._score_of[node]
        nodes = self._by_score[score]
        del nodes[node]
        if not nodes:
            del self._by_score[score]
            del self._scores[bisect_left(self._scores, score)]
