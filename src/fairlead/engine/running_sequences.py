"""The sequences that hold a slot of the batch, by slot and by class."""

from array import array
from collections import defaultdict
from collections.abc import Iterable

from fairlead._cext.slotmap import SlotMap
from fairlead.engine.sequence import NO_HANDLE, Sequence

_SLOT_BITS = 0xFFFF_FFFF  # of a handle


class RunningSequences:
    """The sequences in the slots 0 … `slots` − 1, in order of admission within a class.

    `longest_tokens` is the sum of their `longest`, and `pinned` has the keys of those that are pinned. `keys`
    and `max_tokens`, by slot, are for the memory forecast; those of an empty slot mean nothing. `constrained`
    has those with a constraint, by key.
    """

    def __init__(self, slots: int) -> None:
        self.longest_tokens = 0
        self._slots = SlotMap(slots)
        self.by_slot: list[Sequence | None] = [None] * slots
        self._by_class: defaultdict[int, dict[int, Sequence]] = defaultdict(dict)  # then by key
        self.pinned: set[int] = set()
        self.constrained: dict[int, Sequence] = {}
        self.keys = array("q", bytes(8 * slots))  # an element takes longer to set in a numpy array
        self.max_tokens = array("q", bytes(8 * slots))
        self._admissions = 0

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def slots_free(self) -> int:
        return self._slots.available

    def add(self, sequence: Sequence) -> int:
        """Give a sequence a free slot, and return it."""
        handle = self._slots.alloc(sequence.key)
        slot = handle & _SLOT_BITS
        self._admissions += 1
        sequence.handle, sequence.slot, sequence.order = handle, slot, self._admissions
        self.by_slot[slot] = sequence
        self.keys[slot], self.max_tokens[slot] = sequence.key, sequence.tokens.max_tokens
        self._by_class[sequence.priority][sequence.key] = sequence
        if sequence.is_pinned():
            self.pinned.add(sequence.key)
        if sequence.constraint is not None:
            self.constrained[sequence.key] = sequence
        self.longest_tokens += sequence.longest
        return slot

    def remove(self, sequence: Sequence) -> None:
        """Free a sequence's slot."""
        self._slots.free(sequence.handle)
        self.by_slot[sequence.slot] = None
        sequence.handle = NO_HANDLE
        del sequence.slot
        del self._by_class[sequence.priority][sequence.key]
        self.pinned.discard(sequence.key)
        self.constrained.pop(sequence.key, None)
        self.longest_tokens -= sequence.longest

    def in_slots(self, slots: Iterable[int]) -> list[Sequence]:
        """Return the sequences in those of the slots that are not empty."""
        return [sequence for slot in slots if (sequence := self.by_slot[slot]) is not None]

    def newest_of_the_lowest_class(self) -> Sequence | None:
        """Return the sequence to preempt next; None if all that run are pinned."""
        for priority in sorted(self._by_class, reverse=True):
            for sequence in reversed(self._by_class[priority].values()):
                if not sequence.is_pinned():
                    return sequence
        return None
