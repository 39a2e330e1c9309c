"""Owns the sequence ids (spec 5): rows of the batch, bound to one sequence while it lives."""

from typing import NamedTuple


class Slot(NamedTuple):
    """A sequence id and how often it had changed owners when it was taken."""

    row: int
    generation: int


class SlotPool:
    """Ids 0 … `total` − 1. A generation tells an id's owners apart: what an earlier one says is late."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._generations = [0] * total
        self._taken = bytearray(total)

    @property
    def free(self) -> int:
        """How many ids could be taken now."""
        return len(self._free)

    def take(self) -> Slot:
        """Bind a free id to its next owner. Asking for one when none is free is a bug and raises."""
        if not self._free:
            raise AssertionError("no slot is free")
        row = self._free.pop()
        self._taken[row] = True
        return Slot(row, self._generations[row])

    def holds(self, slot: Slot) -> bool:
        """Whether this owner still has the id: false from its release on, whoever has it then."""
        return bool(self._taken[slot.row]) and self._generations[slot.row] == slot.generation

    def release(self, slot: Slot) -> None:
        """Give the id back. Giving back what one no longer holds is a bug and raises."""
        if not self.holds(slot):
            raise AssertionError(f"slot {slot.row} is not held in generation {slot.generation}")
        self._taken[slot.row] = False
        self._generations[slot.row] += 1
        self._free.append(slot.row)
