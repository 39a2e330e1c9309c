"""The sequences that hold a slot of the batch: by slot, by class, and as arrays for the memory forecast."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fairlead._cext.slotmap import SlotMap
from fairlead.engine.admission import Counts
from fairlead.engine.sequence import NO_HANDLE, Sequence


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
        self._by_slot: list[Sequence | None] = [None] * slots
        self._by_class: dict[int, dict[int, Sequence]] = {}  # then by key
        self._admissions = 0
        # By slot; what is of an empty one means nothing, except that it is not pinned.
        self._keys = np.zeros(slots, np.int64)
        self._max_tokens = np.zeros(slots, np.int64)
        self._pinned = np.zeros(slots, np.bool_)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def slots_free(self) -> int:
        return self._slots.available

    def add(self, sequence: Sequence) -> int:
        """Give a sequence a free slot, and return it."""
        tokens, key = sequence.tokens, sequence.key
        sequence.handle = self._slots.alloc(key)
        self._admissions += 1
        sequence.order = self._admissions
        slot = sequence.slot
        self._by_slot[slot] = sequence
        self._by_class.setdefault(sequence.priority, {})[key] = sequence
        self._keys[slot] = key
        self._max_tokens[slot] = tokens.max_tokens
        if sequence.pinned:
            self._pinned[slot] = True
        self.longest_tokens += tokens.prompt_length + tokens.max_tokens
        return slot

    def remove(self, sequence: Sequence) -> None:
        """Free a sequence's slot."""
        slot, tokens = sequence.slot, sequence.tokens
        self._slots.free(sequence.handle)
        sequence.handle = NO_HANDLE
        self._by_slot[slot] = None
        del self._by_class[sequence.priority][sequence.key]
        if sequence.pinned:
            self._pinned[slot] = False
        self.longest_tokens -= tokens.prompt_length + tokens.max_tokens

    def at(self, slot: int) -> Sequence | None:
        """Return the sequence that has this slot now."""
        return self._by_slot[slot]

    def in_slots(self, slots: Iterable[int]) -> list[Sequence]:
        """Return the sequences in those of the slots that are not empty."""
        return [sequence for slot in slots if (sequence := self._by_slot[slot]) is not None]

    def newest_of_the_lowest_class(self) -> Sequence | None:
        """Return the sequence to preempt next; None if all that run are pinned."""
        for priority in sorted(self._by_class, reverse=True):
            for sequence in reversed(self._by_class[priority].values()):
                if not sequence.pinned:
                    return sequence
        return None

    def columns(self, slots: npt.NDArray[np.intp]) -> SequenceColumns:
        """Return the columns of the sequences in these slots, none of which is empty."""
        return SequenceColumns(self._keys[slots], self._max_tokens[slots], self._pinned[slots])
