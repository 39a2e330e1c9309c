# cython: language_level=3, boundscheck=False, wraparound=False
# cython: annotation_typing=False, auto_pickle=False, autotestdict=False
"""Whose turn it is: tenants take turns, one entry each, and a tenant's own entries leave first in, first out.

Owns the order of what waits, its bound, and nothing else: an entry is a handle, and the caller keeps what
the handle stands for. Knows no job, clock, node or thread; every method is one step under the GIL.

Promises:

- A class (`priority`, 0 first) is empty before the next one is asked. Within a class the tenants form a
  ring, and turns come in rounds: the one just served goes to the back, an empty one leaves, and one that
  joins comes before those this round has served and after those it has not. So A, who was served a moment
  ago, goes after B, who was not, even if A's line was empty in between; and nobody gains a turn by coming
  and going, for a tenant that left is remembered until the round is over.
- `push`, `push_front`, `pop` and `discard` take the same time however many entries or tenants wait.
- A handle is never given out twice, so one kept too long is recognised and can do no harm.
- A method that raises has changed nothing (but `push` counts whom it refused).
- Memory follows the most entries that ever waited at once, not the entries or tenants that ever came.
"""

from typing import NamedTuple

from cpython.long cimport PyLong_AsLongAndOverflow, PyLong_AsLongLongAndOverflow, PyLong_Check
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from cpython.object cimport PyObject
from libc.math cimport isfinite
from libc.stdint cimport INT32_MAX, int32_t, int64_t
cimport cython


class Full(Exception):
    """The queue holds `capacity` entries already."""


class Statistics(NamedTuple):
    """What waits now, and what has happened since the beginning: pushed = length + popped + discarded."""

    length: int
    capacity: int
    tenants: int
    pushed: int
    popped: int
    discarded: int
    refused: int


cdef enum:
    NONE = -1       # no such entry or tenant; ends every chain
    CLASSES = 8
    LAPSED_AT_MOST = 1024
    ROOM_AT_FIRST = 32
    ROOM_AT_MOST = 1 << 30


# Entries and tenants are rows of two arrays and refer to each other by row, because rows survive a
# realloc and pointers do not, and because a row is half of a handle.

cdef struct Entry:
    double cost
    int32_t tenant      # NONE: a free row, not an entry
    int32_t priority
    int32_t previous
    int32_t next        # behind it in its line, or the next free row
    int32_t generation  # counts the entries this row has been, from 1


cdef struct Line:
    # The waiting entries of one tenant in one class. While there are any, it is a member of its class's ring.
    int32_t first
    int32_t last
    int32_t length
    int64_t served      # the round in which it last had its turn
    int32_t ring_previous
    int32_t ring_next


cdef struct Tenant:
    PyObject *name      # borrowed: the key in FairQueue.rows keeps it alive while the tenant waits
    int64_t waiting     # over all classes; a tenant with none is a free row
    int32_t next_free
    Line lines[CLASSES]


cdef struct State:
    Entry *entries
    Tenant *tenants
    int32_t entries_room
    int32_t tenants_room
    int32_t free_entry
    int32_t free_tenant
    int64_t length
    int64_t lengths[CLASSES]
    int32_t turns[CLASSES]      # the tenant to be served next; the ring is circular, so the back is just before it
    int32_t served[CLASSES]     # the first that this round has served: from here to the back; NONE if there is none
    int64_t rounds[CLASSES]     # the number of the round, from 1


