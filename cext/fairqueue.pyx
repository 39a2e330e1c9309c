# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: annotation_typing=False, auto_pickle=False, autotestdict=False
"""Whose turn it is: tenants take turns, and a tenant's own entries leave first in, first out.

Owns the order of what waits, its bound, and nothing else: an entry is a handle, and the caller keeps what
the handle stands for. Knows no job, clock, node or thread; every method is one step under the GIL, but for
`pop(fits)`, which asks the caller and looks again at what it finds afterwards.

Promises:

- A class (`priority`, 0 first) is empty before the next one is asked; with `min_share`, each lower class that
  waits gets at least that fraction of the pops, as long as those fractions add up to no more than 1.
- Round robin: within a class the tenants form a ring, and turns come in rounds: the one just served goes to
  the back, an empty one leaves, and one that joins comes before those this round has served and after those
  it has not. So A, who was served a moment ago, goes after B, who was not, even if A's line was empty in
  between; and nobody gains a turn by coming and going.
- Tokens: the tenant with the least counter goes first, of several the least recently served. A counter is
  service in units of cost ÷ weight, one for all classes. Who joins is lifted to the least counter of those in
  line, so idling earns nothing; only a refund makes a counter fall.
- A retried entry was paid for when it first left. It leaves before the others of its class, the latest first,
  and costs neither a turn nor a charge; it is never refused and never displaced.
- `push`, `push_front`, `pop` and `discard` take the same time however many entries wait; under tokens the
  logarithm of the tenants that wait.
- A handle is never given out twice, so one kept too long is recognised and can do no harm.
- A method that raises has changed nothing (but `push` counts whom it refused).
- Memory follows the most entries that ever waited at once, not the entries or tenants that ever came.
"""

from typing import NamedTuple

from cpython.long cimport PyLong_AsLongAndOverflow, PyLong_AsLongLongAndOverflow, PyLong_Check
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.object cimport PyObject
from libc.math cimport INFINITY, fmax, fmin, isfinite
from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint64_t
from libc.string cimport memcpy
cimport cython


class Full(Exception):
    """The queue holds `capacity` entries already."""


class Statistics(NamedTuple):
    """What waits, and what happened since the beginning: pushed = length + popped + discarded + displaced."""

    length: int
    capacity: int
    tenants: int
    pushed: int
    popped: int
    discarded: int
    refused: int
    displaced: int


cdef enum:
    NONE = -1       # no such entry or tenant; ends every chain
    CLASSES = 8
    IDLE = CLASSES  # the heap of those that do not wait and are remembered
    REMEMBERED_AT_MOST = 2048
    WEIGHTS_AT_MOST = 65536
    ROOM_AT_FIRST = 32
    ROOM_AT_MOST = 1 << 30
    BYPASS_AT_MOST = 255
    ASKED_AT_FIRST = 32
    CACHE_LINE = 64

cdef int64_t SIZE_AT_MOST = (<int64_t>1 << 48) - 1
cdef double COUNTER_AT_MOST = 1e300  # so that no sum of charges is infinite
cdef double CREDIT_AT_MOST = 4.0     # what a class that waits for long may take at once
cdef double ONE_POP = 1.0 - 1e-9     # ten tenths do not add up to one


# Entries and tenants are rows of two arrays and refer to each other by row, because rows survive a
# realloc and pointers do not, and because a row is half of a handle. An entry has 32 bytes, for a queue far
# larger than the cache costs one miss for each entry touched: itself and its two neighbours.

cdef extern from *:
    """
    typedef struct {
        double cost;
        int32_t tenant;
        int32_t previous;
        int32_t next;
        int32_t generation;
        uint64_t size : 48;
        uint64_t passed : 8;
        uint64_t priority : 3;
        uint64_t retried : 1;
    } Entry;
    """
    ctypedef struct Entry:
        double cost
        int32_t tenant      # NONE: a free row, not an entry
        int32_t previous
        int32_t next        # behind it in its chain, or the next free row
        int32_t generation  # counts the entries this row has been, from 1
        uint64_t size
        int32_t passed      # pops that took one behind it while it did not fit
        int32_t priority
        bint retried


cdef struct Chain:
    int32_t first
    int32_t last
    int32_t length


cdef struct Line:
    # The entries of one tenant in one class, but for the retried. While there are any, it is a member of its
    # class's ring, or of its heap.
    Chain chain
    int32_t ring_previous
    int32_t ring_next
    int64_t served      # the round in which it last had its turn
    int64_t joined      # when it last became a member of the heap


cdef struct Tenant:
    PyObject *name      # borrowed: the key in FairQueue.rows keeps it alive
    double counter
    double lift         # the level when it last came to be in line: refunds end here
    double weight
    int64_t turn        # when it was last served; 0: never, or forgotten
    int32_t waiting     # its entries, over all classes
    int32_t lined       # those of them that are not retried
    int32_t next_free
    int32_t places[CLASSES + 1]  # where it is in each heap; NONE: it is not
    Line lines[CLASSES]


cdef struct Heap:
    int32_t *rows       # of tenants
    int32_t count


cdef struct State:
    void *entries_memory
    Entry *entries              # in it, from where a cache line begins: so none lies across two
    Tenant *tenants
    Heap heaps[CLASSES + 1]
    int32_t entries_room
    int32_t tenants_room        # of every heap, too
    int32_t free_entry
    int32_t free_tenant
    bint by_tokens
    int64_t length
    int64_t lined               # the entries that are not retried
    int64_t waiting_tenants
    int64_t changes             # counts whatever may alter the order
    int64_t moment              # counts turns and joinings
    int64_t lengths[CLASSES]
    Chain retried[CLASSES]
    # Round robin
    int32_t turns[CLASSES]      # the tenant to be served next; the ring is circular, so the back is just before it
    int32_t served[CLASSES]     # the first that this round has served: from here to the back; NONE if there is none
    int64_t rounds[CLASSES]     # the number of the round, from 1
    # Tokens
    double floor                # the counter of the last that was in line
    # Classes
    double min_share
    double credits[CLASSES]     # pops that a class that waits is owed


