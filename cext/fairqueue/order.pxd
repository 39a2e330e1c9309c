"""How entries join and leave, and in which order: classes with their credits, then lines, then a line's entries."""

from libc.math cimport fmax, fmin

from fairqueue.queue cimport (
    CLASSES, HEAPS, IDLE, NONE, RUN, Chain, Load, Queue, Run, Tenant, bits_in, entry_first, handle_of,
    int32_t, int64_t, queue_copy, queue_end, run_free, run_of,
)
from fairqueue.turns cimport (
    heap_add, heap_remove, heap_sort, is_before, is_in_line, level, ring_join, ring_leave, ring_turn, tenant_charge,
)

cdef inline Chain *chain_of(Queue *queue, Run *run) noexcept:
    if run.retried:
        return &queue.classes[run.priority].retried
    return &queue.tenants[run.tenant].lines[run.priority].chain

cdef inline void line_join(Queue *queue, int32_t owner, int32_t priority) noexcept:
    # Add a tenant to the ring or the heap, before its empty line gets an entry.
    cdef Tenant *tenant = &queue.tenants[owner]
    if not queue.by_tokens:
        ring_join(queue, owner, priority)
        return
    if not is_in_line(queue, owner):
        tenant.lift = level(queue)
        tenant.counter = fmax(tenant.counter, tenant.lift)
    queue.clock += 1
    tenant.lines[priority].joined = queue.clock
    heap_add(queue, priority, owner)

cdef inline void run_begin(Queue *queue, int32_t row, int32_t owner, int32_t priority, bint retried) noexcept:
    # Link the first free run: last in its tenant's line, or before all of its class if `retried`.
    cdef Run *run = &queue.runs[row]
    queue.free_run = run.next
    run.tenant, run.priority, run.retried, run.begun = owner, priority, retried, 0
    cdef Chain *chain = chain_of(queue, run)
    if chain.length == 0:
        if not retried:
            line_join(queue, owner, priority)
        chain.first = run.previous = row
    else:
        run.previous = queue.runs[chain.first].previous
    run.next = chain.first
    queue.runs[run.previous].next = row
    queue.runs[chain.first].previous = row
    if retried:
        chain.first = row

cdef inline void entries_count(Queue *queue, Run *run, int32_t change) noexcept:
    chain_of(queue, run).length += change
    queue.tenants[run.tenant].waiting += change
    queue.classes[run.priority].length += change
    queue.length += change
    queue.clock += 1

cdef inline void entry_join(
    Queue *queue, int32_t row, int32_t owner, double cost, int32_t priority, int64_t size, bint retried
) noexcept:
    # Make the row from `entry_reserve` an entry.
    cdef Run *run = run_of(queue, row)
    if queue.tenants[owner].places[IDLE] != NONE:
        heap_remove(queue, IDLE, owner)
    if run.waiting == 0:
        run_begin(queue, row // RUN, owner, priority, retried)
    run.waiting |= 1 << run.begun
    run.begun += 1
    queue.loads[row] = Load(cost, size, 0)
    entries_count(queue, run, 1)

cdef inline void entry_leave(Queue *queue, int32_t row) noexcept:
    cdef Run *run = run_of(queue, row)
    cdef Chain *chain = chain_of(queue, run)
    run.waiting &= ~(1 << row % RUN)
    entries_count(queue, run, -1)
    if run.waiting:
        return
    queue.runs[run.previous].next = run.next
    queue.runs[run.next].previous = run.previous
    if chain.first == row // RUN:
        chain.first = run.next
    if chain.length == 0 and not run.retried:
        if queue.by_tokens:
            queue.last_level = queue.tenants[run.tenant].counter
            heap_remove(queue, run.priority, run.tenant)
        else:
            ring_leave(queue, run.tenant, run.priority)
    if queue.classes[run.priority].length == 0:
        queue.classes[run.priority].credit = 0.0
    run_free(queue, row // RUN)

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
        return entry_first(queue, &queue.classes[priority].retried)
    return entry_first(queue, line_at(queue, priority, line_after(queue, priority, NONE)))

cdef inline void entry_serve(Queue *queue, int32_t row) noexcept:
    # Like `entry_leave`, and count the tenant's turn and charge.
    cdef Run run = run_of(queue, row)[0]
    cdef Tenant *tenant = &queue.tenants[run.tenant]
    cdef double before = tenant.counter
    credits_accrue(queue, run.priority)
    if run.retried:
        entry_leave(queue, row)
        return
    queue.clock += 1
    tenant.turn = queue.clock
    if queue.by_tokens:
        # Charge first: out of line, a counter below the level would be lifted to it.
        tenant_charge(queue, run.tenant, queue.loads[row].cost)
    entry_leave(queue, row)
    if queue.by_tokens:
        queue.last_level = before  # so that a refund of the last entry's charge is not lost
    else:
        ring_turn(queue, run.tenant, run.priority)

cdef inline int chain_append(Queue *queue, Chain *chain, list handles, Py_ssize_t limit) except -1:
    cdef Py_ssize_t end = min(<int64_t>len(handles) + chain.length, limit)
    cdef int32_t run = chain.first, i
    while len(handles) < end:
        for i in range(RUN):
            if queue.runs[run].waiting >> i & 1 and len(handles) < end:
                handles.append(handle_of(queue, run * RUN + i))
        run = queue.runs[run].next
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

cdef inline Chain *line_longest(Queue *queue, int32_t priority) noexcept:
    # Return the line with the most entries, or NULL; of several, the one whose turn is furthest away.
    cdef int32_t longest = NONE, most = 1, length
    cdef int32_t place = line_after(queue, priority, NONE)
    while place != NONE:
        length = line_at(queue, priority, place).length
        if longest == NONE or length > most or (length == most and (not queue.by_tokens or is_before(
            queue, priority, tenant_at(queue, priority, longest), tenant_at(queue, priority, place)
        ))):
            longest, most = place, length
        place = line_after(queue, priority, place)
    return NULL if longest == NONE else line_at(queue, priority, longest)

cdef inline int64_t entries_before(Queue *queue, int32_t row) noexcept:
    # Two tenants alternate until one line ends. So before the entry of rank r, r entries of its own line
    # leave, and of every other line as many, plus one if that tenant's turn is earlier, but at most all.
    cdef Run *run = run_of(queue, row)
    cdef Run *first = &queue.runs[chain_of(queue, run).first]
    cdef int32_t priority = run.priority, tenant = run.tenant, i
    cdef int64_t rank = bits_in(run.waiting & ((1 << row % RUN) - 1)), before = 0
    cdef bint is_earlier = True
    while run != first:
        run = &queue.runs[run.previous]
        rank += bits_in(run.waiting)
    for i in range(priority):
        before += queue.classes[i].length
    if run.retried:
        return before + rank
    before += queue.classes[priority].retried.length + rank
    i = line_after(queue, priority, NONE)
    while i != NONE:
        if i == tenant:
            is_earlier = False
        else:
            before += min(<int64_t>line_at(queue, priority, i).length, rank + is_earlier)
        i = line_after(queue, priority, i)
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