@cython.final
@cython.no_gc  # it refers to strings and integers only, so no cycle can pass through it
cdef class FairQueue:
    """At most `capacity` waiting entries (0: every push is refused), given back one tenant at a time."""

    cdef State state
    cdef dict rows  # tenant -> its row, for those with a waiting entry
    cdef list lapsed  # a class's tenants that this round has served and that have no line there any more
    cdef int64_t capacity
    cdef int64_t pushed
    cdef int64_t popped
    cdef int64_t discarded
    cdef int64_t refused

    def __cinit__(self, *, capacity: int):
        self.capacity = capacity
        if self.capacity < 0:
            raise ValueError(f"capacity must not be negative, not {capacity}")
        self.rows = {}
        self.lapsed = [set() for _ in range(CLASSES)]
        state_begin(&self.state)

    def __dealloc__(self):
        PyMem_Free(self.state.entries)
        PyMem_Free(self.state.tenants)

    def push(self, tenant: str | int, cost: float = 1.0, *, priority: int = 1) -> int:
        """Puts an entry at the end of its tenant's line and returns its handle.

        `Full` when the queue holds `capacity` entries; TypeError unless `tenant` is exactly a str or an int;
        ValueError unless `cost` is finite and not negative and `priority` is in 0...7.
        """
        return self.enter(tenant, cost, priority, False)

    def push_front(self, tenant: str | int, cost: float = 1.0, *, priority: int = 1) -> int:
        """As `push`, for one that was served in vain: first in its tenant's line, and never refused as `Full`."""
        return self.enter(tenant, cost, priority, True)

    def pop(self) -> int:
        """Takes out the entry whose turn it is and returns its handle, now stale. IndexError when empty."""
        cdef int32_t entry = entry_next(&self.state)
        if entry == NONE:
            raise IndexError("empty")
        handle = handle_of(&self.state, entry)
        cdef int32_t tenant = self.state.entries[entry].tenant
        cdef int32_t priority = self.state.entries[entry].priority
        if self.state.served[priority] == tenant:  # even the front of the ring was served: the round is over
            self.forget(priority)
        self.state.tenants[tenant].lines[priority].served = self.state.rounds[priority]
        self.leave(entry)
        ring_turn(&self.state, tenant, priority)
        self.popped += 1
        return handle

    def discard(self, handle: int) -> bool:
        """Takes out one entry, wherever it waits. False, and no change, if the handle is not waiting here."""
        cdef int32_t entry = entry_of(&self.state, handle)
        if entry == NONE:
            return False
        self.leave(entry)
        self.discarded += 1
        return True

    def clear(self) -> None:
        """Discards every entry, and forgets who was served."""
        cdef int priority
        for priority in range(CLASSES):
            self.forget(priority)
        self.discarded += self.state.length
        self.rows.clear()
        cdef int32_t entry = entry_next(&self.state)
        while entry != NONE:
            entry_unlink(&self.state, entry)
            entry = entry_next(&self.state)

    def position(self, handle: int) -> int:
        """How many entries would leave before this one if none came or went (0: the next). KeyError if stale.

        Takes time in proportion to the tenants in its class and the entries before it in its own line.
        """
        return entries_before(&self.state, self.waiting_entry(handle))

    def tenant(self, handle: int) -> str | int:
        """Whose entry it is. KeyError if stale."""
        cdef int32_t entry = self.waiting_entry(handle)
        return <object>self.state.tenants[self.state.entries[entry].tenant].name

    def cost(self, handle: int) -> float:
        """What it was pushed with. KeyError if stale."""
        return self.state.entries[self.waiting_entry(handle)].cost

    def waiting(self, tenant: str | int) -> int:
        """How many entries of this tenant wait, over all classes."""
        check_tenant(tenant)
        row = self.rows.get(tenant)
        return 0 if row is None else self.state.tenants[<int32_t>row].waiting

    def statistics(self) -> Statistics:
        """A frozen summary."""
        return Statistics(
            length=self.state.length,
            capacity=self.capacity,
            tenants=len(self.rows),
            pushed=self.pushed,
            popped=self.popped,
            discarded=self.discarded,
            refused=self.refused,
        )

    def __len__(self) -> int:
        return self.state.length

    def __contains__(self, handle: object) -> bool:
        return entry_of(&self.state, handle) != NONE

    def __sizeof__(self) -> int:
        """Bytes, with the arrays behind it and without the dict of tenants."""
        cdef size_t arrays = self.state.entries_room * sizeof(Entry) + self.state.tenants_room * sizeof(Tenant)
        return object.__sizeof__(self) + arrays

    # What can fail comes before what cannot. Checks, memory and every Python object first, then the links:
    # so an exception finds nothing to undo. No foreign code runs in between either, for the names are
    # exactly str or int, whose hashing and comparing nobody can override.

    cdef object enter(self, tenant, cost, priority, bint front):
        check_tenant(tenant)
        cdef double checked_cost = cost_of(cost)
        cdef int32_t checked_priority = priority_of(priority)
        if not front and self.state.length >= self.capacity:
            self.refused += 1
            raise Full(f"{self.capacity} entries wait already")
        entry_reserve(&self.state)
        handle = handle_of(&self.state, self.state.free_entry)
        cdef int32_t row = self.row_of(tenant)
        if self.state.tenants[row].lines[checked_priority].length == 0:
            self.recall(row, checked_priority, tenant)
        entry_link(&self.state, row, checked_cost, checked_priority, front)
        self.pushed += 1
        return handle

    cdef int32_t row_of(self, tenant) except NONE:
        known = self.rows.get(tenant)
        if known is not None:
            return known
        tenant_reserve(&self.state)
        cdef int32_t row = self.state.free_tenant
        self.rows[tenant] = row
        tenant_begin(&self.state, <PyObject *>tenant)
        return row

    cdef int leave(self, int32_t entry) except -1:
        cdef Tenant *tenant = &self.state.tenants[self.state.entries[entry].tenant]
        cdef int32_t priority = self.state.entries[entry].priority
        cdef Line *line = &tenant.lines[priority]
        if line.length == 1 and line.served == self.state.rounds[priority]:
            lapsed = <set>self.lapsed[priority]
            if len(lapsed) >= LAPSED_AT_MOST:  # a bound; the price is at most one turn too many
                lapsed.clear()
            lapsed.add(<object>tenant.name)
        if tenant.waiting == 1:
            del self.rows[<object>tenant.name]
        entry_unlink(&self.state, entry)
        return 0

    cdef int recall(self, int32_t row, int32_t priority, tenant) except -1:
        # A tenant is about to join the ring: say whether this round has served it.
        cdef bint served = tenant in <set>self.lapsed[priority]
        self.state.tenants[row].lines[priority].served = self.state.rounds[priority] if served else 0
        if served:
            (<set>self.lapsed[priority]).discard(tenant)
        return 0

    cdef int forget(self, int32_t priority) except -1:
        (<set>self.lapsed[priority]).clear()
        self.state.rounds[priority] += 1
        self.state.served[priority] = NONE
        return 0

    cdef int32_t waiting_entry(self, handle) except NONE:
        cdef int32_t entry = entry_of(&self.state, handle)
        if entry == NONE:
            raise KeyError(handle)
        return entry


