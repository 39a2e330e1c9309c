"""A sequence in the engine, and the table of its allowed state transitions."""

from enum import StrEnum

from fairlead._cext.blockpool import BlockHashes
from fairlead._cext.inputbatch import SequenceState
from fairlead.language.structured.constraint import Constraint

MOST_PREEMPTIONS = 3
NO_HANDLE = 0  # generations begin at 1, so no handle of a sequence is 0


class SequenceStatus(StrEnum):
    """A sequence's state.

    COMPILING waits for its grammar, PENDING is queued for a slot and blocks, PROCESSING has both. SUSPENDED
    has no slot and waits until it is resumed; its blocks are kept while memory allows. The others are final.
    """

    COMPILING = "compiling"
    PENDING = "pending"
    PROCESSING = "processing"
    SUSPENDED = "suspended"
    COMPLETED = "completed"
    TIMEOUT = "timeout"
    FAILED = "failed"
    CANCELLED = "cancelled"


TRANSITIONS: frozenset[tuple[SequenceStatus, SequenceStatus]] = frozenset(
    {
        (SequenceStatus.COMPILING, SequenceStatus.PENDING),
        (SequenceStatus.COMPILING, SequenceStatus.FAILED),
        (SequenceStatus.COMPILING, SequenceStatus.TIMEOUT),
        (SequenceStatus.COMPILING, SequenceStatus.CANCELLED),
        (SequenceStatus.PENDING, SequenceStatus.PROCESSING),
        (SequenceStatus.PENDING, SequenceStatus.SUSPENDED),
        (SequenceStatus.PENDING, SequenceStatus.FAILED),
        (SequenceStatus.PENDING, SequenceStatus.TIMEOUT),
        (SequenceStatus.PENDING, SequenceStatus.CANCELLED),
        (SequenceStatus.PROCESSING, SequenceStatus.COMPLETED),
        (SequenceStatus.PROCESSING, SequenceStatus.TIMEOUT),
        (SequenceStatus.PROCESSING, SequenceStatus.FAILED),
        (SequenceStatus.PROCESSING, SequenceStatus.CANCELLED),
        (SequenceStatus.PROCESSING, SequenceStatus.SUSPENDED),
        (SequenceStatus.SUSPENDED, SequenceStatus.PENDING),
        (SequenceStatus.SUSPENDED, SequenceStatus.TIMEOUT),
        (SequenceStatus.SUSPENDED, SequenceStatus.FAILED),  # by the step that was under way
        (SequenceStatus.SUSPENDED, SequenceStatus.CANCELLED),
        (
            SequenceStatus.PROCESSING,
            SequenceStatus.PENDING,
        ),  # preempted: keeps its request state, loses its blocks
    }
)


class Sequence:
    """The scheduler's state of a sequence. Its token ids and counts are in `tokens`.

    `priority` 0 is served first. `tenant` identifies whose it is, for turns within a step. While it runs,
    `slot` is its index into the batch's columns, and `handle` identifies this use of the slot. `order` counts
    admissions: of two running sequences the newer has the larger. `longest`: its tokens, prompt included, if
    it reaches `max_tokens`. `hashes` is the hash chain of its full blocks, None if nothing is kept for reuse;
    the first `indexed` of them are in the prefix cache. The first `reused` of them were there when it
    started.
    `reserved`: blocks by group that are reserved for it once it is pinned. `held`: its blocks by group while
    it is suspended, or waits for a slot afterwards; None: it has none. `evicted_tokens`: its tokens in the
    cache when it last lost its slot; None: it has had none. `scored`: how many prompt tokens have had their
    log-probabilities reported, counting the first, which has none; None if none were requested.
    `constraint`: which tokens it may choose; None: all.
    """

    __slots__ = (
        "constraint",
        "evicted_tokens",
        "handle",
        "hashes",
        "held",
        "indexed",
        "key",
        "longest",
        "order",
        "preemptions",
        "priority",
        "reserved",
        "reused",
        "scored",
        "slot",
        "state",
        "tenant",
        "timeout_s",
        "tokens",
    )

    def __init__(
        self,
        tokens: SequenceState,
        *,
        priority: int = 1,
        timeout_s: float | None = None,
        hashes: BlockHashes | None = None,
        state: SequenceStatus = SequenceStatus.PENDING,
        tenant: int = 0,
    ) -> None:
        self.tokens = tokens
        self.key = tokens.key
        self.longest = tokens.prompt_length + tokens.max_tokens
        self.priority = priority
        self.tenant = tenant
        self.timeout_s = timeout_s
        self.hashes = hashes
        self.handle = NO_HANDLE
        self.order = 0
        self.indexed = 0
        self.reused = 0
        self.reserved: list[int] | None = None
        self.preemptions = 0
        self.held: tuple[list[int], ...] | None = None
        self.evicted_tokens: int | None = None
        self.scored: int | None = None
        self.constraint: Constraint | None = None
        self.state = state
        self.slot: int  # only while it runs

    def is_pinned(self) -> bool:
        """Whether it was preempted so often that, once it runs again, it runs to its end."""
        return self.preemptions >= MOST_PREEMPTIONS

    def become(self, state: SequenceStatus) -> None:
        """Change to `state`. Raises AssertionError for a transition not in the table, which is a bug."""
        if (self.state, state) not in TRANSITIONS:
            raise AssertionError(f"sequence {self.key} cannot go from {self.state} to {state}")
        self.state = state