@cython.final
@cython.no_gc  # it refers to strings and numbers only, so no cycle can pass through it
cdef class FairQueue:
    """At most `capacity` waiting entries (0: every push is refused), given back one tenant at a time.

    `fairness` is "roundRobin" or "tokens". `bypass` bounds how often an entry that does not fit is passed.
    `slack` is how many more entries than the newcomer's tenant another must have to have one displaced.
    """

    cdef State state
    cdef dict rows  # tenant -> its row, for those that wait or are remembered
    cdef dict weights
    cdef int64_t capacity
    cdef int64_t slack
    cdef int32_t bypass
    cdef int64_t pushed
    cdef int64_t popped
    cdef int64_t discarded
    cdef int64_t refused
    cdef int64_t displaced

    def __cinit__(
        self,
        *,
        capacity: int,
        fairness: str = "roundRobin",
        min_share: float = 0.0,
        bypass: int = 8,
        slack: int = 2,
    ):
        self.capacity = capacity
        self.slack = slack
        if self.capacity < 0:
            raise ValueError(f"capacity must not be negative, not {capacity}")
        if fairness not in ("roundRobin", "tokens"):
            raise ValueError(f"fairness must be roundRobin or tokens, not {fairness}")
        if not 0.0 <= min_share < 1.0:
            raise ValueError(f"min_share must be at least 0 and less than 1, not {min_share}")
        if not 0 <= bypass <= BYPASS_AT_MOST:
            raise ValueError(f"bypass must be in 0...{BYPASS_AT_MOST}, not {bypass}")
        if self.slack < 1:
            raise ValueError(f"slack must be at least 1, not {slack}")
        self.bypass = bypass
        self.rows = {}
        self.weights = {}
        self.state.by_tokens = fairness == "tokens"
        self.state.min_share = min_share
        state_begin(&self.state)

    def __dealloc__(self):
        state_end(&self.state)

    def push(self, tenant: str | int, cost: float = 1.0, *, priority: int = 1, size: int = 0) -> int:
        """Puts an entry at the end of its tenant's line and returns its handle.

        `cost` is what its pop charges under tokens, `size` what it takes of a memory budget, in any unit.
        `Full` when the queue holds `capacity` entries; TypeError unless `tenant` is exactly a str or an int;
        ValueError unless `cost` is finite and not negative, `priority` is in 0...7 and `size` in 0...2⁴⁸ - 1.
        """
        return self.enter(tenant, cost, priority, size, False)

    def push_front(self, tenant: str | int, cost: float = 1.0, *, priority: int = 1, size: int = 0) -> int:
        """As `push`, for one that left in vain: before all others of its class, and never refused as `Full`.

        It was given its turn and charged when it first left, and is not again.
        """
        return self.enter(tenant, cost, priority, size, True)

    def displace(self, tenant: str | int, *, priority: int = 1) -> int | None:
        """Makes room in a full queue for a newcomer of this tenant and class, at the cost of who has most.

        Takes out the newest entry of the longest line (of several, the one whose turn is furthest away) in the
        lowest class, and returns its handle. In the newcomer's own class only if that line is at least `slack`
        longer than all that the newcomer's tenant has waiting; never in a higher class, never a retried entry.
        None, and no change, if there is no such entry. Whether there is room is for the caller to know. Takes
        time in proportion to the tenants.
        """
        check_tenant(tenant)
        cdef int32_t own_priority = priority_of(priority)
        cdef int32_t other, row
        for other in range(CLASSES - 1, own_priority - 1, -1):
            row = line_longest(&self.state, other)
            if row == NONE:
                continue
            line = &self.state.tenants[row].lines[other].chain
            if other == own_priority and line.length < self.waiting(tenant) + self.slack:
                continue
            handle = handle_of(&self.state, line.last)
            self.leave(line.last)
            self.displaced += 1
            return handle
        return None

    def pop(self, fits=None) -> int:
        """Takes out the entry whose turn it is and returns its handle, now stale. IndexError when there is none.

        `fits(handle)` says of an entry whether it may leave: True: it does. None: it cannot now, for a reason of
        its own, and is skipped. False: it does not fit now, and is passed. The entries are asked class by class,
        tenant by tenant, a tenant's own from first to last. The first that answers False may be passed by
        `bypass` pops altogether; after that nobody behind it leaves until it does. The turn, and the charge, are
        the tenant's whose entry left.

        `fits` may raise: nothing has changed then. It may change the queue, as may other threads meanwhile:
        what left is not asked or taken, what came may not be asked, and some may be asked twice.
        """
        cdef int32_t entry
        if fits is not None:
            return self.pop_fitting(fits)
        entry = entry_next(&self.state)
        if entry == NONE:
            raise IndexError("empty")
        handle = handle_of(&self.state, entry)
        self.serve(entry)
        return handle

    def pop_many(self, max_count: int, memory_budget: int) -> list[int]:
        """Takes out up to `max_count` entries whose sizes add up to `memory_budget` at most, in fair order.

        As that many `pop(fits)` with `fits` being: its size is at most what is left. So one that does not fit is
        passed, but no more than `bypass` times over all calls; after that, those behind it wait until a call's
        budget is enough for it, or it is discarded. One that no budget will ever hold should not be pushed.
        """
        cdef int64_t count = counted(max_count)
        cdef int64_t budget = counted(memory_budget)
        cdef int64_t *order
        cdef int32_t entry
        handles = []
        count = min(count, self.state.length)
        if count == 0:
            return handles
        order = <int64_t *>grown(NULL, self.state.length * sizeof(int64_t))
        try:
            while count > 0:
                entry = self.fitting(budget, order)
                if entry == NONE:
                    break
                handles.append(handle_of(&self.state, entry))
                count -= 1
                budget -= self.state.entries[entry].size
                self.serve(entry)
        except MemoryError:
            if not handles:
                raise
        finally:
            PyMem_Free(order)
        return handles

    def discard(self, handle: int) -> bool:
        """Takes out one entry, wherever it waits. False, and no change, if the handle is not waiting here."""
        cdef int32_t entry = entry_of(&self.state, handle)
        if entry == NONE:
            return False
        self.leave(entry)
        self.discarded += 1
        return True

    def clear(self) -> None:
        """Discards every entry, and forgets who was served and what was charged. Weights stay."""
        self.discarded += self.state.length
        state_clear(&self.state)
        self.rows.clear()

    def set_weight(self, tenant: str | int, weight: float) -> None:
        """From now on what is charged to this tenant is divided by `weight`: finite, above 0, at first 1.

        It stays until it is 1 again. ValueError for one weight more than 65,536.
        """
        check_tenant(tenant)
        cdef double value = cost_of(weight)
        if value == 0.0:
            raise ValueError("a weight must be above 0")
        if value == 1.0:
            self.weights.pop(tenant, None)
        elif tenant in self.weights or len(self.weights) < WEIGHTS_AT_MOST:
            self.weights[tenant] = value
        else:
            raise ValueError(f"{WEIGHTS_AT_MOST} tenants have a weight already")
        cdef int32_t row = self.known(tenant)
        if row != NONE:
            self.state.tenants[row].weight = value

    def charge(self, tenant: str | int, cost: float) -> None:
        """Adds to a tenant's counter what it used beyond what its pops charged. No effect under round robin."""
        check_tenant(tenant)
        cdef double value = cost_of(cost)
        cdef int32_t row
        if not self.state.by_tokens:
            return
        row = self.known(tenant)
        if row == NONE:
            row = self.row_of(tenant)
            heap_add(&self.state, IDLE, row)
        tenant_charge(&self.state, row, value)
        if self.state.tenants[row].waiting == 0:
            self.forget_idle()

    def refund(self, tenant: str | int, cost: float) -> None:
        """Takes back what was charged and not used. No effect under round robin.

        A counter in line falls no lower than the level at which its tenant joined, and one out of line no lower
        than the level now: just as if the refund had come before. (The level is the least counter in line.)
        """
        check_tenant(tenant)
        cdef double value = cost_of(cost)
        cdef int32_t row = self.known(tenant)
        if self.state.by_tokens and row != NONE:
            tenant_refund(&self.state, row, value)
            if self.state.tenants[row].waiting == 0:
                self.forget_idle()

    def counter(self, tenant: str | int) -> float:
        """Its service in units of cost ÷ weight; out of line, what it would join with. 0 under round robin."""
        check_tenant(tenant)
        if not self.state.by_tokens:
            return 0.0
        cdef int32_t row = self.known(tenant)
        return level(&self.state) if row == NONE else counter_of(&self.state, row)

    def position(self, handle: int) -> int:
        """How many entries would leave before this one if none came or went (0: the next). KeyError if stale.

        Under round robin without `min_share`, takes time in proportion to the tenants in its class and the
        entries before it in its own line; otherwise plays through what will happen on a copy of the queue.
        """
        cdef int32_t entry = self.waiting_entry(handle)
        if self.state.by_tokens or self.state.min_share > 0.0:
            return pops_before(&self.state, entry)
        return entries_before(&self.state, entry)

    def tenant(self, handle: int) -> str | int:
        """Whose entry it is. KeyError if stale."""
        cdef int32_t entry = self.waiting_entry(handle)
        return <object>self.state.tenants[self.state.entries[entry].tenant].name

    def cost(self, handle: int) -> float:
        """What it was pushed with. KeyError if stale."""
        return self.state.entries[self.waiting_entry(handle)].cost

    def size(self, handle: int) -> int:
        """What it was pushed with. KeyError if stale."""
        return self.state.entries[self.waiting_entry(handle)].size

    def priority(self, handle: int) -> int:
        """What it was pushed with. KeyError if stale."""
        return self.state.entries[self.waiting_entry(handle)].priority

    def waiting(self, tenant: str | int) -> int:
        """How many entries of this tenant wait, over all classes."""
        check_tenant(tenant)
        cdef int32_t row = self.known(tenant)
        return 0 if row == NONE else self.state.tenants[row].waiting

    def statistics(self) -> Statistics:
        """A frozen summary."""
        return Statistics(
            length=self.state.length,
            capacity=self.capacity,
            tenants=self.state.waiting_tenants,
            pushed=self.pushed,
            popped=self.popped,
            discarded=self.discarded,
            refused=self.refused,
            displaced=self.displaced,
        )

    def __len__(self) -> int:
        return self.state.length

    def __contains__(self, handle: object) -> bool:
        return entry_of(&self.state, handle) != NONE

    def __sizeof__(self) -> int:
        """Bytes, with the arrays behind it and without the dicts of tenants."""
        cdef size_t a_tenant = sizeof(Tenant) + heaps_in_use(&self.state) * sizeof(int32_t)
        cdef size_t arrays = self.state.entries_room * sizeof(Entry) + self.state.tenants_room * a_tenant
        return object.__sizeof__(self) + arrays

    # What can fail comes before what cannot. Checks, memory and every Python object first, then the links:
    # so an exception finds nothing to undo. No foreign code runs in between either, for the names are
    # exactly str or int, whose hashing and comparing nobody can override.

    cdef object enter(self, tenant, cost, priority, size, bint retried):
        check_tenant(tenant)
        cdef double checked_cost = cost_of(cost)
        cdef int32_t checked_priority = priority_of(priority)
        cdef int64_t checked_size = size_of(size)
        if not retried and self.state.length >= self.capacity:
            self.refused += 1
            raise Full(f"{self.capacity} entries wait already")
        entry_reserve(&self.state)
        handle = handle_of(&self.state, self.state.free_entry)
        cdef int32_t row = self.row_of(tenant)
        entry_join(&self.state, row, checked_cost, checked_priority, checked_size, retried)
        self.pushed += 1
        return handle

    cdef object pop_fitting(self, fits):
        # The order is written down as far as it is likely to be needed, for while `fits` runs, it may change.
        # So a handle is looked up again before each question and after each answer.
        cdef int64_t *order = NULL
        cdef int64_t head = NONE
        cdef int64_t changes = 0
        cdef int64_t count, begin = 0, limit = ASKED_AT_FIRST, i
        cdef bint fitting
        cdef int32_t entry
        try:
            while True:
                if changes != self.state.changes:
                    begin, head = 0, NONE
                order = <int64_t *>grown(order, limit * sizeof(int64_t))
                changes = self.state.changes
                count = order_begin(&self.state, order, limit)
                for i in range(begin, count):
                    if entry_at(&self.state, order[i]) == NONE:
                        continue
                    handle = order[i]
                    answer = fits(handle)
                    if answer is None:
                        continue
                    fitting = answer
                    entry = entry_at(&self.state, order[i])
                    if entry == NONE:
                        continue
                    if fitting:
                        entry_passed(&self.state, entry_at(&self.state, head))
                        self.serve(entry)
                        return handle
                    if entry_at(&self.state, head) == NONE:
                        head = order[i]
                        if self.state.entries[entry].passed >= self.bypass:
                            raise IndexError("the first that does not fit was passed often enough")
                if count < limit:
                    raise IndexError("nothing may leave now")
                begin = count
                limit *= 8
        finally:
            PyMem_Free(order)

    cdef int32_t fitting(self, int64_t budget, int64_t *order) noexcept:
        # The entry that `pop_many` takes next, the one that it passes counted already; or NONE.
        cdef int32_t entry = entry_next(&self.state)
        cdef int32_t head
        cdef int64_t count, i = 0, limit = ASKED_AT_FIRST
        if entry == NONE or <int64_t>self.state.entries[entry].size <= budget:
            return entry
        head = entry
        if self.state.entries[head].passed >= self.bypass:
            return NONE
        while True:
            limit = min(limit, self.state.length)
            count = order_begin(&self.state, order, limit)
            while i < count:
                entry = <int32_t>(order[i] & 0xFFFFFFFF)
                if <int64_t>self.state.entries[entry].size <= budget:
                    entry_passed(&self.state, head)
                    return entry
                i += 1
            if count >= self.state.length:
                return NONE
            limit *= 8

    cdef int32_t known(self, tenant) except -2:
        row = self.rows.get(tenant)
        return NONE if row is None else <int32_t>row

    cdef int32_t row_of(self, tenant) except -2:
        cdef int32_t row = self.known(tenant)
        if row != NONE:
            return row
        cdef double weight = self.weights.get(tenant, 1.0)
        tenant_reserve(&self.state)
        row = self.state.free_tenant
        self.rows[tenant] = row
        tenant_begin(&self.state, <PyObject *>tenant, weight)
        return row

    cdef int serve(self, int32_t entry) except -1:
        cdef int32_t tenant = self.state.entries[entry].tenant
        entry_serve(&self.state, entry)
        self.popped += 1
        self.remember(tenant)
        return 0

    cdef int leave(self, int32_t entry) except -1:
        cdef int32_t tenant = self.state.entries[entry].tenant
        entry_leave(&self.state, entry)
        self.remember(tenant)
        return 0

    cdef int remember(self, int32_t tenant) except -1:
        # A tenant of whom nothing waits any more is kept in mind as long as that makes a difference.
        if self.state.tenants[tenant].waiting == 0:
            heap_add(&self.state, IDLE, tenant)
            self.forget_idle()
        return 0

    cdef int forget_idle(self) except -1:
        cdef Heap *idle = &self.state.heaps[IDLE]
        cdef int32_t tenant
        while idle.count > 0:
            tenant = idle.rows[0]
            if idle.count <= REMEMBERED_AT_MOST and tenant_matters(&self.state, tenant):
                break
            heap_remove(&self.state, IDLE, tenant)
            name = <object>self.state.tenants[tenant].name
            tenant_end(&self.state, tenant)
            del self.rows[name]
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


