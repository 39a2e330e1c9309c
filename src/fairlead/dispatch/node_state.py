"""The scheduler's record of a node, and the choice between several for a job. Pure."""

from collections.abc import Sequence
from random import Random

from fairlead.dispatch.job_spec import JobSpec
from fairlead.dispatch.prefixes import RecentPrefixes
from fairlead.nodes.limits import NodeLimits

# Large enough to return a conversation to its node, too small to collect all jobs there.
CACHE_BONUS = 0.2


class NodeState:
    """The scheduler's record of one node that is up. A node that comes up again gets a new one.

    `busy` seats and `tokens` of its cache are counted from the jobs that were granted seats there. A report
    would be outdated when it arrives. `draining`: no jobs for now, because another model needs the room;
    `leaving`: no jobs ever again. `is_full`: it rejected a job, so for a while it has no free seats, whatever
    the count. `used` orders nodes by their latest grant; 0: none yet.
    """

    __slots__ = (
        "_recent_prefixes",
        "busy",
        "draining",
        "id",
        "is_full",
        "leaving",
        "limits",
        "models",
        "tokens",
        "used",
    )

    def __init__(self, node_id: str, models: frozenset[str], limits: NodeLimits) -> None:
        self.id = node_id
        self.models = models
        self.limits = limits
        self.busy = 0
        self.tokens = 0
        self.draining = False
        self.leaving = False
        self.is_full = False
        self.used = 0
        self._recent_prefixes = RecentPrefixes()

    @property
    def free(self) -> int:
        """Free seats; below 0 if the limit has fallen below `busy`."""
        return 0 if self.draining or self.leaving or self.is_full else self.limits.seats - self.busy

    def accepts(self, job: JobSpec) -> bool:
        """Return whether the node has the job's model and can run a job of this kind at all."""
        if job.needs_own_node and not self.limits.evictable:
            return False
        can_run = job.body_bytes is not None if self.limits.needs_relay else not job.must_be_relayed
        return can_run and job.model in self.models

    def has_cache_for(self, tokens: int) -> bool:
        """Return whether a job of that many tokens fits the cache now. An empty node fits every job."""
        limit = self.limits.cache_tokens
        return limit is None or not self.busy or self.tokens + tokens <= limit

    @property
    def tokens_left(self) -> int | None:
        """Free tokens of the cache, below 0 if one job alone is larger; None if the node reports no size."""
        limit = self.limits.cache_tokens
        return None if limit is None else limit - self.tokens

    def acquire(self, tokens: int) -> None:
        """Take a seat, and cache for that many tokens."""
        self.busy += 1
        self.tokens += tokens

    def release(self, tokens: int) -> None:
        """Free a seat and its cache."""
        assert self.busy > 0
        self.busy -= 1
        self.tokens -= tokens

    def remember(self, job: JobSpec) -> None:
        """Remember the job's prompt, which the node may keep in its cache."""
        self._recent_prefixes.add(job.prefixes, self._cache_owner(job))

    def cached_share(self, job: JobSpec) -> float:
        """Return what part of the beginning of the job's prompt may be in the cache, 0 to 1."""
        return self._recent_prefixes.share(job.prefixes, self._cache_owner(job))

    def _cache_owner(self, job: JobSpec) -> str:
        return job.tenant if self.limits.isolates_tenants else ""


def choose(free: Sequence[NodeState], random: Random, job: JobSpec) -> NodeState:
    """Return the node for a job among some with free seats: idle ones first; ties at random.

    Among equally idle ones, the least 0.3·load + 0.7·busy/seats wins, less up to `CACHE_BONUS` for a prompt
    that begins like a recent one. A load that is not reported is taken to be busy/seats.
    """
    scores = [_score(node, job) for node in free]
    least = min(scores)
    return random.choice([node for node, score in zip(free, scores, strict=True) if score == least])


def _score(node: NodeState, job: JobSpec) -> tuple[bool, float]:
    busy = node.busy / node.limits.seats
    load = busy if node.limits.load is None else node.limits.load
    bonus = CACHE_BONUS * node.cached_share(job) if job.prefixes else 0.0
    return node.busy > 0, 0.3 * load + 0.7 * busy - bonus
