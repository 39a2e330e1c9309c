# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, annotation_typing=False
# cython: auto_pickle=False, autotestdict=False, binding=False, embedsignature=True, embedsignature.format=clinic
"""The fair queue: tenants take turns, and a tenant's own entries are first in, first out.

An entry is a handle, which is never reused; the caller stores what it stands for. Each method is atomic under
the GIL, except `pop(fits)`, which calls back. A method that raises has changed nothing, except that `push`
counts refusals. Memory grows with the most entries that ever waited at once.

- A class (`priority`, 0 first) is served before the classes below it. With `min_share`, each lower class that
  waits gets at least that fraction of the pops, as long as the fractions sum to at most 1.
- Round robin: within a class, tenants form a ring, and turns come in rounds. A tenant that joins goes before
  those that this round has served, or last if it was served itself.
- Tokens: the tenant with the smallest counter is next; of several, the least recently served. A counter is service in
  units of cost, one for all classes. A tenant is in line while it has entries that are not retried. When it joins, its
  counter is lifted to the smallest in line. Costs may be estimates, as in VTC [Sheng et al., OSDI'24]. To weight
  tenants, divide each cost by its tenant's weight.
- Teams: a tenant is a str or an int, or in a team a pair (team, tenant). Teams, and tenants without one, take turns as
  above; at each turn of a team its members take turns among themselves, with rounds, counters and a smallest counter
  of their own. Without teams nothing differs. Counters in one team do not compare with those in another. A team's
  counter grows by the `team_cost` of its entries: to weight teams, divide it by the team's weight. The queue remembers
  at most 2048 idle tenants of each team, and each team that it remembers tenants of, so the caller bounds the teams.
- An entry of several pops (`count`) takes a turn and a charge at each, and leaves at the last.
- A begun entry is before the others of its tenant, and is never displaced. An entry has begun after its first pop, or
  is pushed so, as one that gave back what it had been given.
- A retried entry was charged when it first left. It leaves before the others of its class, the latest first,
  takes neither a turn nor a charge, and is never displaced.
- `push`, `pop` and `discard` take constant time, or under tokens the logarithm of the most tenants at once.
"""

from collections import namedtuple

cimport cython

from fairqueue.order cimport *
from fairqueue.queue cimport *
from fairqueue.tenants cimport *

cdef enum:
    REMEMBERED_AT_MOST = 2048
    SLACK = 2  # see displace


class QueueFullError(Exception):
    """The queue has `capacity` entries already."""


FairQueueEntry = namedtuple(
    "FairQueueEntry", "tenant cost priority size kind retried left begun team_cost", module=__name__
)