cdef int64_t size_of(size) except -1:
    cdef int overflow = 0
    cdef int64_t value = PyLong_AsLongLongAndOverflow(size, &overflow)
    if overflow or not 0 <= value <= SIZE_AT_MOST:
        raise ValueError(f"size must be in 0...{SIZE_AT_MOST}")
    return value


cdef int64_t counted(number) except -1:
    # A count or a budget: beyond what 64 bits hold, it is no bound at all.
    cdef int overflow = 0
    cdef int64_t value = PyLong_AsLongLongAndOverflow(number, &overflow)
    if overflow > 0:
        return INT64_MAX
    if overflow < 0 or value < 0:
        raise ValueError("a count and a budget must not be negative")
    return value


# Handles: the row in the low half, the row's generation in the high half ---------------------------


cdef int64_t number_of(State *state, int32_t entry) noexcept:
    return <int64_t>state.entries[entry].generation << 32 | entry


cdef object handle_of(State *state, int32_t entry):
    return number_of(state, entry)


cdef int32_t entry_of(State *state, handle) noexcept:
    cdef int overflow = 0
    cdef int64_t number
    if not PyLong_Check(handle):
        return NONE
    number = PyLong_AsLongLongAndOverflow(handle, &overflow)
    return NONE if overflow else entry_at(state, number)


