"""Which node a job goes to. Pure: counts in, a choice out; knows no queue and no socket."""

from collections.abc import Sequence
from random import Random

from fairlead.dispatch.prefixes import Prefixes, Remembered
from fairlead.job import Job
from fairlead.nodes.node import Node, NodeLimits

# Our choice: enough to bring a conversation back to its node, too little to pile jobs up there.
CACHE_BONUS = 0.2


class Place:
    """A node that is up, and what of it is taken. A node that comes back is a new place.

    `busy` seats and `tokens` of its cache are our own count of the jobs we sent there, never a report: a
    report is old when it arrives. `draining`: it gets no jobs for now, because another model needs its room;
    `leaving`: never again, because it is to go. `is_full`: it has turned a job away, so for a while it has no
    seats, whatever we count. `used` orders places by when they were last given a job; 0: never.
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
        """Seats to give away."""
        return 0 if self.draining or self.leaving or self.is_full else self.limits.seats - self.busy

    def takes(self, job: Job) -> bool:
        """Whether a job is of a kind that the node can run at all, and for a model that it has."""
        if job.needs_own_node and not self.limits.evictable:
            return False
        if self.limits.needs_relay:
            is_of_its_kind = job.relay is not None
        else:  # a reload may have made an engine's model of one that jobs wait for without prompts
            is_of_its_kind = bool(job.prompts) or job.relay is None
        return is_of_its_kind and job.model in self.node.models

    def holds(self, tokens: int) -> bool:
        """Whether a job of that many tokens fits the cache now. Alone, every job fits that was let in."""
        limit = self.limits.cache_tokens
        return limit is None or not self.busy or self.tokens + tokens <= limit

    @property
    def tokens_left(self) -> int | None:
        """Tokens that the cache has room for, below 0 if one job alone is larger; None: it does not say."""
        limit = self.limits.cache_tokens
        return None if limit is None else limit - self.tokens

    def take(self, tokens: int) -> None:
        """Give a seat away."""
        self.busy += 1
        self.tokens += tokens

    def give_back(self, tokens: int) -> None:
        """Have the seat back."""
        assert self.busy > 0
        self.busy -= 1
        self.tokens -= tokens

    def remember(self, job: Job, prefixes: Prefixes) -> None:
        """The job runs here, and its prompt may stay in the cache."""
        self._remembered.add(prefixes, self._sharer(job))

    def share(self, job: Job, prefixes: Prefixes) -> float:
        """Return how much of the beginning of the job's prompt may be in the cache, 0 to 1."""
        return self._remembered.share(prefixes, self._sharer(job))

    def _sharer(self, job: Job) -> str:
        return job.tenant if self.limits.isolates_tenants else ""


def choose(free: Sequence[Place], random: Random, job: Job, prefixes: Prefixes = ()) -> Place:
    """Return the place for a job among some with free seats: idle ones first; ties at random.

    Then counts the spec's score [000], 0.3·load + 0.7·busy/seats, less up to `CACHE_BONUS` for a prompt that
    begins as one that was there lately. A load that is not reported is taken to be what we have sent there.
    """
    scores = [_score(place, job, prefixes) for place in free]
    least = min(scores)
    return random.choice([place for place, score in zip(free, scores, strict=True) if score == least])


def _score(place: Place, job: Job, prefixes: Prefixes) -> tuple[bool, float]:
    busy = place.busy / place.limits.seats
    load = busy if place.limits.load is None else place.limits.load
    bonus = CACHE_BONUS * place.share(job, prefixes) if prefixes else 0.0
    return place.busy > 0, 0.3 * load + 0.7 * busy - bonus
