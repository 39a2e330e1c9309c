"""The arrays of the fair queue. Entries and tenants refer to each other by row, because a realloc moves pointers."""

from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_Check
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.string cimport memcpy

cdef enum:
    NONE = -1  # no such row; ends every list
    CLASSES = 8
    IDLE = CLASSES  # the ring of tenants that do not wait but are remembered; the others are one a class
    RINGS
    ROWS_AT_FIRST = 32
    ROWS_AT_MOST = 1 << 28
    GENERATIONS = 0x7FFFFFFF
    RUN = 4  # rows of entries in a run

cdef extern from *:
    int lowest_bit "__builtin_ctz" (unsigned int bits) noexcept
    int zeros_above "__builtin_clz" (unsigned int bits) noexcept

# Up to 4 successive entries of one line, or one retried entry; the entry of bit i has row RUN * run + i. In a
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
    int32_t previous      # in the ring of the class
    int32_t next
    int64_t since         # round robin: the round of the tenant's last turn; tokens: when it joined the ring

cdef struct Tenant:
    PyObject *name        # borrowed: the key in FairQueue.rows keeps it alive
    double counter        # service in units of cost / weight
    double lift           # the level when it came in line; a refund lowers the counter no further
    double weight
    int64_t turn          # when it was last served; 0: never, or forgotten
    int32_t waiting       # its entries
    int32_t next_free
    uint32_t rings        # the rings that it is in, one bit each
    Line lines[RINGS]

cdef struct Ring:
    int64_t round         # from 1
    int32_t tenants
    int32_t turn          # the front: the tenant to serve next; the back is just before it
    int32_t first_served  # from there to the back, tenants that this round has served; or NONE

cdef struct Class:
    int64_t length
    double credit         # pops that a waiting class is owed
    Chain retried

cdef struct Queue:
    Run *runs
    Load *loads
    Tenant *tenants
    int32_t *nodes        # under tokens: node i of tree t at i * RINGS + t (turns.pxd)
    int32_t runs_capacity
    int32_t tenants_capacity
    int32_t free_run
    int32_t free_tenant
    bint by_tokens
    double min_share
    double last_level     # the level while no tenant is in line: the last counter that was
    int64_t length
    int64_t clock         # counts turns, and tenants that joined a ring
    Class classes[CLASSES]
    Ring rings[RINGS]

cdef inline Run *run_of(Queue *queue, int32_t row) noexcept:
    return &queue.runs[<uint32_t>row // RUN]

cdef inline int64_t handle_of(Queue *queue, int32_t row) noexcept:
    return <int64_t>run_of(queue, row).generation << 32 | row

cdef inline int32_t entry_of(Queue *queue, handle) noexcept:
    # Return the row of a handle, or NONE if it is stale or anything else.
    cdef int overflow = 0
    cdef int64_t number = PyLong_AsLongLongAndOverflow(handle, &overflow) if PyLong_Check(handle) else NONE
    cdef uint32_t row = <uint32_t>number
    if row // RUN >= <uint32_t>queue.runs_capacity or run_of(queue, row).generation != number >> 32:
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

cdef inline size_t nodes_size(Queue *queue) noexcept:
    # Return the bytes of the trees for each tenant: two nodes in each.
    return 2 * RINGS * sizeof(int32_t) if queue.by_tokens else 0

cdef inline size_t queue_size(Queue *queue) noexcept:
    cdef size_t runs = queue.runs_capacity * (sizeof(Run) + RUN * sizeof(Load))
    return runs + queue.tenants_capacity * (sizeof(Tenant) + nodes_size(queue))

cdef inline void *copied(void *rows, int32_t capacity, size_t size) except NULL:
    return memcpy(resized(NULL, capacity, size), rows, capacity * size)

cdef inline int queue_copy(Queue *copy, Queue *queue) except -1:
    # After an error, too, the copy must end with `queue_end`.
    copy[0] = queue[0]
    copy.runs, copy.loads, copy.tenants, copy.nodes = NULL, NULL, NULL, NULL
    copy.runs = <Run *>copied(queue.runs, queue.runs_capacity, sizeof(Run))
    copy.loads = <Load *>copied(queue.loads, queue.runs_capacity, RUN * sizeof(Load))
    copy.tenants = <Tenant *>copied(queue.tenants, queue.tenants_capacity, sizeof(Tenant))
    copy.nodes = <int32_t *>copied(queue.nodes, queue.tenants_capacity, nodes_size(queue))
    return 0

cdef inline void queue_end(Queue *queue) noexcept:
    PyMem_Free(queue.runs)
    PyMem_Free(queue.loads)
    PyMem_Free(queue.tenants)
    PyMem_Free(queue.nodes)