cdef int32_t entry_at(State *state, int64_t number) noexcept:
    cdef int64_t row = number & 0xFFFFFFFF
    if row >= state.entries_room:
        return NONE
    if state.entries[row].tenant == NONE or state.entries[row].generation != number >> 32:
        return NONE
    return <int32_t>row


# Coming and leaving --------------------------------------------------------------------------------


cdef void entry_join(
    State *state, int32_t owner, double cost, int32_t priority, int64_t size, bint retried
) noexcept:
    # Makes the first free row an entry: last in its tenant's line, or before all of its class.
    cdef int32_t row = state.free_entry
    cdef Entry *entry = &state.entries[row]
    cdef Tenant *tenant = &state.tenants[owner]
    state.free_entry = entry.next
    entry.cost = cost
    entry.tenant = owner
    entry.size = size
    entry.passed = 0
    entry.priority = priority
    entry.retried = retried
    if tenant.waiting == 0:
        state.waiting_tenants += 1
        if tenant.places[IDLE] != NONE:
            heap_remove(state, IDLE, owner)
    if retried:
        chain_add_first(state, &state.retried[priority], row)
    else:
        line_join(state, owner, priority)
        chain_add_last(state, &tenant.lines[priority].chain, row)
        tenant.lined += 1
        state.lined += 1
    tenant.waiting += 1
    state.lengths[priority] += 1
    state.length += 1
    state.changes += 1


