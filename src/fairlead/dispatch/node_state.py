"""Chooses the node for a job. Pure: knows no queue and no socket."""

from collections.abc import Sequence
from random import Random

from fairlead.dispatch.prefixes import Prefixes, Remembered
from fairlead.job import Job
from fairlead.nodes.node import Node, NodeLimits

# Our choice: enough to return a conversation to its node, too little to pile up jobs there.
CACHE_BONUS = 0.2


class NodeState:
    """The scheduler's record of one node that is up. A node that comes up again gets a new one.

    `busy` seats and `tokens` of its cache are counted from the jobs we sent there. A report would be outdated
    when it arrives. `draining`: no jobs for now, because another model needs the room; `leaving`: no jobs
    ever again. `is_full`: it rejected a job, so for a while it has no free seats, whatever the count. `used`
    orders places by their latest grant; 0: none yet.
    """

    __slots__ = (
        "_remembered",
        "busy",
        "draining",
        "is_full",
        "leaving",
        "limits",
        "node",
        "tokens",
        "used",
    )

    def __init__(self, node: Node, limits: NodeLimits) -> None:
        self.node = node
        self.limits = limits
        self.busy = 0
        self.tokens = 0
        self.draining = False
        self.leaving = False
        self.is_full = False
        self.used = 0
        self._remembered = Remembered()

    @property
    def free(self) -> int:
        """Free seats; below 0 if the limit has fallen below `busy`."""
        return 0 if self.draining or self.leaving or self.is_full else self.limits.seats - self.busy

    def takes(self, job: Job) -> bool:
        """Return whether the node has the job's model and can run a job of this kind at all."""
        if job.needs_own_node and not self.limits.evictable:
            return False
        if self.limits.needs_relay:
            is_of_its_kind = job.relay is not None
        else:  # after a reload, jobs without prompts may wait for an engine's model
            is_of_its_kind = bool(job.prompts) or job.relay is None
        return is_of_its_kind and job.model in self.node.models

    def holds(self, tokens: int) -> bool:
        """Return whether a job of that many tokens fits the cache now. An empty node fits every job."""
        limit = self.limits.cache_tokens
        return limit is None or not self.busy or self.tokens + tokens <= limit

    @property
    def tokens_left(self) -> int | None:
        """Free tokens of the cache, below 0 if one job alone is larger; None if the node reports no size."""
        limit = self.limits.cache_tokens
        return None if limit is None else limit - self.tokens

    def take(self, tokens: int) -> None:
        """Take a seat, and cache for that many tokens."""
        self.busy += 1
        self.tokens += tokens

    def give_back(self, tokens: int) -> None:
        """Release a seat and its cache."""
        assert self.busy > 0
        self.busy -= 1
        self.tokens -= tokens

    def remember(self, job: Job, prefixes: Prefixes) -> None:
        """Remember the job's prompt, which may stay in the node's cache."""
        self._remembered.add(prefixes, self._sharer(job))

    def share(self, job: Job, prefixes: Prefixes) -> float:
        """Return what part of the beginning of the job's prompt may be in the cache, 0 to 1."""
        return self._remembered.share(prefixes, self._sharer(job))

    def _sharer(self, job: Job) -> str:
        return job.tenant if self.limits.isolates_tenants else ""


def choose(free: Sequence[NodeState], random: Random, job: Job, prefixes: Prefixes = ()) -> NodeState:
    """Return the place for a job among some with free seats: idle ones first; ties at random.

    Among equally idle ones, the least 0.3·load + 0.7·busy/seats wins, less up to `CACHE_BONUS` for a prompt
    that begins like a recent one. A load that is not reported is taken to be busy/seats.
    """
    scores = [_score(place, job, prefixes) for place in free]
    least = min(scores)
    return random.choice([place for place, score in zip(free, scores, strict=True) if score == least])


def _score(place: NodeState, job: Job, prefixes: Prefixes) -> tuple[bool, float]:
    busy = place.busy / place.limits.seats
    load = busy if place.limits.load is None else place.limits.load
    bonus = CACHE_BONUS * place.share(job, prefixes) if prefixes else 0.0
    return place.busy > 0, 0.3 * load + 0.7 * busy - bonus
