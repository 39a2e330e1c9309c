# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: annotation_typing=False, auto_pickle=False, autotestdict=False
# cython: binding=False, embedsignature=True, embedsignature.format=clinic
"""The fair queue: tenants take turns, and a tenant's own entries are first in, first out.

Owns the order and the bound of the waiting entries. An entry is a handle, and the caller stores what the
handle stands for. The queue has no notion of jobs, clocks, nodes or threads. Each method is atomic under the
GIL, except `pop(fits)`, which calls back and then validates its entries again.

Promises:

- A class (`priority`, 0 first) is served before the classes below it. With `min_share`, each lower class that
  waits gets at least that fraction of the pops, as long as the fractions sum to at most 1.
- Round robin: within a class the tenants form a ring, and turns come in rounds. The tenant just served goes
  to the back, and an empty one leaves. One that joins goes before those that this round has served, or last
  if it was served itself. So A, just served, goes after B, not yet served, even if A's line was empty in
  between: a tenant gains no turn by leaving and rejoining.
- Tokens: the tenant with the smallest counter is next; of several, the least recently served. A counter is
  service in units of cost ÷ weight, one for all classes. A tenant is in line while it has entries that are
  not retried. When it joins, its counter is lifted to the smallest in line, so idling earns nothing; only a
  refund lowers a counter. Counters, and so the lift, include estimates for entries whose true cost is not
  known yet, as in VTC with predicted lengths [Sheng et al., OSDI'24]. A later refund favors the tenants that
  were charged, by no more than the refund.
- A retried entry was charged when it first left. It leaves before the others of its class, the latest first,
  and takes neither a turn nor a charge; it is never refused and never displaced.
- `push`, `push_front`, `pop` and `discard` take constant time, or under tokens the logarithm of the waiting
  tenants. (A discarded entry is invalid at once; up to 64 are unlinked together, or at the next other call.)
- A handle is never reused, so a stale one is recognized and harmless.
- A method that raises has changed nothing, except that `push` counts refusals.
- Memory grows with the most entries that ever waited at once, not with all entries or tenants ever seen.
"""

from typing import NamedTuple

from cpython.float cimport PyFloat_AS_DOUBLE, PyFloat_CheckExact
from cpython.long cimport PyLong_AsLongAndOverflow, PyLong_AsLongLongAndOverflow, PyLong_Check
from cpython.dict cimport PyDict_GetItemWithError
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.object cimport PyObject
from libc.math cimport INFINITY, fmax, fmin, isfinite
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy
cimport cython


class Full(Exception):
    """The queue has `capacity` entries already."""


class Statistics(NamedTuple):
    """The length and counters since creation: pushed = length + popped + discarded + displaced."""

    length: int
    capacity: int
    tenants: int
    pushed: int
    popped: int
    discarded: int
    refused: int
    displaced: int


include "fairqueue/state.pxi"


