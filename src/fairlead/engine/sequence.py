"""One stream of tokens in the engine, and the table of states it may pass through (spec 5, seed 002)."""

from enum import StrEnum

from fairlead._cext.blockpool import BlockHashes
from fairlead._cext.inputbatch import SequenceState

MOST_PREEMPTIONS = 3
NO_HANDLE = 0  # generations begin at 1, so no owner's handle is 0
_SLOT_BITS = 0xFFFF_FFFF


class State(StrEnum):
    """PENDING waits for a slot and blocks; PROCESSING has both; the others are ends."""

    PENDING = "pending"
    PROCESSING = "processing"
    COMPLETED = "completed"
    TIMEOUT = "timeout"
    FAILED = "failed"
    CANCELLED = "cancelled"


TRANSITIONS: frozenset[tuple[State, State]] = frozenset(
    {
        (State.PENDING, State.PROCESSING),
        (State.PENDING, State.FAILED),
        (State.PENDING, State.TIMEOUT),
        (State.PENDING, State.CANCELLED),
        (State.PROCESSING, State.COMPLETED),
        (State.PROCESSING, State.TIMEOUT),
        (State.PROCESSING, State.FAILED),
        (State.PROCESSING, State.CANCELLED),
        (State.PROCESSING, State.PENDING),  # preempted: its request state stays, its blocks go
    }
)


class Sequence:
    """What the scheduler knows of a sequence beside its token ids and counts, which are in `tokens`.

    `priority` 0 is the first class to be served. `handle` names its slot while it runs. `order` counts
    admissions, so of two that run the newer has the larger. `hashes` is the chain of its full blocks, None
    where nothing is kept for reuse; so many of them as `indexed` says can be found by others. `promised`:
    blocks by group that nobody else may take, once it is pinned. `evicted_tokens`: what its last preemption
    took out of the cache. `scored`: how many tokens of the prompt
    have their log-probabilities told, the first one included, which has none; None where none are wanted.
    """

    __slots__ = (
        "_state",
        "evicted_tokens",
        "handle",
        "hashes",
        "indexed",
        "key",
        "order",
        "preemptions",
        "priority",
        "promised",
        "scored",
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
    ) -> None:
        self.tokens = tokens
        self.key = tokens.key
        self.priority = priority
        self.timeout_s = timeout_s
        self.hashes = hashes
        self.handle = NO_HANDLE
        self.order = 0
        self.indexed = 0
        self.promised: list[int] | None = None
        self.preemptions = 0
        self.evicted_tokens = 0
        self.scored: int | None = None
        self._state = State.PENDING

    @property
    def state(self) -> State:
        return self._state

    @property
    def slot(self) -> int:
        """Its row of the batch's columns, while it runs."""
        assert self.handle != NO_HANDLE
        return self.handle & _SLOT_BITS

    @property
    def pinned(self) -> bool:
        """Whether it was preempted so often that, once it runs again, it is left to run to its end."""
        return self.preemptions >= MOST_PREEMPTIONS

    def become(self, state: State) -> None:
        """Move to `state`; a transition that the table does not have is a bug and raises."""
        if (self._state, state) not in TRANSITIONS:
            raise AssertionError(f"sequence {self.key} cannot go from {self._state} to {state}")
        self._state = state