cdef void entry_leave(State *state, int32_t row) noexcept:
    # Takes an entry out of its chain, and sends its line and its row where they now belong.
    cdef Entry *entry = &state.entries[row]
    cdef int32_t owner = entry.tenant
    cdef int32_t priority = entry.priority
    cdef Tenant *tenant = &state.tenants[owner]
    cdef Line *line = &tenant.lines[priority]
    if entry.retried:
        chain_remove(state, &state.retried[priority], row)
    else:
        chain_remove(state, &line.chain, row)
        tenant.lined -= 1
        state.lined -= 1
        if line.chain.length == 0:
            line_leave(state, owner, priority)
    tenant.waiting -= 1
    if tenant.waiting == 0:
        state.waiting_tenants -= 1
    state.lengths[priority] -= 1
    if state.lengths[priority] == 0:
        state.credits[priority] = 0.0
    state.length -= 1
    state.changes += 1
    entry_end(state, row)


cdef void entry_serve(State *state, int32_t row) noexcept:
    # As `entry_leave`, and it was its tenant's turn.
    cdef Entry *entry = &state.entries[row]
    cdef int32_t owner = entry.tenant
    cdef int32_t priority = entry.priority
    cdef bint retried = entry.retried
    cdef double cost = entry.cost
    credits_accrue(state, priority)
    if retried:
        entry_leave(state, row)
        return
    state.moment += 1
    state.tenants[owner].turn = state.moment
    cdef double before = state.tenants[owner].counter
    if state.by_tokens:
        # First: who has just left the line, and is behind the others, would be lifted to them.
        tenant_charge(state, owner, cost)
    entry_leave(state, row)
    if state.lined == 0:
        state.floor = before  # so that what is given back of the last one's charge is not lost
    if not state.by_tokens:
        ring_turn(state, owner, priority)


cdef void entry_passed(State *state, int32_t row) noexcept:
    if row != NONE and state.entries[row].passed < BYPASS_AT_MOST:
        state.entries[row].passed = state.entries[row].passed + 1


cdef void line_join(State *state, int32_t owner, int32_t priority) noexcept:
    # Before a tenant's line gets an entry: if it has none, it becomes a member of the ring or the heap.
    cdef Tenant *tenant = &state.tenants[owner]
    if tenant.lines[priority].chain.length > 0:
        return
    if not state.by_tokens:
        ring_join(state, owner, priority)
        return
    if tenant.lined == 0:
        tenant.lift = level(state)
        tenant.counter = fmax(tenant.counter, tenant.lift)
    state.moment += 1
    tenant.lines[priority].joined = state.moment
    heap_add(state, priority, owner)


cdef void line_leave(State *state, int32_t owner, int32_t priority) noexcept:
    if not state.by_tokens:
        ring_leave(state, owner, priority)
        return
    heap_remove(state, priority, owner)
    if state.lined == 0:
        state.floor = state.tenants[owner].counter


cdef void chain_add_first(State *state, Chain *chain, int32_t row) noexcept:
    state.entries[row].previous = NONE
    state.entries[row].next = chain.first
    if chain.first == NONE:
        chain.last = row
    else:
        state.entries[chain.first].previous = row
    chain.first = row
    chain.length += 1


cdef void chain_add_last(State *state, Chain *chain, int32_t row) noexcept:
    state.entries[row].previous = chain.last
    state.entries[row].next = NONE
    if chain.last == NONE:
        chain.first = row
    else:
        state.entries[chain.last].next = row
    chain.last = row
    chain.length += 1


