"""How entries join and leave, and in which order: classes with their credits, then lines, then a line's entries."""

from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize

from fairqueue.queue cimport *
from fairqueue.tenants cimport *

cdef inline List *list_of(Queue *queue, Entry *entry) noexcept:
    if is_retried(entry):
        return &queue.classes[priority_of(entry)].retried
    return &line_of(queue, tenant_of(entry), priority_of(entry)).entries

cdef inline void entry_join(
    Queue *queue, int32_t tenant, double cost, int32_t priority, int64_t size, bint retried
) noexcept:
    # Make the row from `entry_reserve` an entry: last in its tenant's line, or if it is retried first of its class.
    cdef int32_t row = queue.free_entry
    cdef Entry *entry = &queue.entries[row]
    cdef List *entries
    queue.free_entry = entry.place
    entry.generation += 1
    entry.place = (tenant * 2 + retried) * CLASSES + priority
    queue.loads[row] = Load(cost, size, 0)
    if queue.tenants[tenant].waiting == 0:
        turn_leave(queue, tenant, IDLE)
    entries = list_of(queue, entry)
    if entries.length == 0 and not retried:
        tenant_lift(queue, tenant)
        turn_join(queue, tenant, priority)
    unlink(queue.entries, sizeof(Entry), row)
    list_add(entries, queue.entries, sizeof(Entry), row, entries.first)
    if retried:
        entries.first = row
    queue.tenants[tenant].waiting += 1
    queue.classes[priority].length += 1
    queue.length += 1

cdef inline void entry_leave(Queue *queue, int32_t row) noexcept:
    cdef Entry *entry = &queue.entries[row]
    cdef int32_t tenant = tenant_of(entry), priority = priority_of(entry)
    cdef List *entries = list_of(queue, entry)
    queue.tenants[tenant].waiting -= 1
    queue.classes[priority].length -= 1
    queue.length -= 1
    entries.length -= 1
    entry.generation += 1
    if entries.length > 0 and entries.first == row:
        entries.first = entry_after(queue, row)
    if entries.length == 0 and not is_retried(entry):
        queue.last_level = queue.tenants[tenant].counter
        turn_leave(queue, tenant, priority)
    if queue.tenants[tenant].waiting == 0:
        turn_join(queue, tenant, IDLE)
    if queue.classes[priority].length == 0:
        queue.classes[priority].credit = 0.0
    entry_free(queue, row)

cdef inline int32_t class_next(Queue *queue) noexcept:
    # Return the highest class that waits, or if lower ones have credit for a pop, the one with the most.
    cdef int32_t chosen = NONE, i
    cdef double most = 1.0 - 1e-9  # because ten times 0.1 does not add up to 1
    for i in range(CLASSES):
        if queue.classes[i].length > 0 and chosen == NONE:
            chosen = i
        elif queue.classes[i].length > 0 and queue.classes[i].credit > most:
            chosen, most = i, queue.classes[i].credit
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
    cdef int32_t tenant = tenant_of(entry)
    cdef double before = queue.tenants[tenant].counter
    credits_accrue(queue, priority_of(entry))
    if is_retried(entry):
        entry_leave(queue, row)
        return
    queue.clock += 1
    queue.tenants[tenant].turn = queue.clock
    if queue.by_tokens:
        # Charge first: out of line, a counter below the level would be lifted to it.
        tenant_charge(queue, tenant, queue.loads[row].cost)
    else:
        turn_take(queue, tenant, priority_of(entry))
    entry_leave(queue, row)
    queue.last_level = before  # so that a refund of the last entry's charge is not lost

cdef inline int list_append(Queue *queue, List *entries, list handles, Py_ssize_t limit) except -1:
    cdef Py_ssize_t end = min(len(handles) + entries.length, limit)
    cdef int32_t row = entries.first
    while len(handles) < end:
        handles.append(handle_of(queue, row))
        row = entry_after(queue, row)
    return 0

cdef inline list order_begin(Queue *queue, Py_ssize_t limit):
    # Return the first `limit` handles in the order in which `pop` tries them: first the class whose turn it is.
    cdef int32_t urgent = class_next(queue), priority, tenant, i
    handles, taken = [], []
    try:
        for i in range(-1, CLASSES):
            priority = urgent if i == -1 else i
            if i == urgent or queue.classes[priority].length == 0:
                continue
            list_append(queue, &queue.classes[priority].retried, handles, limit)
            tenant = turn_next(queue, priority)
            for _ in range(queue.classes[priority].tenants.length):
                if len(handles) == limit:
                    break
                list_append(queue, &line_of(queue, tenant, priority).entries, handles, limit)
                if queue.by_tokens:
                    taken.append(tenant)
                    tree_put(queue, priority, tenant, NONE)  # until all are known
                tenant = turn_next(queue, priority) if queue.by_tokens else line_of(queue, tenant, priority).link.next
    finally:
        for tenant in taken:
            trees_restore(queue, tenant)
    return handles

cdef inline List *line_longest(Queue *queue, int32_t priority) noexcept:
    # Return the line with the most entries, or NULL; of several, the one whose turn is furthest away.
    cdef List *tenants = &queue.classes[priority].tenants
    cdef List *most = NULL
    cdef List *line
    cdef int32_t tenant = tenants.first, longest = NONE, i
    for i in range(tenants.length):
        line = &line_of(queue, tenant, priority).entries
        if most == NULL or line.length > most.length or (
            line.length == most.length and (not queue.by_tokens or is_before(queue, priority, longest, tenant))
        ):
            longest, most = tenant, line
        tenant = line_of(queue, tenant, priority).link.next
    return most

cdef inline list entries_before(Queue *queue, int32_t row):
    # Return the handles that leave before this entry, by simulating the pops on a copy of the queue.
    cdef Queue future = queue[0]
    cdef int32_t entry
    entries = PyByteArray_FromStringAndSize(<char *>queue.entries, queue.entries_capacity * sizeof(Entry))
    tenants = PyByteArray_FromStringAndSize(<char *>queue.tenants, queue.tenants_capacity * sizeof(Tenant))
    nodes = PyByteArray_FromStringAndSize(<char *>queue.nodes, queue.tenants_capacity * nodes_size(queue))
    future.entries = <Entry *>PyByteArray_AS_STRING(entries)
    future.tenants = <Tenant *>PyByteArray_AS_STRING(tenants)
    future.nodes = <int32_t *>PyByteArray_AS_STRING(nodes)
    handles = []
    entry = entry_next(&future)
    while entry != row:
        handles.append(handle_of(&future, entry))
        entry_serve(&future, entry)
        entry = entry_next(&future)
    return handles
