"""The arrays of the fair queue. Entries and tenants refer to each other by row, because a realloc moves pointers."""

from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.string cimport memcpy, memset

cdef enum:
    NONE = -1  # no such row; ends every list
    CLASSES = 8
    IDLE = CLASSES  # the heap of tenants that do not wait but are remembered; the others are one a class
    HEAPS
    ROWS_AT_FIRST = 32
    ROWS_AT_MOST = 1 << 30
    GENERATIONS = (1 << 28) - 1

# Cancelling an entry of a queue larger than the processor's cache costs a cache miss for the entry and for each
# neighbor, so what it needs takes 16 bytes, and the load is separate.
cdef extern from *:
    """
    typedef struct {
        int32_t tenant, previous, next;
        uint32_t generation : 28, priority : 3, retried : 1;
    } Entry;
    """
    ctypedef struct Entry:
        int32_t tenant      # NONE: the row is free
        int32_t previous    # in its chain, which is circular
        int32_t next        # in its chain, or the next free row
        int32_t generation  # grows with each use of the row
        int32_t priority
        bint retried

cdef struct Load:         # of the entry with the same row
    double cost
    int64_t size
    int32_t passed        # pops that passed it over because it did not fit

cdef struct Chain:
    int32_t first
    int32_t length

cdef struct Line:         # a tenant's entries of one class, except retried ones
    Chain chain
    int32_t previous      # while it has entries, it is in the class's ring or heap
    int32_t next
    int64_t served        # the round of the tenant's last turn
    int64_t joined        # when it joined the heap

cdef struct Tenant:
    PyObject *name        # borrowed: the key in FairQueue.rows keeps it alive; NULL: the row is free
    double counter        # service in units of cost / weight
    double lift           # the level when it came in line; a refund lowers the counter no further
    double weight
    int64_t turn          # when it was last served; 0: never, or forgotten
    int32_t waiting       # its entries
    int32_t next_free
    int32_t places[HEAPS]  # its index in each heap, or NONE
    Line lines[CLASSES]

cdef struct Class:
    int64_t length
    Chain retried
    int64_t round         # from 1
    int32_t turn          # the ring's front: the tenant to serve next; its back is just before it
    int32_t first_served  # from there to the back, tenants that this round has served; or NONE
    double credit         # pops that a waiting class is owed

cdef struct Queue:
    Entry *entries
    Load *loads
    Tenant *tenants
    int32_t *heaps        # member i of heap h, a row of `tenants`, at i * HEAPS + h
    int32_t heap_lengths[HEAPS]
    int32_t entries_capacity
    int32_t tenants_capacity
    int32_t free_entry
    int32_t free_tenant
    bint by_tokens
    double min_share
    double last_level     # the level while no tenant is in line: the last counter that was
    int64_t length
    int64_t clock         # counts the changes that may alter the order
    Class classes[CLASSES]

cdef inline int64_t handle_of(Queue *queue, int32_t row) noexcept:
    return <int64_t>queue.entries[row].generation << 32 | row

cdef inline int32_t entry_at(Queue *queue, int64_t handle) noexcept:
    # Return the row of a handle, or NONE if it is stale.
    cdef int64_t row = <uint32_t>handle  # with a mask, Cython would make Python numbers
    if row >= queue.entries_capacity or queue.entries[row].tenant == NONE:
        return NONE
    return <int32_t>row if queue.entries[row].generation == handle >> 32 else NONE

cdef inline void entry_free(Queue *queue, int32_t row) noexcept:
    # Make the row's handle stale. A row whose generations are used up is never used again.
    cdef Entry *entry = &queue.entries[row]
    entry.tenant = NONE
    if entry.generation < GENERATIONS:
        entry.generation += 1
        entry.next = queue.free_entry
        queue.free_entry = row

cdef inline void tenant_free(Queue *queue, int32_t row) noexcept:
    queue.tenants[row].name = NULL
    queue.tenants[row].next_free = queue.free_tenant
    queue.free_tenant = row