cdef void chain_remove(State *state, Chain *chain, int32_t row) noexcept:
    cdef int32_t previous = state.entries[row].previous
    cdef int32_t following = state.entries[row].next
    if previous == NONE:
        chain.first = following
    else:
        state.entries[previous].next = following
    if following == NONE:
        chain.last = previous
    else:
        state.entries[following].previous = previous
    chain.length -= 1


# The order of leaving ------------------------------------------------------------------------------


cdef int32_t class_next(State *state) noexcept:
    # The highest class that waits, unless one below has saved up for a pop: then the one with the most credit.
    cdef int32_t priority, first = NONE, owed = NONE
    for priority in range(CLASSES):
        if state.lengths[priority] == 0:
            continue
        if first == NONE:
            first = priority
            if state.min_share == 0.0:
                return first
        elif state.credits[priority] >= ONE_POP:
            if owed == NONE or state.credits[priority] > state.credits[owed]:
                owed = priority
    return first if owed == NONE else owed


cdef void credits_accrue(State *state, int32_t popped) noexcept:
    # At each pop every class that waits, but for the highest, is owed a little more, and the popped one less.
    cdef int32_t priority, first = NONE
    if state.min_share == 0.0:
        return
    for priority in range(CLASSES):
        if state.lengths[priority] == 0:
            continue
        if first == NONE:
            first = priority
        else:
            state.credits[priority] = fmin(state.credits[priority] + state.min_share, CREDIT_AT_MOST)
    state.credits[popped] = fmax(state.credits[popped] - 1.0, 0.0)


cdef int32_t entry_next(State *state) noexcept:
    cdef int32_t priority = class_next(state)
    cdef int32_t tenant
    if priority == NONE:
        return NONE
    if state.retried[priority].length > 0:
        return state.retried[priority].first
    tenant = state.heaps[priority].rows[0] if state.by_tokens else state.turns[priority]
    return state.tenants[tenant].lines[priority].chain.first


cdef int64_t order_begin(State *state, int64_t *order, int64_t limit) noexcept:
    # The handles of the first `limit` entries in the order in which they are asked; how many there are.
    cdef int32_t urgent = class_next(state)
    cdef int64_t count = 0
    cdef int32_t priority
    if urgent != NONE:
        count = order_class(state, urgent, order, 0, limit)
    for priority in range(CLASSES):
        if priority != urgent:
            count = order_class(state, priority, order, count, limit)
    return count


cdef int64_t order_class(
    State *state, int32_t priority, int64_t *order, int64_t count, int64_t limit
) noexcept:
    cdef int32_t tenant, i
    if count == limit or state.lengths[priority] == 0:
        return count
    count = order_chain(state, &state.retried[priority], order, count, limit)
    if state.by_tokens:
        heap_sort(state, priority)
        for i in range(state.heaps[priority].count):
            tenant = state.heaps[priority].rows[i]
            count = order_chain(state, &state.tenants[tenant].lines[priority].chain, order, count, limit)
        return count
    tenant = state.turns[priority]
    while tenant != NONE and count < limit:
        count = order_chain(state, &state.tenants[tenant].lines[priority].chain, order, count, limit)
        tenant = ring_after(state, tenant, priority)
    return count


cdef int64_t order_chain(State *state, Chain *chain, int64_t *order, int64_t count, int64_t limit) noexcept:
    cdef int32_t row = chain.first
    while row != NONE and count < limit:
        order[count] = number_of(state, row)
        count += 1
        row = state.entries[row].next
    return count


cdef int32_t line_longest(State *state, int32_t priority) noexcept:
    # The tenant with the most entries in this class; of several, the one whose turn is furthest away.
    cdef int32_t longest = NONE
    cdef int32_t tenant, length, most = 0, i
    if state.by_tokens:
        for i in range(state.heaps[priority].count):
            tenant = state.heaps[priority].rows[i]
            length = state.tenants[tenant].lines[priority].chain.length
            if length > most or (length == most and precedes(state, priority, longest, tenant)):
                longest, most = tenant, length
        return longest
    tenant = state.turns[priority]
    while tenant != NONE:
        length = state.tenants[tenant].lines[priority].chain.length
        if length >= most:
            longest, most = tenant, length
        tenant = ring_after(state, tenant, priority)
    return longest


cdef int64_t entries_before(State *state, int32_t row) noexcept:
    # Two tenants alternate until one line ends. So before the entry of rank r in its line leave r of its own,
    # and of every other line as many, and one more if that tenant's turn comes earlier; but at most the line.
    cdef bint retried = state.entries[row].retried
    cdef int32_t owner = state.entries[row].tenant
    cdef int32_t priority = state.entries[row].priority
    cdef int64_t rank = 0, before = 0
    cdef int32_t tenant, i
    for i in range(priority):
        before += state.lengths[i]
    while state.entries[row].previous != NONE:
        row = state.entries[row].previous
        rank += 1
    if retried:
        return before + rank
    before += state.retried[priority].length
    cdef bint earlier = True
    tenant = state.turns[priority]
    while tenant != NONE:
        if tenant == owner:
            before += rank
            earlier = False
        else:
            before += min(<int64_t>state.tenants[tenant].lines[priority].chain.length, rank + earlier)
        tenant = ring_after(state, tenant, priority)
    return before


cdef int64_t pops_before(State *state, int32_t row) except -1:
    cdef State future
    cdef int64_t before = 0
    cdef int32_t entry
    state_copy(&future, state)
    entry = entry_next(&future)
    while entry != row:
        entry_serve(&future, entry)
        before += 1
        entry = entry_next(&future)
    state_end(&future)
    return before


# Round robin: rings of tenants, one a class --------------------------------------------------------


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


