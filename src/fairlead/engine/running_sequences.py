"""The sequences that hold a slot of the batch: by slot, by class, and as arrays for the memory forecast."""

from array import array
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fairlead._cext.slotmap import SlotMap
from fairlead.engine.admission import Counts
from fairlead.engine.sequence import NO_HANDLE, Sequence

_SLOT_BITS = 0xFFFF_FFFF  # of a handle


class SequenceColumns(NamedTuple):
    """The forecast's values of some sequences, in the order of their slots."""

    keys: Counts
    max_tokens: Counts
    pinned: npt.NDArray[np.bool_]


class RunningSequences:
    """The sequences in the slots 0 … `slots` − 1, in order of admission within a class.

    `longest_tokens` is their prompt and output in all, if each reaches its `max_tokens`.
    """

    def __init__(self, slots: int) -> None:
        self.longest_tokens = 0
        self._slots = SlotMap(slots)
        self.by_slot: list[Sequence | None] = [None] * slots
        self._by_class: defaultdict[int, dict[int, Sequence]] = defaultdict(dict)  # then by key
        self._admissions = 0
        # By slot; what is of an empty one means nothing, except that it is not pinned. To set one element of
        # these is several times as fast as of a numpy array.
        self._keys = array("q", bytes(8 * slots))
        self._max_tokens = array("q", bytes(8 * slots))
        self._pinned = bytearray(slots)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def slots_free(self) -> int:
        return self._slots.available

    def add(self, sequence: Sequence) -> int:
        """Give a sequence a free slot, and return it."""
        key = sequence.key
        handle = self._slots.alloc(key)
        slot = handle & _SLOT_BITS
        self._admissions += 1
        sequence.handle, sequence.slot, sequence.order = handle, slot, self._admissions
        self.by_slot[slot] = sequence
        self._by_class[sequence.priority][key] = sequence
        self._keys[slot] = key
        self._max_tokens[slot] = sequence.tokens.max_tokens
        if sequence.is_pinned():
            self._pinned[slot] = True
        self.longest_tokens += sequence.longest
        return slot

    def remove(self, sequence: Sequence) -> None:
        """Free a sequence's slot."""
        slot = sequence.slot
        self._slots.free(sequence.handle)
        sequence.handle = NO_HANDLE
        del sequence.slot
        self.by_slot[slot] = None
        del self._by_class[sequence.priority][sequence.key]
        self._pinned[slot] = False
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

    def columns(self, slots: npt.NDArray[np.intp]) -> SequenceColumns:
        """Return the columns of the sequences in these slots, none of which is empty."""
        keys, max_tokens = (np.frombuffer(column, np.int64) for column in (self._keys, self._max_tokens))
        return SequenceColumns(keys[slots], max_tokens[slots], np.frombuffer(self._pinned, np.bool_)[slots])