# Arguments -----------------------------------------------------------------------------------------


cdef int check_tenant(tenant) except -1:
    if type(tenant) is not str and type(tenant) is not int:
        raise TypeError(f"a tenant is a str or an int, not {type(tenant).__name__}")
    return 0


cdef double cost_of(cost) except -1.0:
    cdef double value
    try:
        value = cost
    except OverflowError:
        value = -1.0
    if not isfinite(value) or value < 0.0:
        raise ValueError("cost must be finite and not negative")
    return value


cdef int32_t priority_of(priority) except -1:
    cdef int overflow = 0
    cdef long value = PyLong_AsLongAndOverflow(priority, &overflow)
    if overflow or not 0 <= value < CLASSES:
        raise ValueError(f"priority must be in 0...{CLASSES - 1}")
    return <int32_t>value


# Handles: the row in the low half, the row's generation in the high half ---------------------------


cdef object handle_of(State *state, int32_t entry):
    return <int64_t>state.entries[entry].generation << 32 | entry


cdef int32_t entry_of(State *state, handle) noexcept:
    cdef int overflow = 0
    cdef int64_t value, row
    if not PyLong_Check(handle):
        return NONE
    value = PyLong_AsLongLongAndOverflow(handle, &overflow)
    row = value & 0xFFFFFFFF
    if overflow or row >= state.entries_room:
        return NONE
    if state.entries[row].tenant == NONE or state.entries[row].generation != value >> 32:
        return NONE
    return <int32_t>row


