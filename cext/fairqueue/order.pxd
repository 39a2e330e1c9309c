"""The order in which entries leave: classes with their credits, then lines, then the entries of a line."""

from libc.math cimport fmax, fmin

from fairqueue.entries cimport chain_of, entry_leave
from fairqueue.queue cimport (
    CLASSES, HEAPS, NONE, Chain, Entry, Queue, Tenant, handle_of, int32_t, int64_t, queue_copy, queue_end,
)
from fairqueue.ring cimport ring_turn
from fairqueue.tokens cimport heap_sort, is_before, tenant_charge

cdef inline int32_t class_next(Queue *queue) noexcept:
    # Return the highest class that waits, or if lower ones have credit for a pop, the one with the most.
    cdef int32_t first = NONE, owed = NONE, i
    for i in range(CLASSES):
        if queue.classes[i].length == 0:
            continue
        if first == NONE:
            first = i
            if queue.min_share == 0.0:
                return first
        elif queue.classes[i].credit >= 1.0 - 1e-9:  # because ten times 0.1 does not add up to 1
            if owed == NONE or queue.classes[i].credit > queue.classes[owed].credit:
                owed = i
    return first if owed == NONE else owed

cdef inline void credits_accrue(Queue *queue, int32_t popped) noexcept:
    # At each pop every waiting class except the highest earns `min_share`, and the popped class pays 1. A
    # class that has waited for long may take 4 pops at once.
    cdef bint is_highest = True
    cdef int32_t i
    if queue.min_share == 0.0:
        return
    for i in range(CLASSES):
        if queue.classes[i].length > 0:
            if not is_highest:
                queue.classes[i].credit = fmin(queue.classes[i].credit + queue.min_share, 4.0)
            is_highest = False
    queue.classes[popped].credit = fmax(queue.classes[popped].credit - 1.0, 0.0)

cdef inline int32_t line_after(Queue *queue, int32_t priority, int32_t place) noexcept:
    # Return the place after this one in a class; after NONE the first, after the last NONE. A place is a
    # tenant of the ring, or an index in the heap.
    cdef int32_t first = queue.classes[priority].turn
    if queue.by_tokens:
        return place + 1 if place + 1 < queue.heap_lengths[priority] else NONE
    if place == NONE:
        return first
    place = queue.tenants[place].lines[priority].next
    return NONE if place == first else place

cdef inline int32_t tenant_at(Queue *queue, int32_t priority, int32_t place) noexcept:
    return queue.heaps[place * HEAPS + priority] if queue.by_tokens else place

cdef inline Chain *line_at(Queue *queue, int32_t priority, int32_t place) noexcept:
    return &queue.tenants[tenant_at(queue, priority, place)].lines[priority].chain

cdef inline int32_t entry_next(Queue *queue) noexcept:
    # Return the entry that leaves next, or NONE.
    cdef int32_t priority = class_next(queue)
    if queue.length == 0:
        return NONE
    if queue.classes[priority].retried.length > 0:
        return queue.classes[priority].retried.first
    return line_at(queue, priority, line_after(queue, priority, NONE)).first

cdef inline void entry_serve(Queue *queue, int32_t row) noexcept:
    # Like `entry_leave`, and count the tenant's turn and charge.
    cdef Entry entry = queue.entries[row]
    cdef Tenant *tenant = &queue.tenants[entry.tenant]
    cdef double before = tenant.counter
    credits_accrue(queue, entry.priority)
    if entry.retried:
        entry_leave(queue, row)
        return
    queue.clock += 1
    tenant.turn = queue.clock
    if queue.by_tokens:
        # Charge first: out of line, a counter below the level would be lifted to it.
        tenant_charge(queue, entry.tenant, queue.loads[row].cost)
    entry_leave(queue, row)
    if queue.by_tokens:
        queue.last_level = before  # so that a refund of the last entry's charge is not lost
    else:
        ring_turn(queue, entry.tenant, entry.priority)

cdef inline int chain_append(Queue *queue, Chain *chain, list handles, Py_ssize_t limit) except -1:
    cdef int32_t row = chain.first, i
    for i in range(min(<int64_t>chain.length, limit - len(handles))):
        handles.append(handle_of(queue, row))
        row = queue.entries[row].next
    return 0

cdef inline list order_begin(Queue *queue, Py_ssize_t limit):
    # Return the first `limit` handles in the order in which `pop` tries them: first the class whose turn it is.
    cdef int32_t urgent = class_next(queue), priority, place, i
    handles = []
    for i in range(-1, CLASSES):
        priority = urgent if i == -1 else i
        if i == urgent or len(handles) == limit or queue.classes[priority].length == 0:
            continue
        chain_append(queue, &queue.classes[priority].retried, handles, limit)
        if queue.by_tokens:
            heap_sort(queue, priority)
        place = line_after(queue, priority, NONE)
        while place != NONE and len(handles) < limit:
            chain_append(queue, line_at(queue, priority, place), handles, limit)
            place = line_after(queue, priority, place)
    return handles

cdef inline int32_t line_longest(Queue *queue, int32_t priority) noexcept:
    # Return the tenant with the most entries in this class; of several, the one whose turn is furthest away.
    cdef int32_t longest = NONE, most = 0, tenant, length
    cdef int32_t place = line_after(queue, priority, NONE)
    while place != NONE:
        tenant = tenant_at(queue, priority, place)
        length = line_at(queue, priority, place).length
        if length > most or (
            length == most and (not queue.by_tokens or is_before(queue, priority, longest, tenant))
        ):
            longest, most = tenant, length
        place = line_after(queue, priority, place)
    return longest

cdef inline int64_t entries_before(Queue *queue, int32_t row) noexcept:
    # Two tenants alternate until one line ends. So before the entry of rank r, r entries of its own line
    # leave, and of every other line as many, plus one if that tenant's turn is earlier, but at most all.
    cdef Entry entry = queue.entries[row]
    cdef int64_t rank = 0, before = 0
    cdef bint is_earlier = True
    cdef int32_t i
    for i in range(entry.priority):
        before += queue.classes[i].length
    while row != chain_of(queue, &entry).first:
        row = queue.entries[row].previous
        rank += 1
    if entry.retried:
        return before + rank
    before += queue.classes[entry.priority].retried.length
    i = line_after(queue, entry.priority, NONE)
    while i != NONE:
        if i == entry.tenant:
            before += rank
            is_earlier = False
        else:
            before += min(<int64_t>line_at(queue, entry.priority, i).length, rank + is_earlier)
        i = line_after(queue, entry.priority, i)
    return before

cdef inline list handles_before(Queue *queue, int32_t row):
    # Return the handles that leave before an entry, by simulating the pops on a copy of the queue.
    cdef Queue future
    cdef int32_t entry
    handles = []
    queue_copy(&future, queue)
    try:
        entry = entry_next(&future)
        while entry != row:
            handles.append(handle_of(&future, entry))
            entry_serve(&future, entry)
            entry = entry_next(&future)
    finally:
        queue_end(&future)
    return handles
