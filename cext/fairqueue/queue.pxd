"""The arrays of the fair queue. Entries and tenants refer to each other by row, because a realloc moves pointers."""

from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_Check
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from cpython.object cimport PyObject
from libc.stdint cimport INT32_MAX, INT64_MAX, UINT64_MAX, int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memset

cdef enum:
    NONE = -1  # no such row
    CLASSES = 8
    IDLE = CLASSES  # not a class of entries, but the ring of tenants that do not wait and are remembered
    RINGS
    KINDS = 64
    ROWS_AT_FIRST = 32
    ROWS_AT_MOST = 1 << 28
    GENERATIONS = 0x7FFFFFFE
    TOP = 0  # the group of all teams, and of the tenants without a team

cdef struct Link:         # in a circular list of rows
    int32_t next, previous

cdef struct List:
    int32_t first, length  # the first is undefined if the length is 0

# All that a cancellation needs; cost and size are apart. In a queue larger than the processor's cache, the entry and
# each neighbor cost a cache miss. So the last entry that left stays linked until the next joins or leaves: the
# processor can then fetch its neighbors and the next entry at once. The first entry of a list always waits.
cdef struct Entry:
    Link link
    uint32_t generation   # grows when the entry joins and when it leaves: odd while it waits
    uint32_t place        # (tenant * 2 + is retried) * CLASSES + priority, or in a free row the next free row

cdef struct Load:         # of the entry with the same row
    double cost
    double team_cost      # charged to the tenant's team, if it has one
    int64_t size
    int32_t passed        # pops that passed it over because it did not fit
    int32_t kind
    int32_t left          # pops until it leaves, from 1
    int32_t begun         # whether a part of it has left, or it was pushed so: it is not displaced

cdef struct Line:         # a tenant's entries of one class, except retried ones; of a team, only how many all have
    Link link             # in the ring of the class
    List entries
    uint64_t kinds        # a bit for the kind of each entry; also kinds of entries that have left, until it is scanned
    int64_t since         # round robin: the round of the tenant's last turn; tokens: when it joined the ring

cdef struct Tenant:       # or a team
    double counter        # service in units of cost
    int64_t turn          # when it was last served; 0: never, or forgotten
    uint32_t rings        # the rings that it is in, one bit each
    int32_t group         # of which it is a member
    int32_t members       # a team: the group of its members; a tenant: TOP
    int32_t place         # under tokens: its leaf in the trees of its group
    int32_t waiting       # its entries
    int32_t next_free
    double lift           # the level when it came in line; a refund lowers the counter no further
    PyObject *name        # borrowed: the key in FairQueue.rows or FairQueue.teams keeps it alive
    Line lines[RINGS]

cdef struct Ring:
    List tenants          # from the one to serve next
    int32_t first_served  # from there to the end, tenants that this round has served; or NONE
    int64_t round         # from 1

# Tenants that take turns with each other: the queue has one group of all teams and of the tenants without a team, and
# one for the members of each team. A tenant without a team is served as if there were no groups.
cdef struct Group:
    Ring rings[RINGS]
    double last_level     # the level while no member is in line: the last counter that was in line
    int32_t *nodes        # under tokens: node i of tree t at i * RINGS + t (tenants.pxd); then a row of places, of which those from `members` on are free
    int32_t capacity      # places
    int32_t members       # waiting or remembered
    int32_t team          # its row, or NONE; of a free group, the next free one

cdef struct Class:
    int64_t length
    double credit         # pops that a waiting class is owed
    List retried

cdef struct Queue:
    Entry *entries
    Load *loads
    Tenant *tenants
    Group *groups
    size_t nodes_size     # bytes for each place: two nodes in each tree and the stack of free places, or nothing
    int32_t entries_capacity, tenants_capacity, groups_capacity
    int32_t free_entry, free_tenant, free_group
    bint by_tokens
    double min_share
    int64_t length
    int64_t clock         # counts turns, and tenants that joined a ring
    Class classes[CLASSES]

# Links are `stride` links apart: they are parts of other rows.
cdef inline void link(Link *links, Py_ssize_t stride, int32_t row, int32_t next) noexcept:
    # Insert a row before another. Before the first is also after the last.
    cdef Link *own = &links[row * stride]
    own.next, own.previous = next, links[next * stride].previous
    links[own.previous * stride].next = links[next * stride].previous = row

cdef inline void unlink(Link *links, Py_ssize_t stride, int32_t row) noexcept:
    # The row is then a list of its own, and may be unlinked again.
    cdef Link *own = &links[row * stride]
    links[own.previous * stride].next = own.next
    links[own.next * stride].previous = own.previous
    own.next = own.previous = row

cdef inline int32_t tenant_of(Entry *entry) noexcept:
    return entry.place // (2 * CLASSES)

cdef inline bint is_retried(Entry *entry) noexcept:
    return entry.place & CLASSES

cdef inline int32_t priority_of(Entry *entry) noexcept:
    return entry.place % CLASSES

cdef inline int64_t handle_of(Queue *queue, int32_t row) noexcept:
    return <int64_t>queue.entries[row].generation << 32 | row

cdef inline int32_t entry_of(Queue *queue, handle) noexcept:
    # Return the row of a handle, or NONE if it is stale or anything else.
    cdef int overflow = 0
    cdef int64_t number = PyLong_AsLongLongAndOverflow(handle, &overflow) if PyLong_Check(handle) else NONE
    cdef uint32_t row = <uint32_t>number
    if row >= <uint32_t>queue.entries_capacity or queue.entries[row].generation != number >> 32:
        return NONE
    return row if queue.entries[row].generation % 2 else NONE

cdef inline void last_unlink(Queue *queue) noexcept:
    # Unlink the entry that left last, if it still is linked. Its row is the first free one.
    if queue.free_entry != NONE:
        unlink(&queue.entries.link, sizeof(Entry) // sizeof(Link), queue.free_entry)

cdef inline resize(void **rows, int32_t capacity, size_t size):
    cdef void *resized = PyMem_Realloc(rows[0], capacity * size) if capacity <= ROWS_AT_MOST else NULL
    if resized == NULL:
        raise MemoryError
    rows[0] = resized

cdef inline int64_t entry_reserve(Queue *queue) except -1:
    # Make sure that there is a free row, and return the handle that its entry will have.
    cdef int32_t row, before = queue.entries_capacity, capacity = max(2 * before, ROWS_AT_FIRST)
    if queue.free_entry == NONE:
        resize(<void **>&queue.entries, capacity, sizeof(Entry))
        resize(<void **>&queue.loads, capacity, sizeof(Load))
        queue.entries_capacity = capacity
        for row in range(capacity - 1, before - 1, -1):
            queue.entries[row] = Entry(Link(row, row), 0, queue.free_entry)
            queue.free_entry = row
    return handle_of(queue, queue.free_entry) + (<int64_t>1 << 32)