# Entries and lines ---------------------------------------------------------------------------------


cdef void state_begin(State *state) noexcept:
    cdef int priority
    state.free_entry = state.free_tenant = NONE
    for priority in range(CLASSES):
        state.turns[priority] = state.served[priority] = NONE
        state.rounds[priority] = 1


cdef int32_t entry_next(State *state) noexcept:
    cdef int priority
    for priority in range(CLASSES):
        if state.turns[priority] != NONE:
            return state.tenants[state.turns[priority]].lines[priority].first
    return NONE


cdef void entry_link(State *state, int32_t owner, double cost, int32_t priority, bint front) noexcept:
    # Makes the first free row an entry, at one end of its tenant's line.
    cdef int32_t row = state.free_entry
    cdef Entry *entry = &state.entries[row]
    cdef Tenant *tenant = &state.tenants[owner]
    cdef Line *line = &tenant.lines[priority]
    state.free_entry = entry.next
    entry.cost = cost
    entry.tenant = owner
    entry.priority = priority
    entry.previous = NONE if front else line.last
    entry.next = line.first if front else NONE
    if entry.previous == NONE:
        line.first = row
    else:
        state.entries[entry.previous].next = row
    if entry.next == NONE:
        line.last = row
    else:
        state.entries[entry.next].previous = row
    if line.length == 0:
        ring_join(state, owner, priority)
    line.length += 1
    tenant.waiting += 1
    state.lengths[priority] += 1
    state.length += 1


cdef void entry_unlink(State *state, int32_t row) noexcept:
    # Takes an entry out of its line, and sends its line, its tenant and its row where they now belong.
    cdef Entry *entry = &state.entries[row]
    cdef int32_t owner = entry.tenant
    cdef int32_t priority = entry.priority
    cdef Tenant *tenant = &state.tenants[owner]
    cdef Line *line = &tenant.lines[priority]
    if entry.previous == NONE:
        line.first = entry.next
    else:
        state.entries[entry.previous].next = entry.next
    if entry.next == NONE:
        line.last = entry.previous
    else:
        state.entries[entry.next].previous = entry.previous
    line.length -= 1
    tenant.waiting -= 1
    state.lengths[priority] -= 1
    state.length -= 1
    if line.length == 0:
        ring_leave(state, owner, priority)
    if tenant.waiting == 0:
        tenant_end(state, owner)
    entry_end(state, row)


cdef int64_t entries_before(State *state, int32_t row) noexcept:
    # Two tenants alternate until one line ends. So before the entry of rank r in its line leave r of its own,
    # and of every other line as many, and one more if that tenant's turn comes earlier; but at most the line.
    cdef int32_t owner = state.entries[row].tenant
    cdef int32_t priority = state.entries[row].priority
    cdef int64_t rank = 0, before = 0
    cdef int32_t tenant, i
    while state.entries[row].previous != NONE:
        row = state.entries[row].previous
        rank += 1
    for i in range(priority):
        before += state.lengths[i]
    cdef bint earlier = True
    tenant = state.turns[priority]
    while True:
        if tenant == owner:
            before += rank
            earlier = False
        else:
            before += min(<int64_t>state.tenants[tenant].lines[priority].length, rank + earlier)
        tenant = state.tenants[tenant].lines[priority].ring_next
        if tenant == state.turns[priority]:
            return before


# Rings of tenants, one a class ---------------------------------------------------------------------


cdef void ring_join(State *state, int32_t tenant, int32_t priority) noexcept:
    # Who was served in this round goes to the back of the ring, just before the tenant whose turn it is.
    # Who was not goes before the first that was.
    cdef Line *line = &state.tenants[tenant].lines[priority]
    cdef bint was_served = line.served == state.rounds[priority]
    cdef int32_t turn = state.turns[priority]
    cdef int32_t behind = turn
    if turn == NONE:
        line.ring_previous = line.ring_next = state.turns[priority] = tenant
        state.served[priority] = tenant if was_served else NONE
        return
    if not was_served and state.served[priority] != NONE:
        behind = state.served[priority]
        if turn == behind:
            state.turns[priority] = tenant
    elif was_served and state.served[priority] == NONE:
        state.served[priority] = tenant
    cdef Line *follower = &state.tenants[behind].lines[priority]
    line.ring_previous = follower.ring_previous
    line.ring_next = behind
    state.tenants[follower.ring_previous].lines[priority].ring_next = tenant
    follower.ring_previous = tenant