cdef void ring_turn(State *state, int32_t tenant, int32_t priority) noexcept:
    # After a tenant had its turn; it may have left the ring with its last entry. A second turn in a round means
    # that nobody who could be served was still to be served: the round is over, and this is the next one's first.
    cdef Line *line = &state.tenants[tenant].lines[priority]
    if line.served == state.rounds[priority]:
        state.rounds[priority] += 1
        state.served[priority] = NONE
    line.served = state.rounds[priority]
    if line.chain.length == 0:
        return
    if state.turns[priority] != tenant:
        ring_leave(state, tenant, priority)
        ring_join(state, tenant, priority)
        return
    # The ring is circular: to go to its back is to let the next one be the front.
    state.turns[priority] = line.ring_next
    if state.served[priority] == NONE:
        state.served[priority] = tenant


cdef int32_t ring_after(State *state, int32_t tenant, int32_t priority) noexcept:
    tenant = state.tenants[tenant].lines[priority].ring_next
    return NONE if tenant == state.turns[priority] else tenant


# Tokens: counters, and heaps of tenants, one a class -----------------------------------------------


cdef double level(State *state) noexcept:
    # What a newcomer's counter is lifted to: the least of those in line, or what was the least at last.
    cdef double least = INFINITY
    cdef int32_t priority
    if not state.by_tokens or state.lined == 0:
        return state.floor
    for priority in range(CLASSES):
        if state.heaps[priority].count > 0:
            least = fmin(least, state.tenants[state.heaps[priority].rows[0]].counter)
    return least


cdef double counter_of(State *state, int32_t tenant) noexcept:
    cdef double counter = state.tenants[tenant].counter
    return counter if state.tenants[tenant].lined > 0 else fmax(counter, level(state))


cdef void tenant_charge(State *state, int32_t tenant, double cost) noexcept:
    cdef double counter = counter_of(state, tenant) + cost / state.tenants[tenant].weight
    state.tenants[tenant].counter = fmin(counter, COUNTER_AT_MOST)
    tenant_moved(state, tenant)


cdef void tenant_refund(State *state, int32_t tenant, double cost) noexcept:
    cdef double least = state.tenants[tenant].lift if state.tenants[tenant].lined > 0 else level(state)
    cdef double counter = counter_of(state, tenant) - cost / state.tenants[tenant].weight
    state.tenants[tenant].counter = fmax(counter, least)
    tenant_moved(state, tenant)


cdef void tenant_moved(State *state, int32_t tenant) noexcept:
    # Its counter or its turn is not what it was: each heap it is in puts it where it belongs.
    cdef int32_t heap
    for heap in range(CLASSES + 1):
        if state.tenants[tenant].places[heap] != NONE:
            heap_settle(state, heap, state.tenants[tenant].places[heap])
    state.changes += 1


cdef bint tenant_matters(State *state, int32_t row) noexcept:
    # Whether it makes a difference to remember an idle tenant.
    cdef Tenant *tenant = &state.tenants[row]
    cdef int32_t priority
    cdef double least
    if state.by_tokens:
        least = level(state)
        return tenant.counter > least or (tenant.counter == least and tenant.turn > 0)
    for priority in range(CLASSES):
        if tenant.lines[priority].served == state.rounds[priority]:
            return True
    return False


cdef bint precedes(State *state, int32_t heap, int32_t one, int32_t other) noexcept:
    cdef Tenant *a = &state.tenants[one]
    cdef Tenant *b = &state.tenants[other]
    if a.counter != b.counter:
        return a.counter < b.counter
    if a.turn != b.turn:
        return a.turn < b.turn
    if heap == IDLE:
        return one < other
    return a.lines[heap].joined < b.lines[heap].joined


cdef void heap_add(State *state, int32_t heap, int32_t tenant) noexcept:
    cdef Heap *members = &state.heaps[heap]
    members.rows[members.count] = tenant
    members.count += 1
    heap_settle(state, heap, members.count - 1)


cdef void heap_remove(State *state, int32_t heap, int32_t tenant) noexcept:
    cdef Heap *members = &state.heaps[heap]
    cdef int32_t place = state.tenants[tenant].places[heap]
    members.count -= 1
    state.tenants[tenant].places[heap] = NONE
    if place < members.count:
        members.rows[place] = members.rows[members.count]
        heap_settle(state, heap, place)