@cython.final
@cython.no_gc  # it refers to strings and numbers only, so it cannot be part of a reference cycle
cdef class FairQueue:
    """A queue of at most `capacity` entries (0: every push is refused), popped in turn by tenant.

    `fairness` is "roundRobin" or "tokens". `bypass` bounds how often an entry that does not fit is passed over.
    `popped`, `discarded`, `refused` and `displaced` count since creation.
    """

    cdef Queue queue
    cdef dict rows  # tenant -> its row, if it waits or is remembered
    cdef dict teams  # team -> its row, if it has members or is remembered
    cdef readonly int64_t capacity, popped, discarded, refused, displaced
    cdef int64_t bypass

    def __cinit__(self, *, capacity: int, fairness: str = "roundRobin", min_share: float = 0.0, bypass: int = 8):
        self.capacity = integer_of(capacity, INT64_MAX, "capacity")
        self.bypass = integer_of(bypass, 255, "bypass")
        if fairness not in ("roundRobin", "tokens"):
            raise ValueError(f"fairness must be roundRobin or tokens, not {fairness}")
        if not 0.0 <= min_share < 1.0:
            raise ValueError(f"min_share must be at least 0 and less than 1, not {min_share}")
        self.rows, self.teams = {}, {}
        self.queue.by_tokens = fairness == "tokens"
        self.queue.nodes_size = (2 * RINGS + 1) * sizeof(int32_t) if self.queue.by_tokens else 0
        self.queue.min_share = min_share
        self.queue.free_entry = self.queue.free_tenant = self.queue.free_group = NONE
        group_begin(&self.queue, NONE)  # TOP

    def __dealloc__(self):
        PyMem_Free(self.queue.entries)
        PyMem_Free(self.queue.loads)
        PyMem_Free(self.queue.tenants)
        for i in range(self.queue.groups_capacity):
            PyMem_Free(self.queue.groups[i].nodes)
        PyMem_Free(self.queue.groups)

    def push(
        self,
        tenant: str | int | tuple[str | int, str | int],
        cost: float = 1.0,
        *,
        priority: int = 1,
        size: int = 0,
        kind: int = 0,
        count: int = 1,
        bint retried=False,
        bint begun=False,
        team_cost: float | None = None,
    ) -> int:
        """Add an entry at the end of its tenant's line, and return its handle.

        A begun one joins at the front of the line, a retried one before its class. Each of `count` pops charges
        `cost` under tokens, and the tenant's team `team_cost`, by default the same; `size` is what it takes of a memory
        budget; `kind` lets `pop` skip it. `QueueFullError` if full, except for a retried or begun entry; TypeError
        unless `tenant` is exactly a str, an int or a pair of them; ValueError unless costs are finite and not negative,
        `priority` is in 0...7, `size` in 0...2⁴⁸ - 1, `kind` in 0...63 and `count` in 1...2³¹ - 1; OverflowError if a
        float cannot hold a cost.
        """
        # All that can fail precedes any change of the links. Conversions to numbers may run foreign code, so they come
        # first; a tenant's hash does not, because tenants are exactly str, int or pairs of them.
        cdef int32_t row, checked_priority = integer_of(priority, CLASSES - 1, "priority")
        cdef Load load = Load(checked_cost(cost), 0.0, integer_of(size, (<int64_t>1 << 48) - 1, "size"), 0, 0, 1, begun)
        load.team_cost = load.cost if team_cost is None else checked_cost(team_cost)
        load.kind = integer_of(kind, KINDS - 1, "kind")
        load.left = integer_of(count, INT32_MAX, "count")
        if load.left == 0:
            raise ValueError("count must be at least 1")
        cdef object handle  # a Python integer, which may fail, before any change
        row = self.known(tenant)
        if not (retried or begun) and self.queue.length >= self.capacity:
            self.refused += 1
            raise QueueFullError(f"{self.capacity} entries wait already")
        handle = entry_reserve(&self.queue)
        if row == NONE:
            row = self.begin(tenant)
        entry_join(&self.queue, row, load, checked_priority, retried)
        return handle

    def displace(self, tenant: str | int | tuple[str | int, str | int], *, priority: int = 1) -> int | None:
        """Remove an entry of the tenant with the most, to make room for a newcomer of this tenant and class.

        It is the newest of the longest line in the lowest class; of several lines, the one with the most distant turn.
        Entries that have begun stay.
        In the newcomer's class that line must be longer by two than all that the newcomer's tenant has waiting. A team
        counts as one tenant with all entries of its members, and loses one of its longest line. If nobody must make
        room for the newcomer's team, members of that team must by the same rule. Return the handle, or None. Takes
        time in proportion to the tenants.
        """
        cdef int32_t own = self.known(tenant)
        cdef int32_t team = self.teams.get(tenant[0], NONE) if type(tenant) is tuple else NONE
        cdef int32_t own_priority = integer_of(priority, CLASSES - 1, "priority")
        cdef int32_t other, entry, row
        for other in range(CLASSES - 1, own_priority - 1, -1):
            row = line_to_shorten(&self.queue, other, own, team, SLACK if other == own_priority else -INT32_MAX)
            if row != NONE:
                last_unlink(&self.queue)
                entry = last_not_begun(&self.queue, &line_of(&self.queue, row, other).entries)
                if entry == NONE:
                    continue
                handle = handle_of(&self.queue, entry)
                self.remove(entry, &self.displaced)
                return handle
        return None

    def peek(self) -> int | None:
        """Return the handle of the entry that `pop` would remove; None if there is none."""
        cdef int32_t entry = entry_next(&self.queue)
        return None if entry == NONE else handle_of(&self.queue, entry)

    def pop(self, fits=None, *, kinds: int | None = None) -> int:
        """Remove the next entry and return its handle, which is then stale. IndexError if there is none.

        An entry of several pops stays, and its handle is valid, until the last.

        `fits(handle)` decides about an entry. True: it leaves. None: it is skipped. False: it does not fit now. Entries
        are tried class by class, tenant by tenant, from first to last. The first with False may be passed by `bypass`
        pops in total; after that no entry behind it leaves before it does. If `fits` raises, nothing has changed.
        `fits` and other threads may change the queue; no entry is tried twice. `kinds` has a bit for each kind to try:
        entries of other kinds are skipped without a call.
        """
        cdef uint64_t tried = UINT64_MAX if kinds is None else kinds
        cdef int32_t entry = entry_next(&self.queue) if fits is None and kinds is None else self.first_fitting(fits, tried)
        if entry == NONE:
            raise IndexError("no entry may leave now")
        handle = handle_of(&self.queue, entry)
        self.remove(entry, &self.popped)
        return handle

    def pop_many(self, max_count: int, memory_budget: int) -> list[int]:
        """Remove up to `max_count` entries with a total size of at most `memory_budget`, in fair order.

        Like `pop(fits)` where an entry fits if its size is within the rest of the budget. Do not push an entry
        larger than any budget: after `bypass` pops in all calls it holds up those behind it.
        """
        cdef int64_t count = integer_of(max_count, INT64_MAX, "max_count")
        cdef int64_t budget = integer_of(memory_budget, INT64_MAX, "memory_budget")
        cdef int32_t entry
        handles = []
        try:
            while len(handles) < count:
                entry = entry_next(&self.queue)
                if entry != NONE and self.queue.loads[entry].size > budget:
                    entry = self.first_fitting(lambda handle: self.entry(handle).size <= budget, UINT64_MAX)
                if entry == NONE:
                    break
                handles.append(handle_of(&self.queue, entry))
                budget -= self.queue.loads[entry].size
                self.remove(entry, &self.popped)
        except MemoryError:
            if not handles:
                raise
        return handles

    def discard(self, handle: int, /) -> bool:
        """Remove one entry from any position. Return False, and change nothing, if the handle is stale."""
        cdef int32_t entry = entry_of(&self.queue, handle)
        if entry != NONE:
            self.remove(entry, &self.discarded)
        return entry != NONE

    def clear(self) -> None:
        """Discard every entry, and reset rounds and counters."""
        cdef int32_t group
        while self.queue.length > 0:
            self.remove(entry_next(&self.queue), &self.discarded)
        for group in range(self.queue.groups_capacity - 1, TOP - 1, -1):
            self.forget_idle(group, 0)
        self.queue.groups[TOP].last_level = 0.0

    def charge(
        self, tenant: str | int | tuple[str | int, str | int], cost: float, *, team_cost: float | None = None
    ) -> None:
        """Charge a tenant for what it used beyond the charges of its pops, and its team. No effect under round robin."""
        self.correct(tenant, cost, team_cost, False)

    def refund(
        self, tenant: str | int | tuple[str | int, str | int], cost: float, *, team_cost: float | None = None
    ) -> None:
        """Subtract from a tenant's counter what was charged but not used, and from its team's. No effect under round robin.

        A counter in line falls at most to the level (the smallest counter in line) at which its tenant joined, and
        one out of line at most to the current level.
        """
        self.correct(tenant, cost, team_cost, True)

    def counter(self, tenant: str | int | tuple[str | int, str | int]) -> float:
        """Return a tenant's counter, or out of line the one it would join with. 0 under round robin.

        Of a pair it is the counter inside the team.
        """
        cdef int32_t row = self.known(tenant), team = NONE
        if row != NONE:
            return counter_of(&self.queue, &self.queue.tenants[row])
        if type(tenant) is not tuple:
            return level(&self.queue, TOP)
        team = self.teams.get(tenant[0], NONE)
        return 0.0 if team == NONE else level(&self.queue, self.queue.tenants[team].members)

    def team_counter(self, team: str | int) -> float:
        """Return a team's counter, or out of line the one it would join with. 0 under round robin."""
        cdef int32_t row = self.teams.get(checked_name(team), NONE)
        return level(&self.queue, TOP) if row == NONE else counter_of(&self.queue, &self.queue.tenants[row])

    def ahead(self, handle: int | None) -> list[int]:
        """Return the handles that leave before this one if nothing changes, in order. KeyError if stale; None: all."""
        return entries_before(&self.queue, NONE if handle is None else self.waiting_entry(handle))

    def entry(self, handle: int) -> FairQueueEntry:
        """Return what an entry was pushed with. KeyError if stale."""
        cdef int32_t row = self.waiting_entry(handle)
        cdef Entry *entry = &self.queue.entries[row]
        cdef Load *load = &self.queue.loads[row]
        tenant = <object>self.queue.tenants[tenant_of(entry)].name
        retried, begun = is_retried(entry), bool(load.begun)
        return FairQueueEntry(
            tenant, load.cost, priority_of(entry), load.size, load.kind, retried, load.left, begun, load.team_cost
        )

    def waiting(self, tenant: str | int | tuple[str | int, str | int]) -> int:
        """Return how many entries of this tenant wait, over all classes."""
        return waiting_of(&self.queue, self.known(tenant))

    @property
    def tenants(self) -> int:
        """The number of tenants that have entries. Takes time in proportion to the teams."""
        cdef int32_t found = 0, group
        for group in range(self.queue.groups_capacity):
            found += self.queue.groups[group].members - self.queue.groups[group].rings[IDLE].tenants.length
            found -= group != TOP and self.queue.groups[group].members > 0  # the team, a member of TOP
        return found

    def __len__(self) -> int:
        return self.queue.length

    def __contains__(self, handle: object) -> bool:
        return entry_of(&self.queue, handle) != NONE

    cdef int32_t first_fitting(self, fits, uint64_t kinds) except -2:
        # Return the entry of these kinds that leaves next, or NONE. If that passes over another, count it. `fits` may
        # change the order, so it is copied as far as it is likely to be needed: at first its first entry, which takes
        # no copy, then further; handles are validated again.
        cdef Py_ssize_t limit = 0
        cdef int32_t entry, passed
        head, handles, tried = None, None, set()
        while handles is None or len(handles) == limit:
            limit = max(1, 8 * limit)
            handles = order_begin(&self.queue, limit, kinds)
            for handle in handles:
                if handle in tried or entry_of(&self.queue, handle) == NONE:
                    continue
                tried.add(handle)
                answer = fits is None or fits(handle)
                fitting = bool(answer)
                entry, passed = entry_of(&self.queue, handle), entry_of(&self.queue, head)
                if answer is None or entry == NONE:
                    continue
                if fitting:
                    if passed != NONE:
                        self.queue.loads[passed].passed += 1
                    return entry
                if passed == NONE:
                    head = handle
                    if self.queue.loads[entry].passed >= self.bypass:
                        return NONE
        return NONE

    cdef remove(self, int32_t entry, int64_t *count):
        # Remove an entry and count it; a popped one is served.
        cdef int32_t tenant = tenant_of(&self.queue.entries[entry])
        count[0] += 1
        if count == &self.popped:
            entry_serve(&self.queue, entry)
        else:
            entry_leave(&self.queue, entry)
        if self.queue.tenants[tenant].waiting == 0:
            self.forget_idle(self.queue.tenants[tenant].group, REMEMBERED_AT_MOST)

    cdef correct(self, tenant, cost, team_cost, bint is_refund):
        cdef double own = checked_cost(cost), of_team = own if team_cost is None else checked_cost(team_cost)
        cdef int32_t row = self.known(tenant), team
        if not self.queue.by_tokens:
            return
        if row == NONE and not is_refund:
            row = self.begin(tenant)
        # A tenant that is forgotten is at the level, so that it has no refund; its team may have one.
        team = self.teams.get(tenant[0], NONE) if type(tenant) is tuple else NONE
        if team != NONE:
            tenant_charge(&self.queue, team, of_team, is_refund)
        if row != NONE:
            tenant_charge(&self.queue, row, own, is_refund)
            if self.queue.tenants[row].waiting == 0:
                self.forget_idle(self.queue.tenants[row].group, REMEMBERED_AT_MOST)

    cdef int32_t known(self, tenant) except -2:
        # Return the row of a tenant, or NONE.
        if type(tenant) is tuple and len(tenant) == 2:
            checked_name(tenant[0])
            checked_name(tenant[1])
        elif type(tenant) is not str:
            checked_name(tenant)
        return self.rows.get(tenant, NONE)

    cdef int32_t begin(self, tenant) except -2:
        # Return the row of a tenant that is not known. Its team may be new, too.
        cdef int32_t group = TOP, team
        if type(tenant) is tuple:
            team = self.teams.get(tenant[0], NONE)
            group = team_begin(&self.queue, self.teams, tenant[0]) if team == NONE else self.queue.tenants[team].members
        return tenant_begin(&self.queue, self.rows, tenant, group)

    cdef forget_idle(self, int32_t group, int32_t at_most):
        # Forget the idle members of a group that do not affect the order, and those beyond `at_most`. A team is idle
        # once it has no members; its group is forgotten with it.
        cdef double least = level(&self.queue, group)
        cdef Ring *idle = &self.queue.groups[group].rings[IDLE]
        cdef int32_t row, team = self.queue.groups[group].team
        cdef Tenant *tenant
        while idle.tenants.length > 0:
            row = turn_next(&self.queue, group, IDLE)
            tenant = &self.queue.tenants[row]
            if idle.tenants.length <= at_most and (
                not self.queue.by_tokens or tenant.counter > least or (tenant.counter == least and tenant.turn > 0)
            ):
                break
            name = <object>tenant.name
            rows = self.rows if tenant.members == TOP else self.teams
            tenant_end(&self.queue, row)
            del rows[name]
        if group != TOP and self.queue.groups[group].members == 0:
            self.forget_idle(TOP, at_most)

    cdef int32_t waiting_entry(self, handle) except NONE:
        cdef int32_t entry = entry_of(&self.queue, handle)
        if entry == NONE:
            raise KeyError(handle)
        return entry


cdef inline checked_name(name):
    if type(name) is not str and type(name) is not int:
        raise TypeError(f"a tenant is a str, an int or a pair of them, and not of type {type(name).__name__}")
    return name


cdef inline double checked_cost(double cost) except -1.0:
    if not 0.0 <= cost < INFINITY:
        raise ValueError("cost must be finite and not negative")
    return cost


cdef inline int64_t integer_of(number, int64_t most, name) except -1:
    # A count or a budget beyond 64 bits sets no limit.
    cdef int overflow = 0
    cdef int64_t value = PyLong_AsLongLongAndOverflow(number, &overflow)
    if overflow > 0 and most == INT64_MAX:
        return INT64_MAX
    if overflow or not 0 <= value <= most:
        raise ValueError(f"{name} must be in 0...{most}, not {number}")
    return value
