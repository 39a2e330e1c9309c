# The data structures of the queue.

cdef enum:
    NONE = -1       # no such entry or tenant; ends every chain
    CLASSES = 8
    IDLE = CLASSES  # the heap of tenants that do not wait but are remembered
    REMEMBERED_AT_MOST = 2048
    WEIGHTS_AT_MOST = 65536
    ROOM_AT_FIRST = 32
    ROOM_AT_MOST = 1 << 30
    BYPASS_AT_MOST = 255
    ASKED_AT_FIRST = 32
    CACHE_LINE = 64
    LARGE_PAGE = 1 << 21
    GENERATIONS = (1 << 28) - 1
    BLOCK = 64      # rows that share an era
    LIVES = 1 << 7  # generations in an era
    NOBODY = 0      # a life: the row is free, or its entry is gone
    OLDER = 1       # a life: the entry has waited since an earlier era
    GONE_AT_MOST = 64
    GONE_ALONE = 8  # the latest of those, whose neighbors are not prefetched yet

cdef int64_t SIZE_AT_MOST = (<int64_t>1 << 48) - 1
cdef double COUNTER_AT_MOST = 1e300  # so that no sum of charges is infinite
cdef double CREDIT_AT_MOST = 4.0     # the pops that a class that has waited for long may take at once
cdef double ONE_POP = 1.0 - 1e-9     # because ten times 0.1 does not add up to 1


# Entries and tenants are rows of arrays and refer to each other by row: rows survive a realloc and pointers
# do not, and a row is half of a handle. An entry's links are separate from its load and take 16 bytes,
# because in a queue far larger than the cache each entry touched costs a miss: itself and its two neighbors.
# These accesses can be deferred. Validating a handle cannot, so it reads one byte per row, the row's life:
# LIVES + the generation's offset in the era of its block. When a row has used up an era, the next one begins
# for its whole block, and entries that wait there become OLDER. Only for those is the entry itself read.

cdef extern from "Python.h":
    long PyLong_AsLong(PyObject *number) except? -1


cdef extern from *:
    """
    typedef struct {
        int32_t tenant;
        int32_t previous;
        int32_t next;
        uint32_t generation : 28;
        uint32_t priority : 3;
        uint32_t retried : 1;
    } Entry;
    typedef struct {
        double cost;
        uint64_t size : 48;
        uint64_t passed : 8;
    } Load;
    #if defined(__GNUC__) || defined(__clang__)
    #define FETCH(address) __builtin_prefetch(address, 1)
    #else
    #define FETCH(address) ((void)(address))
    #endif

    #if defined(__linux__)
    #include <sys/mman.h>
    #endif
    /* Advice only: it may fail. */
    static void on_large_pages(void *memory, size_t size) {
    #if defined(MADV_HUGEPAGE)
        madvise(memory, size, MADV_HUGEPAGE);
    #else
        (void)memory, (void)size;
    #endif
    }
    """
    void FETCH(void *)  # prefetches into the cache
    void on_large_pages(void *memory, size_t size) noexcept
    ctypedef struct Entry:
        int32_t tenant
        int32_t previous
        int32_t next        # the next in its chain, or the next free row
        int32_t generation  # differs for all entries of one row; it only grows
        int32_t priority
        bint retried
    ctypedef struct Load:   # of the entry with the same row
        double cost
        uint64_t size
        int32_t passed      # pops that passed it over because it did not fit


cdef struct Chain:
    int32_t first
    int32_t last
    int32_t length


cdef struct Line:
    # A tenant's entries of one class, but not retried ones. If there are any, it is in the ring or the heap.
    Chain chain
    int32_t ring_previous
    int32_t ring_next
    int64_t served      # the round of the tenant's last turn
    int64_t joined      # when the tenant last joined the heap


cdef struct Tenant:
    PyObject *name      # borrowed: the key in FairQueue.rows keeps it alive
    double counter
    double lift         # the level when it last joined the line; a refund lowers the counter no further
    double weight
    int64_t turn        # when it was last served; 0: never, or forgotten
    int32_t waiting     # its entries, over all classes
    int32_t lined       # those of them that are not retried
    int32_t next_free
    int32_t places[CLASSES + 1]  # its index in each heap; NONE: not a member
    Line lines[CLASSES]


cdef struct Heap:
    int32_t *rows       # of tenants
    int32_t count


cdef struct State:
    void *entries_memory
    Entry *entries              # in it, aligned so that no entry spans two cache lines
    Load *loads
    uint8_t *lives              # of each row
    int32_t *eras               # of each BLOCK of rows: generation // LIVES, except for OLDER entries
    Tenant *tenants
    Heap heaps[CLASSES + 1]
    int32_t entries_room
    int32_t tenants_room        # also the capacity of every heap
    int32_t free_entry
    int32_t free_tenant
    bint by_tokens
    int32_t gone[GONE_AT_MOST]  # rows of discarded entries that are still in their chains
    int32_t gone_count
    int64_t length
    int64_t lined               # the entries that are not retried
    int64_t waiting_tenants
    int64_t changes             # counts changes that may alter the order
    int64_t moment              # a logical clock: counts turns and joins
    int64_t lengths[CLASSES]
    Chain retried[CLASSES]
    # Round robin
    int32_t turns[CLASSES]      # the tenant to serve next; the ring is circular: the back is just before it
    int32_t served[CLASSES]     # the first tenant that this round has served, from there to the back; or NONE
    int64_t rounds[CLASSES]     # the number of the round, from 1
    # Tokens
    double floor                # the level while no tenant is in line: the last counter that was
    # Classes
    double min_share
    double credits[CLASSES]     # pops that a waiting class is owed
