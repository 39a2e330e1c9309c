"""The scheduler's record of a node, and its score for a job. Pure."""

from typing import TYPE_CHECKING

from fairlead.nodes.limits import NodeLimits
from fairlead.router.dispatch.job_spec import JobSpec

if TYPE_CHECKING:
    from fairlead.router.dispatch.fullness import FullModel
    from fairlead.router.dispatch.ticket import Run

# Nodes that have failed lately come last. Of the others, idle nodes come first, then the lowest number.
Score = tuple[bool, bool, float]


class NodeState:
    """The scheduler's record of one node that is up. A node that comes up again gets a new one.

    Its `jobs`, their `busy` seats and the `tokens` of its cache are counted from the jobs that were granted
    seats there. A report would be outdated when it arrives. A job counts until its end, also between two of
    its sequences, when it may hold no seat. `draining`: no jobs for now, because another model needs the
    room; `leaving`: no jobs ever again. `is_held`: its free seats are kept for a job that needs more of them.
    `has_failed`: a job has failed there lately. `used` orders nodes by their latest grant; 0: none yet.

    `full`: its models that have rejected jobs (`FullModel`). `closed_models`: those of them for which no job
    gets a seat now, whatever the count; `update_full` sets them.

    `fresh`: free seats that were left less than a quantum ago, the oldest first: the line that left each, by
    a number. `kept_from`: by model, the lines that it has no seat for now; `KeptSeats` sets it.

    `runs`: what holds its seats. A change is noted in `changed`, which belongs to the `NodePool` while the
    node is up.
    """

    __slots__ = (
        "_draining",
        "_has_failed",
        "_has_no_seats",
        "_is_held",
        "_leaving",
        "_limits",
        "busy",
        "changed",
        "closed_models",
        "fresh",
        "full",
        "id",
        "jobs",
        "kept_from",
        "models",
        "runs",
        "tokens",
        "used",
    )

    def __init__(self, node_id: str, models: frozenset[str], limits: NodeLimits) -> None:
        self.changed: dict[NodeState, None] = {}
        self.id = node_id
        self.models = models
        self.runs: dict[Run, None] = {}
        self.fresh: dict[int, str] = {}
        self.kept_from: dict[str, frozenset[str]] = {}
        self.jobs = 0
        self.busy = 0
        self.tokens = 0
        self.used = 0
        self._limits = limits
        self._draining = False
        self._leaving = False
        self._has_failed = False
        self.full: dict[str, FullModel] = {}
        self.closed_models: frozenset[str] = frozenset()
        self._is_held = False
        self._has_no_seats = False

    @property
    def limits(self) -> NodeLimits:
        """What fits it."""
        return self._limits

    @limits.setter
    def limits(self, limits: NodeLimits) -> None:
        self._limits = limits
        self.changed[self] = None

    @property
    def draining(self) -> bool:
        """Whether it gets no jobs for now."""
        return self._draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        self._draining = draining
        self._update()

    @property
    def leaving(self) -> bool:
        """Whether it gets no more jobs."""
        return self._leaving

    @leaving.setter
    def leaving(self, leaving: bool) -> None:
        self._leaving = leaving
        self._update()

    @property
    def has_failed(self) -> bool:
        """Whether a job has failed there lately, so that it is the last to get jobs."""
        return self._has_failed

    @has_failed.setter
    def has_failed(self, has_failed: bool) -> None:
        self._has_failed = has_failed
        self.changed[self] = None

    def update_full(self) -> None:
        """Record that a `FullModel` has changed."""
        for model in [model for model, full in self.full.items() if not full]:
            del self.full[model]
        closed = frozenset(model for model, full in self.full.items() if full.is_closed)
        if closed != self.closed_models:
            self.closed_models = closed
            self.changed[self] = None

    @property
    def is_held(self) -> bool:
        """Whether its free seats are kept for a job that needs more of them."""
        return self._is_held

    @is_held.setter
    def is_held(self, is_held: bool) -> None:
        self._is_held = is_held
        self._update()

    @property
    def free(self) -> int:
        """Free seats; below 0 if the limit has fallen below `busy`."""
        return 0 if self._has_no_seats else self._limits.seats - self.busy

    @property
    def room(self) -> int:
        """Seats that the node's own jobs may have: all free ones, also if new jobs get none."""
        return self._limits.seats - self.busy

    def _update(self) -> None:
        self._has_no_seats = self._draining or self._leaving or self._is_held
        self.changed[self] = None

    def seats_for(self, seats: int) -> int:
        """Return how many seats a job needs here to begin that takes `seats` on a node that has as many."""
        return 1 if self._limits.by_sequence else min(seats, self._limits.seats)

    @property
    def is_closed(self) -> bool:
        """Whether it gets no jobs for now, because its server fails; those that it has go on."""
        return not self._limits.seats

    @property
    def score(self) -> Score:
        """The lowest is the best for a job: not failed lately, idle, then 0.3·load + 0.7·busy/seats.

        A load that is not reported is taken to be busy/seats.
        """
        busy = self.busy / self._limits.seats
        load = busy if self._limits.load is None else self._limits.load
        return self._has_failed, self.busy > 0, 0.3 * load + 0.7 * busy

    def accepts(self, job: JobSpec) -> bool:
        """Return whether the node has the job's model and can run a job of this kind at all."""
        if job.needs_own_node and not self.limits.evictable:
            return False
        can_run = job.body_bytes is not None if self.limits.needs_relay else not job.must_be_relayed
        return can_run and job.model in self.models

    def has_cache_for(self, tokens: int) -> bool:
        """Return whether a job of that many tokens fits the cache now. An empty node fits every job."""
        limit = self._limits.cache_tokens
        return limit is None or not self.busy or self.tokens + tokens <= limit

    @property
    def tokens_left(self) -> int | None:
        """Free tokens of the cache, below 0 if one job alone is larger; None if the node reports no size."""
        limit = self.limits.cache_tokens
        return None if limit is None else limit - self.tokens

    def acquire(self, tokens: int, seats: int = 1) -> None:
        """Take seats, and cache for that many tokens."""
        self.busy += seats
        self.tokens += tokens
        self.changed[self] = None

    def release(self, tokens: int, seats: int = 1) -> None:
        """Free seats and cache."""
        assert self.busy >= seats
        self.busy -= seats
        self.tokens -= tokens
        self.changed[self] = None
