# What the queue is made of.

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
    LARGE_PAGE = 1 << 21
    GENERATIONS = (1 << 28) - 1
    BLOCK = 64      # rows that share an era
    LIVES = 1 << 7  # generations in an era
    NOBODY = 0      # a life: of a free row, or of one whose entry is gone
    OLDER = 1       # a life: of an entry that waits since an earlier era
    GONE_AT_MOST = 64
    GONE_ALONE = 8  # of those, the latest, whose neighbours are not yet on their way into the cache

cdef int64_t SIZE_AT_MOST = (<int64_t>1 << 48) - 1
cdef double COUNTER_AT_MOST = 1e300  # so that no sum of charges is infinite
cdef double CREDIT_AT_MOST = 4.0     # what a class that waits for long may take at once
cdef double ONE_POP = 1.0 - 1e-9     # ten tenths do not add up to one


# Entries and tenants are rows of arrays and refer to each other by row, because rows survive a realloc and
# pointers do not, and because a row is half of a handle. What it takes to find an entry and to take it out is
# apart from what it carries, and has 16 bytes, for a queue far larger than the cache costs one miss for each
# entry touched: itself and its two neighbours. All that can wait. Whether a handle is valid cannot, and so is
# told by one byte a row, its life: LIVES + what is left of its generation once the era of its block is taken off.
# When a row has used an era up, the next one begins for its whole block, and who waits there is OLDER: only for
# those one has to look at the entry.

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
    /* A wish, not more. */
    static void on_large_pages(void *memory, size_t size) {
    #if defined(MADV_HUGEPAGE)
        madvise(memory, size, MADV_HUGEPAGE);
    #else
        (void)memory, (void)size;
    #endif
    }
    """
    void FETCH(void *)  # into the cache, without waiting for it
    void on_large_pages(void *memory, size_t size) noexcept
    ctypedef struct Entry:
        int32_t tenant
        int32_t previous
        int32_t next        # behind it in its chain, or the next free row
        int32_t generation  # of one row, no two entries have the same; it only grows
        int32_t priority
        bint retried
    ctypedef struct Load:   # of the entry with the same row
        double cost
        uint64_t size
        int32_t passed      # pops that took one behind it while it did not fit


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
    Load *loads
    uint8_t *lives              # of each row
    int32_t *eras               # of each BLOCK of rows: generation // LIVES, but for the OLDER
    Tenant *tenants
    Heap heaps[CLASSES + 1]
    int32_t entries_room
    int32_t tenants_room        # of every heap, too
    int32_t free_entry
    int32_t free_tenant
    bint by_tokens
    int32_t gone[GONE_AT_MOST]  # rows of entries that were discarded, and are in their chains still
    int32_t gone_count
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