cdef void ring_leave(State *state, int32_t tenant, int32_t priority) noexcept:
    cdef Line *line = &state.tenants[tenant].lines[priority]
    cdef bint was_last = line.ring_next == state.turns[priority]
    if line.ring_next == tenant:
        state.turns[priority] = state.served[priority] = NONE
        return
    state.tenants[line.ring_previous].lines[priority].ring_next = line.ring_next
    state.tenants[line.ring_next].lines[priority].ring_previous = line.ring_previous
    if state.served[priority] == tenant:
        state.served[priority] = NONE if was_last else line.ring_next
    if state.turns[priority] == tenant:
        state.turns[priority] = line.ring_next


cdef void ring_turn(State *state, int32_t served, int32_t priority) noexcept:
    # The ring is circular: to go to its back is to let the next one be the front. A tenant that left the
    # ring with its last entry has passed the turn on already.
    if state.turns[priority] == served:
        state.turns[priority] = state.tenants[served].lines[priority].ring_next
        if state.served[priority] == NONE:
            state.served[priority] = served


# Rows: arrays that double, with the free rows chained ----------------------------------------------


cdef int entry_reserve(State *state) except -1:
    # Afterwards `free_entry` is a row.
    cdef int32_t room, row
    if state.free_entry != NONE:
        return 0
    room = doubled(state.entries_room)
    state.entries = <Entry *>grown(state.entries, room * sizeof(Entry))
    for row in range(state.entries_room, room):
        state.entries[row].tenant = NONE
        state.entries[row].generation = 1
        state.entries[row].next = row + 1 if row + 1 < room else NONE
    state.free_entry = state.entries_room
    state.entries_room = room
    return 0


cdef void entry_end(State *state, int32_t row) noexcept:
    # A row whose generations are used up is never used again: one row lost in two thousand million uses.
    cdef Entry *entry = &state.entries[row]
    entry.tenant = NONE
    if entry.generation < INT32_MAX:
        entry.generation += 1
        entry.next = state.free_entry
        state.free_entry = row


cdef int tenant_reserve(State *state) except -1:
    # Afterwards `free_tenant` is a row.
    cdef int32_t room, row
    if state.free_tenant != NONE:
        return 0
    room = doubled(state.tenants_room)
    state.tenants = <Tenant *>grown(state.tenants, room * sizeof(Tenant))
    for row in range(state.tenants_room, room):
        state.tenants[row].next_free = row + 1 if row + 1 < room else NONE
    state.free_tenant = state.tenants_room
    state.tenants_room = room
    return 0


cdef void tenant_begin(State *state, PyObject *name) noexcept:
    # Makes the first free row a tenant.
    cdef Tenant *tenant = &state.tenants[state.free_tenant]
    cdef int priority
    state.free_tenant = tenant.next_free
    tenant.name = name
    tenant.waiting = 0
    for priority in range(CLASSES):
        tenant.lines[priority].first = tenant.lines[priority].last = NONE
        tenant.lines[priority].length = 0
        tenant.lines[priority].served = 0


cdef void tenant_end(State *state, int32_t row) noexcept:
    state.tenants[row].name = NULL
    state.tenants[row].next_free = state.free_tenant
    state.free_tenant = row


cdef int32_t doubled(int32_t room) except -1:
    if room >= ROOM_AT_MOST:
        raise MemoryError
    return 2 * room if room else ROOM_AT_FIRST


cdef void *grown(void *rows, size_t size) except NULL:
    # On failure the old array is still there, and still the caller's.
    rows = PyMem_Realloc(rows, size)
    if rows == NULL:
        raise MemoryError
    return rows
