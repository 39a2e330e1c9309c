"""The sequences that wait for a slot and for blocks: tenants take turns within a class.

Each sequence is one turn. Those that had a slot before go first: a suspended one, which goes on, before the
new ones of its tenant; a preempted one before all others of its class, because the blocks that it lacks are
those of the sequences that run instead.
"""

from fairlead._cext.fairqueue import FairQueue
from fairlead.engine.sequence import Sequence

UNBOUNDED = 2**62  # the engine bounds what it accepts


class SequenceQueue:
    """The kernel of the jobs' queue (`cext/fairqueue.pyx`), with sequences for entries. Class 0 is first.

    The head stays the head until it leaves, unless a higher class or a preempted sequence arrives: a tenant
    that joins goes behind those that wait for the turn of this round. So a large sequence does not starve.
    """

    def __init__(self) -> None:
        self._kernel = FairQueue(capacity=UNBOUNDED)
        self._sequences: dict[int, Sequence] = {}  # by the handle of its entry
        self._handles: dict[int, int] = {}  # by the sequence's key

    def __len__(self) -> int:
        return len(self._kernel)

    def head(self) -> Sequence | None:
        """Return the sequence whose turn is next."""
        handle = self._kernel.peek()
        return None if handle is None else self._sequences[handle]

    def pop_head(self) -> None:
        """Remove the head, which has its turn."""
        self._forget(self._kernel.pop())

    def append(self, sequence: Sequence, *, returns: bool = False) -> None:
        """Put a sequence behind those of its tenant and class; one that `returns`, before the new ones."""
        self._push(sequence, begun=returns)

    def prepend(self, sequence: Sequence) -> None:
        """Put a preempted sequence in front of its class."""
        self._push(sequence, retried=True)

    def remove(self, sequence: Sequence) -> None:
        """Remove a queued sequence, which has had no turn. Raises KeyError if it is not queued."""
        handle = self._handles[sequence.key]
        self._kernel.discard(handle)
        self._forget(handle)

    def _push(self, sequence: Sequence, *, begun: bool = False, retried: bool = False) -> None:
        assert sequence.key not in self._handles, f"sequence {sequence.key} is queued already"
        handle = self._kernel.push(sequence.tenant, priority=sequence.priority, begun=begun, retried=retried)
        self._sequences[handle] = sequence
        self._handles[sequence.key] = handle

    def _forget(self, handle: int) -> None:
        del self._handles[self._sequences.pop(handle).key]
