# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: annotation_typing=False, auto_pickle=False, autotestdict=False
"""An allocator of sequence ids, the numbers 0 … capacity − 1, each bound to at most one owner at a time.

Owns the set of free ids, and for each other id the key that it is bound to, a number that the caller chooses.
It has no notion of sequences, batches or memory.

Promises:

- A handle names a binding, not an id: generation · 2³² + id. After a binding has ended, its handle is refused,
  even if the id has a new owner, until the id has had 2³¹ − 1 more owners.
- The id freed last is allocated first, because its rows are still in the cache. No id is ever retired.
- `alloc` and `free` take constant time.
- A method that raises has changed nothing.
"""

from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_Check
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from cpython.list cimport PyList_New, PyList_SET_ITEM
from cpython.ref cimport Py_INCREF
from cpython.sequence cimport PySequence_Fast, PySequence_Fast_GET_ITEM, PySequence_Fast_GET_SIZE
from libc.stdint cimport INT32_MAX, int32_t, int64_t
cimport cython


class NoSlotFree(Exception):
    """Fewer ids are free than were requested; nothing has changed."""


class StaleHandle(LookupError):
    """The handle's binding has ended or never existed; nothing has changed."""


cdef enum:
    NONE = -1
    CAPACITY_AT_MOST = 1 << 30


cdef struct Slot:
    int64_t key
    int32_t generation  # of the owner, or of the next one
    bint bound


@cython.final
@cython.no_gc  # it refers to no objects
cdef class SlotMap:
    """The ids 0 … `capacity` − 1. Their first owners have generation `first_generation`, 1 … 2³¹ − 1."""

    cdef Slot *rows
    cdef int32_t *stack  # the free ids; the last one is used first
    cdef int32_t count   # the number of free ids
    cdef readonly int32_t capacity

    def __cinit__(self, capacity: int, *, first_generation: int = 1):
        cdef int32_t slot, generation
        if not 1 <= capacity <= CAPACITY_AT_MOST:
            raise ValueError(f"capacity must be in 1...{CAPACITY_AT_MOST}, not {capacity}")
        if not 1 <= first_generation <= INT32_MAX:
            raise ValueError(f"first_generation must be in 1...{INT32_MAX}, not {first_generation}")
        generation = first_generation
        self.capacity = self.count = capacity
        self.rows = <Slot *>PyMem_Calloc(self.capacity, sizeof(Slot))
        self.stack = <int32_t *>PyMem_Calloc(self.capacity, sizeof(int32_t))
        if self.rows == NULL or self.stack == NULL:
            raise MemoryError
        for slot in range(self.capacity):
            self.rows[slot].generation = generation
            self.stack[self.capacity - 1 - slot] = slot

    def __dealloc__(self):
        PyMem_Free(self.rows)
        PyMem_Free(self.stack)

    @property
    def available(self) -> int:
        """The number of free ids."""
        return self.count

    def alloc(self, key: int) -> int:
        """Bind a free id to `key`, any signed 64-bit number, and return the handle of the binding.

        Raise `NoSlotFree` if no id is free.
        """
        cdef int64_t number = key_of(key)
        if self.count == 0:
            raise NoSlotFree(f"all {self.capacity} ids are bound")
        cdef int32_t slot = self.stack[self.count - 1]
        handle = self.handle_of(slot)
        self.bind(slot, number)
        return handle

    def alloc_many(self, keys: Sequence[int]) -> list[int]:
        """Call `alloc` for each key, in order: for all or for none."""
        sequence = PySequence_Fast(keys, "keys must be a sequence of numbers")
        cdef Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence)
        cdef Py_ssize_t i
        for i in range(count):
            key_of(<object>PySequence_Fast_GET_ITEM(sequence, i))
        if count > self.count:
            raise NoSlotFree(f"{count} ids were requested, {self.count} of {self.capacity} are free")
        handles = PyList_New(count)
        for i in range(count):
            handle = self.handle_of(self.stack[self.count - 1 - i])
            Py_INCREF(handle)
            PyList_SET_ITEM(handles, i, handle)
        for i in range(count):
            self.bind(self.stack[self.count - 1], key_of(<object>PySequence_Fast_GET_ITEM(sequence, i)))
        return handles

    def free(self, handle: int) -> None:
        """End a binding. Raise `StaleHandle` if it has ended already."""
        self.release(self.slot_of(handle))

    def free_many(self, handles: Sequence[int]) -> None:
        """Call `free` for each handle, in order: for all, or for none if one is stale or named twice."""
        sequence = PySequence_Fast(handles, "handles must be a sequence of numbers")
        cdef Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence)
        cdef Py_ssize_t i
        cdef int32_t before = self.count
        try:
            for i in range(count):
                self.release(self.slot_of(<object>PySequence_Fast_GET_ITEM(sequence, i)))
        except BaseException:
            while self.count > before:
                self.undo_release()
            raise

    def get(self, handle: int) -> int:
        """Return the key that was bound. Raise `StaleHandle` if the binding has ended."""
        return self.rows[self.slot_of(handle)].key

    def is_valid(self, handle: int) -> bool:
        """Return whether this binding exists; False for a number that never was a handle."""
        return self.bound_slot(handle) != NONE

    def slots(self) -> list[int]:
        """Return the bound ids, ascending. Takes time in proportion to the capacity."""
        return [slot for slot in range(self.capacity) if self.rows[slot].bound]

    def __len__(self) -> int:
        return self.capacity - self.count

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + self.capacity * (sizeof(Slot) + sizeof(int32_t))

    cdef void bind(self, int32_t slot, int64_t key) noexcept:
        # `slot` must be on top of the stack.
        self.count -= 1
        self.rows[slot].key = key
        self.rows[slot].bound = True

    cdef void release(self, int32_t slot) noexcept:
        cdef Slot *row = &self.rows[slot]
        row.bound = False
        row.generation = row.generation + 1 if row.generation < INT32_MAX else 1
        self.stack[self.count] = slot
        self.count += 1

    cdef void undo_release(self) noexcept:
        # The key is still there.
        self.count -= 1
        cdef Slot *row = &self.rows[self.stack[self.count]]
        row.bound = True
        row.generation = row.generation - 1 if row.generation > 1 else INT32_MAX

    cdef object handle_of(self, int32_t slot):
        return <int64_t>self.rows[slot].generation << 32 | slot

    cdef int32_t slot_of(self, handle) except NONE:
        cdef int32_t slot = self.bound_slot(handle)
        if slot == NONE:
            if not PyLong_Check(handle):
                raise TypeError(f"a handle is an int, not {type(handle).__name__}")
            raise StaleHandle(f"{handle} is not, or no longer, the handle of a binding")
        return slot

    cdef int32_t bound_slot(self, handle) noexcept:
        cdef int overflow = 0
        cdef int64_t number, slot
        if not PyLong_Check(handle):
            return NONE
        number = PyLong_AsLongLongAndOverflow(handle, &overflow)
        slot = number & 0xFFFFFFFF
        if overflow or slot >= self.capacity:
            return NONE
        if not self.rows[slot].bound or self.rows[slot].generation != number >> 32:
            return NONE
        return <int32_t>slot


cdef int64_t key_of(key) except? -1:
    if not PyLong_Check(key):
        raise TypeError(f"a key is an int, not {type(key).__name__}")
    return key
