"""The arrays of the fair queue. Entries and tenants refer to each other by row, because a realloc moves pointers."""

from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_Check
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.string cimport memcpy, memset

cdef enum:
    NONE = -1  # no such row
    CLASSES = 8
    IDLE = CLASSES  # the ring of tenants that do not wait but are remembered; the others are one a class
    RINGS
    ROWS_AT_FIRST = 32
    ROWS_AT_MOST = 1 << 28
    GENERATIONS = 0x7FFFFFFF

cdef struct Link:         # in a circular list
    int32_t next          # or the next free row
    int32_t previous

cdef struct List:
    int32_t first
    int32_t length

cdef struct Entry:        # what a cancellation reads, small enough for the processor's cache
    Link link
    int32_t tenant
    uint32_t generation   # grows with each use of the row
    uint8_t priority
    uint8_t retried
    uint8_t waiting

cdef struct Load:         # of the entry with the same row
    double cost
    int64_t size
    int64_t passed        # pops that passed it over because it did not fit

cdef struct Line:         # a tenant's entries of one class, except retried ones
    Link link             # in the ring of the class
    List entries
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
    List tenants          # from the one to serve next
    int32_t first_served  # from there to the end, tenants that this round has served; or NONE

cdef struct Class:
    int64_t length
    double credit         # pops that a waiting class is owed
    List retried

cdef struct Queue:
    Entry *entries
    Load *loads
    Tenant *tenants
    int32_t *nodes        # under tokens: node i of tree t at i * RINGS + t (tenants.pxd)
    int32_t entries_capacity
    int32_t tenants_capacity
    int32_t free_entry
    int32_t free_tenant
    bint by_tokens
    double min_share
    double last_level     # the level while no tenant is in line: the last counter that was
    int64_t length
    int64_t clock         # counts turns, and tenants that joined a ring
    Class classes[CLASSES]
    Ring rings[RINGS]

cdef inline Link *link_of(void *rows, size_t size, int32_t row) noexcept:
    # `rows` is the address of the link in row 0, and `size` that of a row.
    return <Link *>(<char *>rows + row * size)

cdef inline void list_insert(List *list, void *rows, size_t size, int32_t row, int32_t next) noexcept:
    # Insert a row before `next`; before the first is also after the last. The first stays the first.
    cdef Link *link = link_of(rows, size, row)
    if list.length == 0:
        list.first = next = link.previous = row
    link.next = next
    link.previous = link_of(rows, size, next).previous
    link_of(rows, size, link.previous).next = row
    link_of(rows, size, next).previous = row
    list.length += 1

cdef inline void list_remove(List *list, void *rows, size_t size, int32_t row) noexcept:
    cdef Link *link = link_of(rows, size, row)
    link_of(rows, size, link.previous).next = link.next
    link_of(rows, size, link.next).previous = link.previous
    list.length -= 1
    if list.first == row:
        list.first = link.next

cdef inline int64_t handle_of(Queue *queue, int32_t row) noexcept:
    return <int64_t>queue.entries[row].generation << 32 | row

cdef inline int32_t entry_of(Queue *queue, handle) noexcept:
    # Return the row of a handle, or NONE if it is stale or anything else.
    cdef int overflow = 0
    cdef int64_t number = PyLong_AsLongLongAndOverflow(handle, &overflow) if PyLong_Check(handle) else NONE
    cdef uint32_t row = <uint32_t>number
    if row >= <uint32_t>queue.entries_capacity or queue.entries[row].generation != number >> 32:
        return NONE
    return row if queue.entries[row].waiting else NONE

cdef inline void entry_free(Queue *queue, int32_t row) noexcept:
    # Make its handle stale. A row whose generations are used up is never used again.
    cdef Entry *entry = &queue.entries[row]
    entry.waiting = False
    if entry.generation < GENERATIONS:
        entry.generation += 1
        entry.link.next = queue.free_entry
        queue.free_entry = row

cdef inline void tenant_free(Queue *queue, int32_t row) noexcept:
    queue.tenants[row].next_free = queue.free_tenant
    queue.free_tenant = row

cdef inline size_t nodes_size(Queue *queue) noexcept:
    # Return the bytes of the trees for each tenant: two nodes in each.
    return 2 * RINGS * sizeof(int32_t) if queue.by_tokens else 0

cdef inline size_t queue_size(Queue *queue) noexcept:
    cdef size_t entries = queue.entries_capacity * (sizeof(Entry) + sizeof(Load))
    return entries + queue.tenants_capacity * (sizeof(Tenant) + nodes_size(queue))

cdef inline int resize(void **rows, int32_t capacity, size_t size) except -1:
    cdef void *resized = PyMem_Realloc(rows[0], capacity * size) if capacity <= ROWS_AT_MOST else NULL
    if resized == NULL:
        raise MemoryError
    rows[0] = resized
    return 0

cdef inline int entries_resize(Queue *queue, int32_t capacity) except -1:
    resize(<void **>&queue.entries, capacity, sizeof(Entry))
    return resize(<void **>&queue.loads, capacity, sizeof(Load))

cdef inline int tenants_resize(Queue *queue, int32_t capacity) except -1:
    resize(<void **>&queue.tenants, capacity, sizeof(Tenant))
    return resize(<void **>&queue.nodes, capacity, nodes_size(queue))

cdef inline int entry_reserve(Queue *queue) except -1:
    # Make sure that there is a free row.
    cdef int32_t row, before = queue.entries_capacity, capacity = max(2 * before, ROWS_AT_FIRST)
    if queue.free_entry == NONE:
        entries_resize(queue, capacity)
        queue.entries_capacity = capacity
        memset(queue.entries + before, 0, (capacity - before) * sizeof(Entry))
        for row in range(capacity - 1, before - 1, -1):
            entry_free(queue, row)
    return 0

cdef inline int queue_copy(Queue *copy, Queue *queue) except -1:
    # After an error, too, the copy must end with `queue_end`.
    copy[0] = queue[0]
    copy.entries, copy.loads, copy.tenants, copy.nodes = NULL, NULL, NULL, NULL
    entries_resize(copy, queue.entries_capacity)
    tenants_resize(copy, queue.tenants_capacity)
    memcpy(copy.entries, queue.entries, queue.entries_capacity * sizeof(Entry))
    memcpy(copy.loads, queue.loads, queue.entries_capacity * sizeof(Load))
    memcpy(copy.tenants, queue.tenants, queue.tenants_capacity * sizeof(Tenant))
    memcpy(copy.nodes, queue.nodes, queue.tenants_capacity * nodes_size(queue))
    return 0

cdef inline void queue_end(Queue *queue) noexcept:
    PyMem_Free(queue.entries)
    PyMem_Free(queue.loads)
    PyMem_Free(queue.tenants)
    PyMem_Free(queue.nodes)
