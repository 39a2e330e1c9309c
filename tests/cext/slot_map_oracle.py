"""A slot map in plain Python, written to be obviously correct."""

from fairlead._cext.slotmap import NoSlotFree, StaleHandle

LAST_GENERATION = 2**31 - 1


class SlotMapOracle:
    """The interface of `SlotMap`."""

    def __init__(self, capacity, *, first_generation=1):
        if not 1 <= capacity <= 2**30 or not 1 <= first_generation <= LAST_GENERATION:
            raise ValueError
        self.capacity = capacity
        self.free_slots = list(reversed(range(capacity)))  # the last one is allocated first
        self.generations = [first_generation] * capacity
        self.owners = {}  # handle -> key

    @property
    def available(self):
        return len(self.free_slots)

    def alloc(self, key):
        return self.alloc_many([key])[0]

    def alloc_many(self, keys):
        for key in keys:
            check_key(key)
        if len(keys) > self.available:
            raise NoSlotFree
        return [self.bind(key) for key in keys]

    def bind(self, key):
        slot = self.free_slots.pop()
        handle = self.generations[slot] << 32 | slot
        self.owners[handle] = key
        return handle

    def free(self, handle):
        self.free_many([handle])

    def free_many(self, handles):
        for i, handle in enumerate(handles):
            self.get(handle)
            if handle in handles[:i]:
                raise StaleHandle
        for handle in handles:
            self.release(handle)

    def release(self, handle):
        slot = handle & 0xFFFFFFFF
        del self.owners[handle]
        self.free_slots.append(slot)
        self.generations[slot] = self.generations[slot] % LAST_GENERATION + 1

    def get(self, handle):
        if not isinstance(handle, int):
            raise TypeError
        if handle not in self.owners:
            raise StaleHandle
        return self.owners[handle]

    def is_valid(self, handle):
        return handle in self.owners

    def slots(self):
        return sorted(handle & 0xFFFFFFFF for handle in self.owners)

    def __len__(self):
        return len(self.owners)


def check_key(key):
    if not isinstance(key, int):
        raise TypeError
    if not -(2**63) <= key < 2**63:
        raise OverflowError
