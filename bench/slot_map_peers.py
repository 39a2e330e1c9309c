"""The slot map and an implementation in Python, as `block_pool.py` measures them."""

from collections.abc import Sequence
from typing import Any

from fairlead._cext.slotmap import SlotMap


class Slots:
    """The kernel."""

    label = "fairlead's SlotMap"

    def __init__(self, capacity: int) -> None:
        slots = SlotMap(capacity)
        self.alloc, self.free = slots.alloc, slots.free
        self.alloc_many, self.free_many = slots.alloc_many, slots.free_many


class SlotsInPython:
    """A slot map with a list of free slots."""

    label = "a list of free slots in Python"

    def __init__(self, capacity: int) -> None:
        self.unused = list(reversed(range(capacity)))
        self.generations = [1] * capacity
        self.keys: list[int | None] = [None] * capacity

    def alloc(self, key: int) -> int:
        if not self.unused:
            raise ValueError("full")
        slot = self.unused.pop()
        self.keys[slot] = key
        return self.generations[slot] << 32 | slot

    def free(self, handle: int) -> None:
        slot = handle & 0xFFFFFFFF
        if self.generations[slot] != handle >> 32 or self.keys[slot] is None:
            raise LookupError("stale")
        self.keys[slot] = None
        self.generations[slot] += 1
        self.unused.append(slot)

    def alloc_many(self, keys: Sequence[int]) -> list[int]:
        return [self.alloc(key) for key in keys]

    def free_many(self, handles: Sequence[int]) -> None:
        for handle in handles:
            self.free(handle)


SLOT_PEERS: tuple[type[Any], ...] = (Slots, SlotsInPython)
