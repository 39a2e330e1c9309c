"""How entries join and leave, and in which order: classes with their credits, then lines, then a line's entries."""

from libc.math cimport fmax, fmin

from fairqueue.queue cimport *
from fairqueue.tenants cimport *

cdef inline List *list_of(Queue *queue, Entry *entry) noexcept:
    if entry.retried:
        return &queue.classes[entry.priority].retried
    return &line_of(queue, entry.tenant, entry.priority).entries

cdef inline void entries_count(Queue *queue, Entry *entry, int32_t change) noexcept:
    queue.tenants[entry.tenant].waiting += change
    queue.classes[entry.priority].length += change
    queue.length += change

cdef inline void entry_join(
    Queue *queue, int32_t owner, double cost, int32_t priority, int64_t size, bint retried
) noexcept:
    # Make the row from `entry_reserve` an entry: last in its tenant's line, or if it is retried first of its class.
    cdef int32_t row = queue.free_entry
    cdef Entry *entry = &queue.entries[row]
    cdef List *entries
    queue.free_entry = entry.link.next
    queue.loads[row] = Load(cost, size, 0)
    entry.tenant, entry.priority, entry.retried, entry.waiting = owner, priority, retried, True
    entries = list_of(queue, entry)
    if queue.tenants[owner].waiting == 0:
        turn_leave(queue, owner, IDLE)
    if entries.length == 0 and not retried:
        tenant_lift(queue, owner)
        turn_join(queue, owner, priority)
    list_insert(entries, queue.entries, sizeof(Entry), row, entries.first)
    if retried:
        entries.first = row
    entries_count(queue, entry, 1)

cdef inline void entry_leave(Queue *queue, int32_t row) noexcept:
    cdef Entry *entry = &queue.entries[row]
    cdef List *entries = list_of(queue, entry)
    entries_count(queue, entry, -1)
    list_remove(entries, queue.entries, sizeof(Entry), row)
    if entries.length == 0 and not entry.retried:
        queue.last_level = queue.tenants[entry.tenant].counter
        turn_leave(queue, entry.tenant, entry.priority)
    if queue.tenants[entry.tenant].waiting == 0:
        turn_join(queue, entry.tenant, IDLE)
    if queue.classes[entry.priority].length == 0:
        queue.classes[entry.priority].credit = 0.0
    entry_free(queue, row)

cdef inline int32_t class_next(Queue *queue) noexcept:
    # Return the highest class that waits, or if lower ones have credit for a pop, the one with the most.
    cdef int32_t first = NONE, chosen = NONE, i
    cdef double credit
    for i in range(CLASSES):
        credit = queue.classes[i].credit
        if queue.classes[i].length == 0:
            continue
        if first == NONE:
            first = chosen = i
        elif credit >= 1.0 - 1e-9 and (chosen == first or credit > queue.classes[chosen].credit):
            chosen = i  # the tolerance is there because ten times 0.1 does not add up to 1
    return chosen

cdef inline void credits_accrue(Queue *queue, int32_t popped) noexcept:
    # At each pop every waiting class except the highest earns `min_share`, and the popped class pays 1. A
    # class that has waited for long may take 4 pops at once.
    cdef bint is_highest = True
    cdef int32_t i
    for i in range(CLASSES):
        if queue.classes[i].length > 0:
            if not is_highest:
                queue.classes[i].credit = fmin(queue.classes[i].credit + queue.min_share, 4.0)
            is_highest = False
    queue.classes[popped].credit = fmax(queue.classes[popped].credit - 1.0, 0.0)

cdef inline int32_t entry_next(Queue *queue) noexcept:
    # Return the entry that leaves next, or NONE.
    cdef int32_t priority = class_next(queue)
    if priority == NONE:
        return NONE
    if queue.classes[priority].retried.length > 0:
        return queue.classes[priority].retried.first
    return line_of(queue, turn_next(queue, priority), priority).entries.first

cdef inline void entry_serve(Queue *queue, int32_t row) noexcept:
    # Like `entry_leave`, and count the tenant's turn and charge.
    cdef Entry *entry = &queue.entries[row]
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
    else:
        turn_take(queue, entry.tenant, entry.priority)
    entry_leave(queue, row)
    queue.last_level = before  # so that a refund of the last entry's charge is not lost

cdef inline list order_begin(Queue *queue, Py_ssize_t limit):
    # Return the first `limit` handles in the order in which `pop` tries them: first the class whose turn it is.
    cdef int32_t urgent = class_next(queue), priority, tenant, i
    handles = []
    for i in range(-1, CLASSES):
        priority = urgent if i == -1 else i
        if i != urgent and len(handles) < limit and queue.classes[priority].length > 0:
            list_append(queue, &queue.classes[priority].retried, handles, limit)
            for tenant in turns_begin(queue, priority, limit - len(handles)):
                list_append(queue, &line_of(queue, tenant, priority).entries, handles, limit)
    return handles

cdef inline int list_append(Queue *queue, List *entries, list handles, Py_ssize_t limit) except -1:
    cdef Py_ssize_t end = min(len(handles) + entries.length, limit)
    cdef int32_t row = entries.first
    while len(handles) < end:
        handles.append(handle_of(queue, row))
        row = queue.entries[row].link.next
    return 0

cdef inline int32_t tenant_with_most(Queue *queue, int32_t priority) noexcept:
    # Return the tenant with the longest line, or NONE; of several, the one whose turn is furthest away.
    cdef List *tenants = &queue.rings[priority].tenants
    cdef int32_t tenant = tenants.first, longest = tenant, extra, i
    for i in range(tenants.length):
        extra = line_of(queue, tenant, priority).entries.length - line_of(queue, longest, priority).entries.length
        if extra > 0 or extra == 0 and (not queue.by_tokens or is_before(queue, priority, longest, tenant)):
            longest = tenant
        tenant = line_of(queue, tenant, priority).link.next
    return longest if tenants.length > 0 else NONE

cdef inline list entries_before(Queue *queue, int32_t row):
    # Return the handles that leave before this entry, by simulating the pops on a copy of the queue.
    cdef Queue future
    cdef int32_t entry
    handles = []
    try:
        queue_copy(&future, queue)
        entry = entry_next(&future)
        while entry != row:
            handles.append(handle_of(&future, entry))
            entry_serve(&future, entry)
            entry = entry_next(&future)
    finally:
        queue_end(&future)
    return handles
