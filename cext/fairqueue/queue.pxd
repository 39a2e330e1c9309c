"""The arrays of the fair queue. Entries and tenants refer to each other by row, because a realloc moves pointers."""

from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.string cimport memcpy, memset

cdef enum:
    NONE = -1  # no such row; ends every list
    CLASSES = 8
    IDLE = CLASSES  # the heap of tenants that do not wait but are remembered; the others are one a class
    HEAPS
    ROWS_AT_FIRST = 32
    ROWS_AT_MOST = 1 << 27
    GENERATIONS = 0x7FFFFFFF
    RUN = 8  # rows of entries in a run

cdef extern from *:
    int lowest_bit "__builtin_ctz" (unsigned int bits) noexcept
    int zeros_above "__builtin_clz" (unsigned int bits) noexcept
    int bits_in "__builtin_popcount" (unsigned int bits) noexcept

# Up to 8 successive entries of one line, or one retried entry; the entry of bit i has row RUN * run + i. In a
# queue larger than the processor's cache, linked entries cost a cache miss for the entry and for each neighbor.
# Here a cancellation clears a bit of one run, and runs are small enough for the cache.
cdef struct Run:
    int32_t tenant
    int32_t previous      # in its chain, which is circular
    int32_t next          # in its chain, or the next free run
    uint32_t generation   # grows with each use of the run
    uint8_t waiting       # the bits of the entries that wait; 0: the run is free
    uint8_t begun         # entries that the run ever had
    uint8_t priority
    uint8_t retried

cdef struct Load:         # of the entry with the same row
    double cost
    int64_t size
    int32_t passed        # pops that passed it over because it did not fit

cdef struct Chain:
    int32_t first         # run
    int32_t length        # in entries

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
    Run *runs
    Load *loads
    Tenant *tenants
    int32_t *heaps        # member i of heap h, a row of `tenants`, at i * HEAPS + h
    int32_t heap_lengths[HEAPS]
    int32_t runs_capacity
    int32_t tenants_capacity
    int32_t free_run
    int32_t free_tenant
    bint by_tokens
    double min_share
    double last_level     # the level while no tenant is in line: the last counter that was
    int64_t length
    int64_t clock         # counts the changes that may alter the order
    Class classes[CLASSES]

cdef inline Run *run_of(Queue *queue, int32_t row) noexcept:
    return &queue.runs[<uint32_t>row // RUN]

cdef inline int64_t handle_of(Queue *queue, int32_t row) noexcept:
    return <int64_t>run_of(queue, row).generation << 32 | row

cdef inline int32_t entry_at(Queue *queue, int64_t handle) noexcept:
    # Return the row of a handle, or NONE if it is stale.
    cdef uint32_t row = <uint32_t>handle
    if row // RUN >= <uint32_t>queue.runs_capacity or run_of(queue, row).generation != handle >> 32:
        return NONE
    return row if run_of(queue, row).waiting >> row % RUN & 1 else NONE

cdef inline int32_t entry_first(Queue *queue, Chain *chain) noexcept:
    return chain.first * RUN + lowest_bit(queue.runs[chain.first].waiting)

cdef inline int32_t entry_last(Queue *queue, Chain *chain) noexcept:
    cdef int32_t run = queue.runs[chain.first].previous
    return run * RUN + 31 - zeros_above(queue.runs[run].waiting)

cdef inline void run_free(Queue *queue, int32_t run) noexcept:
    # Make all its handles stale. A run whose generations are used up is never used again.
    queue.runs[run].waiting = 0
    if queue.runs[run].generation < GENERATIONS:
        queue.runs[run].generation += 1
        queue.runs[run].next = queue.free_run
        queue.free_run = run

cdef inline void tenant_free(Queue *queue, int32_t row) noexcept:
    queue.tenants[row].name = NULL
    queue.tenants[row].next_free = queue.free_tenant
    queue.free_tenant = row

cdef inline void queue_clear(Queue *queue) noexcept:
    # Free the last row first, so that the next entries have the first rows.
    cdef int32_t i
    for i in range(queue.runs_capacity - 1, -1, -1):
        if queue.runs[i].waiting:
            run_free(queue, i)
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
    PyMem_Free(queue.runs)
    PyMem_Free(queue.loads)
    PyMem_Free(queue.tenants)
    PyMem_Free(queue.heaps)

cdef inline void *copied(void *rows, size_t size) noexcept:
    cdef void *copy = PyMem_Malloc(size)
    return copy if copy == NULL else memcpy(copy, rows, size)

cdef inline int queue_copy(Queue *copy, Queue *queue) except -1:
    copy[0] = queue[0]
    copy.runs = <Run *>copied(queue.runs, queue.runs_capacity * sizeof(Run))
    copy.loads = <Load *>copied(queue.loads, queue.runs_capacity * RUN * sizeof(Load))
    copy.tenants = <Tenant *>copied(queue.tenants, queue.tenants_capacity * sizeof(Tenant))
    copy.heaps = <int32_t *>copied(queue.heaps, queue.tenants_capacity * HEAPS * sizeof(int32_t))
    if copy.runs == NULL or copy.loads == NULL or copy.tenants == NULL or copy.heaps == NULL:
        queue_end(copy)
        raise MemoryError
    return 0

cdef inline void *resized(void *rows, int32_t capacity, size_t size) except NULL:
    rows = PyMem_Realloc(rows, capacity * size) if capacity <= ROWS_AT_MOST else NULL
    if rows == NULL:
        raise MemoryError
    return rows

cdef inline int32_t entry_reserve(Queue *queue, int32_t tenant, int32_t priority, bint retried) except -1:
    # Return the row for an entry of a tenant (NONE: a new one): in its last run, or in the first free one.
    cdef int32_t run, capacity = max(2 * queue.runs_capacity, ROWS_AT_FIRST)
    if tenant != NONE and not retried and queue.tenants[tenant].lines[priority].chain.length > 0:
        run = queue.runs[queue.tenants[tenant].lines[priority].chain.first].previous
        if queue.runs[run].begun < RUN:
            return run * RUN + queue.runs[run].begun
    if queue.free_run == NONE:
        queue.loads = <Load *>resized(queue.loads, capacity, RUN * sizeof(Load))
        queue.runs = <Run *>resized(queue.runs, capacity, sizeof(Run))
        for run in range(capacity - 1, queue.runs_capacity - 1, -1):
            queue.runs[run].generation = 0
            run_free(queue, run)
        queue.runs_capacity = capacity
    return queue.free_run * RUN

cdef inline int32_t tenant_begin(Queue *queue, dict rows, name, double weight) except -1:
    # Give a new tenant the first free row, and return it.
    cdef int32_t row, capacity = max(2 * queue.tenants_capacity, ROWS_AT_FIRST)
    cdef Tenant *tenant
    if queue.free_tenant == NONE:
        queue.heaps = <int32_t *>resized(queue.heaps, capacity, HEAPS * sizeof(int32_t))
        queue.tenants = <Tenant *>resized(queue.tenants, capacity, sizeof(Tenant))
        for row in range(capacity - 1, queue.tenants_capacity - 1, -1):
            tenant_free(queue, row)
        queue.tenants_capacity = capacity
    row = rows[name] = queue.free_tenant
    tenant = &queue.tenants[row]
    queue.free_tenant = tenant.next_free
    memset(tenant, 0, sizeof(Tenant))
    memset(tenant.places, NONE, sizeof(tenant.places))
    tenant.name = <PyObject *>name
    tenant.weight = weight
    return row