@cython.final
@cython.no_gc  # it refers to strings and numbers only, so it cannot be part of a reference cycle
cdef class FairQueue:
    """A queue of at most `capacity` entries (0: every push is refused), popped in turn by tenant.

    `fairness` is "roundRobin" or "tokens". `bypass` bounds how often an entry that does not fit is passed
    over. `slack`: how many entries longer than the newcomer's a line of its class must be to lose one.
    """

    cdef State state
    cdef dict rows  # tenant -> its row, for tenants that wait or are remembered
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
        """Add an entry at the end of its tenant's line and return its handle.

        `cost` is what its pop charges under tokens, `size` what it takes of a memory budget, in any unit.
        `Full` if the queue has `capacity` entries; TypeError unless `tenant` is exactly a str or an int;
        ValueError unless `cost` is finite and not negative, `priority` is in 0...7 and `size` in 0...2⁴⁸ - 1.
        """
        return self.enter(tenant, cost, priority, size, False)

    def push_front(self, tenant: str | int, cost: float = 1.0, *, priority: int = 1, size: int = 0) -> int:
        """Add a retried entry before all others of its class, like `push`, but never raise `Full`.

        The entry took its turn and was charged when it first left; neither happens again.
        """
        return self.enter(tenant, cost, priority, size, True)

    def displace(self, tenant: str | int, *, priority: int = 1) -> int | None:
        """Remove an entry of the tenant with the most, to make room for a newcomer of this tenant and class.

        Remove the newest entry of the longest line in the lowest class (of several, the line whose turn is
        furthest away), and return its handle. In the newcomer's own class that line must be at least `slack`
        longer than all that the newcomer's tenant has waiting. Entries of higher classes and retried entries
        are never removed. Return None, and change nothing, if there is no such entry. The caller checks first
        whether the queue is full. Takes time in proportion to the tenants.
        """
        check_tenant(tenant)
        cdef int32_t own_priority = priority_of(priority)
        cdef int32_t other, row
        self.settle()
        for other in range(CLASSES - 1, own_priority - 1, -1):
            row = line_longest(&self.state, other)
            if row == NONE:
                continue
            line = &self.state.tenants[row].lines[other].chain
            if other == own_priority and line.length < self.waiting(tenant) + self.slack:
                continue
            handle = handle_of(&self.state, line.last)
            entry_gone(&self.state, line.last)
            self.settle()
            self.displaced += 1
            return handle
        return None

    def pop(self, fits=None) -> int:
        """Remove the next entry and return its handle, which is then stale. IndexError if there is none.

        `fits(handle)` decides about an entry. True: it leaves. None: it cannot leave now, for a reason of its
        own, and is skipped. False: it does not fit now, and is passed over. Entries are tried class by class,
        tenant by tenant, a tenant's own from first to last. The first with False may be passed by `bypass`
        pops in total; after that no entry behind it leaves before it does. The turn and the charge go to the
        tenant whose entry left.

        If `fits` raises, nothing has changed. `fits` and other threads may change the queue meanwhile: an
        entry that has left is not tried or returned, a new one may not be tried, and some may be tried twice.
        """
        cdef int32_t entry
        if fits is not None:
            return self.pop_fitting(fits)
        self.settle()
        entry = entry_next(&self.state)
        if entry == NONE:
            raise IndexError("empty")
        handle = handle_of(&self.state, entry)
        self.serve(entry)
        return handle

    def pop_many(self, max_count: int, memory_budget: int) -> list[int]:
        """Remove up to `max_count` entries with a total size of at most `memory_budget`, in fair order.

        Like `pop(fits)` where an entry fits if its size is within the rest of the budget. One that does not
        fit is passed over, at most `bypass` times over all calls. Then those behind it wait until a call's
        budget is enough for it, or it is discarded. Do not push an entry larger than any budget.
        """
        cdef int64_t count = counted(max_count)
        cdef int64_t budget = counted(memory_budget)
        cdef int64_t *order
        cdef int32_t entry
        handles = []
        self.settle()
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
                budget -= self.state.loads[entry].size
                self.serve(entry)
        except MemoryError:
            if not handles:
                raise
        finally:
            PyMem_Free(order)
        return handles

    def discard(self, handle: int, /) -> bool:
        """Remove one entry from any position. Return False, and change nothing, if the handle is stale."""
        cdef int32_t entry = entry_of(&self.state, handle)
        if entry == NONE:
            return False
        entry_gone(&self.state, entry)
        self.discarded += 1
        if self.state.gone_count == GONE_AT_MOST:
            self.settle()
        return True

    def clear(self) -> None:
        """Discard every entry, and reset rounds and counters. Weights stay."""
        self.settle()
        self.discarded += self.state.length
        state_clear(&self.state)
        self.rows.clear()

    def set_weight(self, tenant: str | int, weight: float) -> None:
        """Divide the future charges of this tenant by `weight`: finite and above 0; 1 by default.

        The weight stays until it is set to 1. ValueError if 65,536 other tenants have a weight already.
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
        """Charge a tenant for what it used beyond the charges of its pops. No effect under round robin."""
        check_tenant(tenant)
        cdef double value = cost_of(cost)
        cdef int32_t row
        if not self.state.by_tokens:
            return
        self.settle()
        row = self.known(tenant)
        if row == NONE:
            row = self.row_of(tenant)
            heap_add(&self.state, IDLE, row)
        tenant_charge(&self.state, row, value)
        if self.state.tenants[row].waiting == 0:
            self.forget_idle()

    def refund(self, tenant: str | int, cost: float) -> None:
        """Subtract from a tenant's counter what was charged but not used. No effect under round robin.

        The level is the smallest counter in line. A counter in line falls at most to the level at which its
        tenant joined, and one out of line at most to the current level, as if the refund had come before.
        """
        check_tenant(tenant)
        cdef double value = cost_of(cost)
        self.settle()
        cdef int32_t row = self.known(tenant)
        if self.state.by_tokens and row != NONE:
            tenant_refund(&self.state, row, value)
            if self.state.tenants[row].waiting == 0:
                self.forget_idle()

    def counter(self, tenant: str | int) -> float:
        """Return a tenant's counter, or out of line the one it would join with. 0 under round robin."""
        check_tenant(tenant)
        if not self.state.by_tokens:
            return 0.0
        self.settle()
        cdef int32_t row = self.known(tenant)
        return level(&self.state) if row == NONE else counter_of(&self.state, row)

    def position(self, handle: int) -> int:
        """Return how many entries leave before this one if nothing changes (0: the next). KeyError if stale.

        Under round robin without `min_share`, takes time in proportion to the tenants in its class and the
        entries before it in its own line. Otherwise the pops are simulated on a copy of the queue.
        """
        cdef int32_t entry = self.waiting_entry(handle)
        self.settle()
        if self.state.by_tokens or self.state.min_share > 0.0:
            return pops_before(&self.state, entry)
        return entries_before(&self.state, entry)

    def ahead(self, handle: int) -> list[int]:
        """Return the handles that leave before this one if nothing changes, in order. KeyError if stale.

        Simulates the pops on a copy of the queue. Takes the time of the copy, and then time in proportion to
        the entries before it; under tokens times the logarithm of the waiting tenants.
        """
        cdef int32_t entry = self.waiting_entry(handle)
        self.settle()
        return handles_before(&self.state, entry)

    def tenant(self, handle: int) -> str | int:
        """Return the tenant of an entry. KeyError if stale."""
        cdef int32_t entry = self.waiting_entry(handle)
        return <object>self.state.tenants[self.state.entries[entry].tenant].name

    def cost(self, handle: int) -> float:
        """Return the cost that the entry was pushed with. KeyError if stale."""
        return self.state.loads[self.waiting_entry(handle)].cost

    def size(self, handle: int) -> int:
        """Return the size that the entry was pushed with. KeyError if stale."""
        return self.state.loads[self.waiting_entry(handle)].size

    def priority(self, handle: int) -> int:
        """Return the priority that the entry was pushed with. KeyError if stale."""
        return self.state.entries[self.waiting_entry(handle)].priority

    def waiting(self, tenant: str | int) -> int:
        """Return how many entries of this tenant wait, over all classes."""
        check_tenant(tenant)
        self.settle()
        cdef int32_t row = self.known(tenant)
        return 0 if row == NONE else self.state.tenants[row].waiting

    def statistics(self) -> Statistics:
        """Return a frozen summary."""
        self.settle()
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
        return self.state.length - self.state.gone_count

    def __contains__(self, handle: object) -> bool:
        return entry_of(&self.state, handle) != NONE

    def __sizeof__(self) -> int:
        """Return the bytes, including the arrays but not the dicts of tenants."""
        cdef size_t an_entry = sizeof(Entry) + sizeof(Load) + sizeof(uint8_t)
        cdef size_t a_tenant = sizeof(Tenant) + heaps_in_use(&self.state) * sizeof(int32_t)
        cdef size_t arrays = self.state.entries_room * an_entry + self.state.tenants_room * a_tenant
        return object.__sizeof__(self) + arrays + blocks(self.state.entries_room) * sizeof(int32_t)

    # Steps that can fail come first: checks, memory and every Python object, and only then the links. So an
    # exception leaves nothing to undo. No foreign code runs in between, because tenants are exactly str or
    # int, whose hashing and comparison cannot be overridden.

    cdef object enter(self, tenant, cost, priority, size, bint retried):
        check_tenant(tenant)
        cdef double checked_cost = cost_of(cost)
        cdef int32_t checked_priority = priority_of(priority)
        cdef int64_t checked_size = size_of(size)
        self.settle()
        if not retried and self.state.length >= self.capacity:
            self.refused += 1
            raise Full(f"{self.capacity} entries wait already")
        entry_reserve(&self.state)
        cdef int32_t entry = self.state.free_entry
        handle = generation_next(&self.state, entry) << 32 | entry
        cdef int32_t row = self.row_of(tenant)
        entry_join(&self.state, row, checked_cost, checked_priority, checked_size, retried)
        self.pushed += 1
        return handle

    cdef object pop_fitting(self, fits):
        # Copy the order as far as it is likely to be needed, because it may change while `fits` runs. For the
        # same reason each handle is validated before and after the call.
        cdef int64_t *order = NULL
        cdef int64_t head = NONE
        cdef int64_t changes = 0
        cdef int64_t count, begin = 0, limit = ASKED_AT_FIRST, i
        cdef bint fitting
        cdef int32_t entry
        try:
            while True:
                self.settle()
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
                        self.settle()
                        entry_passed(&self.state, entry_at(&self.state, head))
                        self.serve(entry)
                        return handle
                    if entry_at(&self.state, head) == NONE:
                        head = order[i]
                        if self.state.loads[entry].passed >= self.bypass:
                            raise IndexError("the first that does not fit was passed often enough")
                if count < limit:
                    raise IndexError("nothing may leave now")
                begin = count
                limit *= 8
        finally:
            PyMem_Free(order)

    cdef int32_t fitting(self, int64_t budget, int64_t *order) noexcept:
        # Return the entry that `pop_many` takes next, or NONE. If that passes over another, count it.
        cdef int32_t entry = entry_next(&self.state)
        cdef int32_t head
        cdef int64_t count, i = 0, limit = ASKED_AT_FIRST
        if entry == NONE or <int64_t>self.state.loads[entry].size <= budget:
            return entry
        head = entry
        if self.state.loads[head].passed >= self.bypass:
            return NONE
        while True:
            limit = min(limit, self.state.length)
            count = order_begin(&self.state, order, limit)
            while i < count:
                entry = <int32_t><uint32_t>order[i]
                if <int64_t>self.state.loads[entry].size <= budget:
                    entry_passed(&self.state, head)
                    return entry
                i += 1
            if count >= self.state.length:
                return NONE
            limit *= 8

    cdef inline int32_t known(self, tenant) except -2:
        cdef PyObject *row = PyDict_GetItemWithError(self.rows, tenant)
        return NONE if row == NULL else <int32_t>PyLong_AsLong(row)

    cdef inline int32_t row_of(self, tenant) except -2:
        cdef int32_t row = self.known(tenant)
        if row != NONE:
            return row
        cdef double weight = self.weights.get(tenant, 1.0)
        tenant_reserve(&self.state)
        row = self.state.free_tenant
        self.rows[tenant] = row
        tenant_begin(&self.state, <PyObject *>tenant, weight)
        return row

    cdef inline int serve(self, int32_t entry) except -1:
        cdef int32_t tenant = self.state.entries[entry].tenant
        entry_stale(&self.state, entry)
        entry_serve(&self.state, entry)
        self.popped += 1
        self.remember(tenant)
        return 0

    cdef inline int settle(self) except -1:
        # Unlink discarded entries. Call this before reading more than one entry.
        return 0 if self.state.gone_count == 0 else self.settle_gone()

    cdef int settle_gone(self) except -1:
        # Only `discard` was called in between, so the result is the same as if each had left at once.
        cdef int32_t count = self.state.gone_count
        cdef int32_t i, entry, tenant
        for i in range(max(count - GONE_ALONE, 0), count):
            neighbours_fetch(&self.state, self.state.gone[i])
        for i in range(count):
            entry = self.state.gone[i]
            tenant = self.state.entries[entry].tenant
            entry_leave(&self.state, entry)
            self.remember(tenant)
        self.state.gone_count = 0
        return 0

    cdef inline int remember(self, int32_t tenant) except -1:
        # Remember a tenant without waiting entries as long as that affects the order.
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