cdef inline void queue_clear(Queue *queue) noexcept:
    # Free the last row first, so that the next entries have the first rows.
    cdef int32_t i
    for i in range(queue.entries_capacity - 1, -1, -1):
        if queue.entries[i].tenant != NONE:
            entry_free(queue, i)
    for i in range(queue.tenants_capacity - 1, -1, -1):
        if queue.tenants[i].name != NULL:
            tenant_free(queue, i)
    for i in range(CLASSES):
        queue.classes[i] = Class(0, Chain(NONE, 0), 1, NONE, NONE, 0.0)
    memset(queue.heap_lengths, 0, sizeof(queue.heap_lengths))
    queue.length = 0
    queue.last_level = 0.0
    queue.clock += 1

cdef inline void queue_end(Queue *queue) noexcept:
    PyMem_Free(queue.entries)
    PyMem_Free(queue.loads)
    PyMem_Free(queue.tenants)
    PyMem_Free(queue.heaps)

cdef inline void *copied(void *rows, size_t size) noexcept:
    cdef void *copy = PyMem_Malloc(size)
    return copy if copy == NULL else memcpy(copy, rows, size)

cdef inline int queue_copy(Queue *copy, Queue *queue) except -1:
    copy[0] = queue[0]
    copy.entries = <Entry *>copied(queue.entries, queue.entries_capacity * sizeof(Entry))
    copy.loads = <Load *>copied(queue.loads, queue.entries_capacity * sizeof(Load))
    copy.tenants = <Tenant *>copied(queue.tenants, queue.tenants_capacity * sizeof(Tenant))
    copy.heaps = <int32_t *>copied(queue.heaps, queue.tenants_capacity * HEAPS * sizeof(int32_t))
    if copy.entries == NULL or copy.loads == NULL or copy.tenants == NULL or copy.heaps == NULL:
        queue_end(copy)
        raise MemoryError
    return 0

cdef inline void *resized(void *rows, size_t size) except NULL:
    rows = PyMem_Realloc(rows, size)
    if rows == NULL:
        raise MemoryError
    return rows

cdef inline int32_t doubled(int32_t capacity) except -1:
    if capacity >= ROWS_AT_MOST:
        raise MemoryError
    return 2 * capacity if capacity else ROWS_AT_FIRST

cdef inline int entry_reserve(Queue *queue) except -1:
    # Ensure that `free_entry` is a row.
    cdef int32_t row, capacity
    if queue.free_entry == NONE:
        capacity = doubled(queue.entries_capacity)
        queue.loads = <Load *>resized(queue.loads, capacity * sizeof(Load))
        queue.entries = <Entry *>resized(queue.entries, capacity * sizeof(Entry))
        for row in range(capacity - 1, queue.entries_capacity - 1, -1):
            queue.entries[row].generation = 0
            entry_free(queue, row)
        queue.entries_capacity = capacity
    return 0

cdef inline int tenant_reserve(Queue *queue) except -1:
    # Ensure that `free_tenant` is a row.
    cdef int32_t row, capacity
    if queue.free_tenant == NONE:
        capacity = doubled(queue.tenants_capacity)
        queue.heaps = <int32_t *>resized(queue.heaps, capacity * HEAPS * sizeof(int32_t))
        queue.tenants = <Tenant *>resized(queue.tenants, capacity * sizeof(Tenant))
        for row in range(capacity - 1, queue.tenants_capacity - 1, -1):
            tenant_free(queue, row)
        queue.tenants_capacity = capacity
    return 0

cdef inline int32_t tenant_begin(Queue *queue, PyObject *name, double weight) noexcept:
    # Make the first free row a tenant, and return it.
    cdef int32_t row = queue.free_tenant, i
    cdef Tenant *tenant = &queue.tenants[row]
    queue.free_tenant = tenant.next_free
    memset(tenant, 0, sizeof(Tenant))
    tenant.name = name
    tenant.weight = weight
    for i in range(HEAPS):
        tenant.places[i] = NONE
    return row