cdef void heap_settle(State *state, int32_t heap, int32_t place) noexcept:
    # Moves one member up or down until none precedes its parent.
    cdef int32_t *rows = state.heaps[heap].rows
    cdef int32_t count = state.heaps[heap].count
    cdef int32_t tenant = rows[place]
    cdef int32_t child
    while place > 0 and precedes(state, heap, tenant, rows[(place - 1) // 2]):
        heap_put(state, heap, place, rows[(place - 1) // 2])
        place = (place - 1) // 2
    while True:
        child = 2 * place + 1
        if child >= count:
            break
        if child + 1 < count and precedes(state, heap, rows[child + 1], rows[child]):
            child += 1
        if not precedes(state, heap, rows[child], tenant):
            break
        heap_put(state, heap, place, rows[child])
        place = child
    heap_put(state, heap, place, tenant)


cdef void heap_sort(State *state, int32_t heap) noexcept:
    # What is sorted is a heap, too. By Shell's method: in place, and at once if it was sorted already.
    cdef int32_t *rows = state.heaps[heap].rows
    cdef int32_t count = state.heaps[heap].count
    cdef int32_t gap = 1
    cdef int32_t i, place, tenant
    while gap < count // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(gap, count):
            tenant = rows[i]
            place = i
            while place >= gap and precedes(state, heap, tenant, rows[place - gap]):
                heap_put(state, heap, place, rows[place - gap])
                place -= gap
            heap_put(state, heap, place, tenant)
        gap //= 3


cdef void heap_put(State *state, int32_t heap, int32_t place, int32_t tenant) noexcept:
    state.heaps[heap].rows[place] = tenant
    state.tenants[tenant].places[heap] = place


# Rows: arrays that double, with the free rows chained ----------------------------------------------


cdef void state_begin(State *state) noexcept:
    # Afterwards it is empty, and has the memory that it had.
    cdef int priority
    state.free_entry = state.free_tenant = NONE
    state.length = state.lined = state.waiting_tenants = 0
    state.floor = 0.0
    for priority in range(CLASSES):
        state.lengths[priority] = 0
        state.retried[priority].first = state.retried[priority].last = NONE
        state.retried[priority].length = 0
        state.turns[priority] = state.served[priority] = NONE
        state.rounds[priority] = 1
        state.credits[priority] = 0.0
        state.heaps[priority].count = 0
    state.heaps[IDLE].count = 0


cdef void state_clear(State *state) noexcept:
    # From the last row to the first, so that the next entries have the first rows.
    cdef int32_t row
    state_begin(state)
    state.changes += 1
    for row in range(state.entries_room - 1, -1, -1):
        if state.entries[row].tenant != NONE:
            entry_end(state, row)
        elif state.entries[row].generation < INT32_MAX:
            entry_free(state, row)
    for row in range(state.tenants_room - 1, -1, -1):
        tenant_end(state, row)


cdef void state_end(State *state) noexcept:
    cdef int heap
    PyMem_Free(state.entries_memory)
    PyMem_Free(state.tenants)
    for heap in range(CLASSES + 1):
        PyMem_Free(state.heaps[heap].rows)


cdef int state_copy(State *copy, State *state) except -1:
    cdef int heap
    copy[0] = state[0]
    copy.entries_memory = NULL
    copy.tenants = NULL
    for heap in range(CLASSES + 1):
        copy.heaps[heap].rows = NULL
    try:
        copy.entries_memory = copied(state.entries, state.entries_room * sizeof(Entry))
        copy.entries = <Entry *>copy.entries_memory
        copy.tenants = <Tenant *>copied(state.tenants, state.tenants_room * sizeof(Tenant))
        for heap in range(CLASSES + 1):
            if state.heaps[heap].rows != NULL:
                copy.heaps[heap].rows = <int32_t *>copied(
                    state.heaps[heap].rows, state.tenants_room * sizeof(int32_t)
                )
    except:
        state_end(copy)
        raise
    return 0


cdef int entry_reserve(State *state) except -1:
    # Afterwards `free_entry` is a row.
    cdef int32_t room, row
    if state.free_entry != NONE:
        return 0
    room = doubled(state.entries_room)
    cdef void *memory = grown(NULL, room * sizeof(Entry) + CACHE_LINE)
    cdef Entry *entries = <Entry *>((<size_t>memory + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE)
    if state.entries_room:
        memcpy(entries, state.entries, state.entries_room * sizeof(Entry))
    PyMem_Free(state.entries_memory)
    state.entries_memory = memory
    state.entries = entries
    for row in range(room - 1, state.entries_room - 1, -1):
        state.entries[row].generation = 1
        entry_free(state, row)
    state.entries_room = room
    return 0


cdef void entry_end(State *state, int32_t row) noexcept:
    # A row whose generations are used up is never used again: one row lost in two thousand million uses.
    cdef Entry *entry = &state.entries[row]
    entry.tenant = NONE
    if entry.generation < INT32_MAX:
        entry.generation += 1
        entry_free(state, row)


cdef void entry_free(State *state, int32_t row) noexcept:
    # The row freed last is used first, for it is in the cache.
    state.entries[row].tenant = NONE
    state.entries[row].next = state.free_entry
    state.free_entry = row


cdef int tenant_reserve(State *state) except -1:
    # Afterwards `free_tenant` is a row, and every heap has room for all tenants.
    cdef int32_t room, row, heap
    if state.free_tenant != NONE:
        return 0
    room = doubled(state.tenants_room)
    for heap in range(CLASSES + 1 - heaps_in_use(state), CLASSES + 1):
        state.heaps[heap].rows = <int32_t *>grown(state.heaps[heap].rows, room * sizeof(int32_t))
    state.tenants = <Tenant *>grown(state.tenants, room * sizeof(Tenant))
    for row in range(room - 1, state.tenants_room - 1, -1):
        tenant_end(state, row)
    state.tenants_room = room
    return 0


cdef int32_t heaps_in_use(State *state) noexcept:
    # Under round robin only that of the idle, which is the last.
    return CLASSES + 1 if state.by_tokens else 1


cdef void tenant_begin(State *state, PyObject *name, double weight) noexcept:
    # Makes the first free row a tenant.
    cdef Tenant *tenant = &state.tenants[state.free_tenant]
    cdef int i
    state.free_tenant = tenant.next_free
    tenant.name = name
    tenant.counter = tenant.lift = 0.0
    tenant.weight = weight
    tenant.turn = 0
    tenant.waiting = tenant.lined = 0
    for i in range(CLASSES + 1):
        tenant.places[i] = NONE
    for i in range(CLASSES):
        tenant.lines[i].chain.first = tenant.lines[i].chain.last = NONE
        tenant.lines[i].chain.length = 0
        tenant.lines[i].served = 0


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


cdef void *copied(void *rows, size_t size) except NULL:
    cdef void *copy = PyMem_Malloc(size)
    if copy == NULL:
        raise MemoryError
    memcpy(copy, rows, size)
    return copy