cdef inline int check_tenant(tenant) except -1:
    if type(tenant) is not str and type(tenant) is not int:
        raise TypeError(f"a tenant is a str or an int, not {type(tenant).__name__}")
    return 0


cdef inline double cost_of(cost) except -1.0:
    cdef double value
    if PyFloat_CheckExact(cost):
        value = PyFloat_AS_DOUBLE(cost)
    else:
        try:
            value = cost
        except OverflowError:
            value = -1.0
    if not isfinite(value) or value < 0.0:
        raise ValueError("cost must be finite and not negative")
    return value


cdef inline int32_t priority_of(priority) except -1:
    cdef int overflow = 0
    cdef long value = PyLong_AsLongAndOverflow(priority, &overflow)
    if overflow or not 0 <= value < CLASSES:
        raise ValueError(f"priority must be in 0...{CLASSES - 1}")
    return <int32_t>value


cdef inline int64_t size_of(size) except -1:
    cdef int overflow = 0
    cdef int64_t value = PyLong_AsLongLongAndOverflow(size, &overflow)
    if overflow or not 0 <= value <= SIZE_AT_MOST:
        raise ValueError(f"size must be in 0...{SIZE_AT_MOST}")
    return value


cdef int64_t counted(number) except -1:
    # Convert a count or a budget; one beyond 64 bits is no bound at all.
    cdef int overflow = 0
    cdef int64_t value = PyLong_AsLongLongAndOverflow(number, &overflow)
    if overflow > 0:
        return INT64_MAX
    if overflow < 0 or value < 0:
        raise ValueError("a count and a budget must not be negative")
    return value


# The rest is plain functions on `State`, grouped by concern.

include "fairqueue/entries.pxi"
include "fairqueue/order.pxi"
include "fairqueue/rings.pxi"
include "fairqueue/counters.pxi"
include "fairqueue/rows.pxi"
