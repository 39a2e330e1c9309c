"""How entries join and leave, and in which order: classes with their credits, then lines, then a line's entries."""

from libc.math cimport fmax, fmin

from fairqueue.queue cimport (
    CLASSES, IDLE, NONE, RUN, Chain, Load, Queue, Run, Tenant, entry_first, handle_of, int32_t, int64_t, queue_copy,
    queue_end, run_free, run_of,
)
from fairqueue.tenants cimport tenant_charge, tenant_lift
from fairqueue.turns cimport (
    is_before, line_of, ring_after, turn_join, turn_leave, turn_next, turn_take, turns_begin,
)

cdef inline Chain *chain_of(Queue *queue, Run *run) noexcept:
    if run.retried:
        return &queue.classes[run.priority].retried
    return &line_of(queue, run.tenant, run.priority).chain

cdef inline void entries_count(Queue *queue, Run *run, int32_t change) noexcept:
    chain_of(queue, run).length += change
    queue.tenants[run.tenant].waiting += change
    queue.classes[run.priority].length += change
    queue.length += change

cdef inline void run_begin(Queue *queue, int32_t row, int32_t owner, int32_t priority, bint retried) noexcept:
    # Link the first free run: last in its tenant's line, or before all of its class if it is retried.
    cdef Run *run = &queue.runs[row]
    queue.free_run = run.next
    run.tenant, run.priority, run.retried, run.begun = owner, priority, retried, 0
    cdef Chain *chain = chain_of(queue, run)
    if chain.length == 0:
        if not retried:
            tenant_lift(queue, owner)
            turn_join(queue, owner, priority)
        chain.first = run.previous = row
    run.next = chain.first
    run.previous = queue.runs[chain.first].previous
    queue.runs[run.previous].next = row
    queue.runs[run.next].previous = row
    if retried:
        chain.first = row

cdef inline void entry_join(
    Queue *queue, int32_t row, int32_t owner, double cost, int32_t priority, int64_t size, bint retried
) noexcept:
    # Make the row from `entry_reserve` an entry.
    cdef Run *run = run_of(queue, row)
    if queue.tenants[owner].waiting == 0:
        turn_leave(queue, owner, IDLE)
    if run.waiting == 0:
        run_begin(queue, row // RUN, owner, priority, retried)
    run.waiting |= 1 << run.begun
    run.begun += 1
    queue.loads[row] = Load(cost, size, 0)
    entries_count(queue, run, 1)

cdef inline void entry_leave(Queue *queue, int32_t row) noexcept:
    cdef Run *run = run_of(queue, row)
    cdef Tenant *tenant = &queue.tenants[run.tenant]
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
        queue.last_level = tenant.counter
        turn_leave(queue, run.tenant, run.priority)
    if tenant.waiting == 0:
        turn_join(queue, run.tenant, IDLE)
    if queue.classes[run.priority].length == 0:
        queue.classes[run.priority].credit = 0.0
    run_free(queue, row // RUN)

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
        return entry_first(queue, &queue.classes[priority].retried)
    return entry_first(queue, &line_of(queue, turn_next(queue, priority), priority).chain)

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
        turn_take(queue, run.tenant, run.priority)

cdef inline int chain_append(Queue *queue, Chain *chain, list handles, Py_ssize_t limit) except -1:
    cdef Py_ssize_t end = min(len(handles) + chain.length, limit)
    cdef int32_t run = chain.first, i
    while len(handles) < end:
        for i in range(RUN):
            if queue.runs[run].waiting >> i & 1 and len(handles) < end:
                handles.append(handle_of(queue, run * RUN + i))
        run = queue.runs[run].next
    return 0

cdef inline list order_begin(Queue *queue, Py_ssize_t limit):
    # Return the first `limit` handles in the order in which `pop` tries them: first the class whose turn it is.
    cdef int32_t urgent = class_next(queue), priority, tenant, i
    handles = []
    for i in range(-1, CLASSES):
        priority = urgent if i == -1 else i
        if i == urgent or len(handles) == limit or queue.classes[priority].length == 0:
            continue
        chain_append(queue, &queue.classes[priority].retried, handles, limit)
        for tenant in turns_begin(queue, priority, limit - len(handles)):
            chain_append(queue, &line_of(queue, tenant, priority).chain, handles, limit)
    return handles

cdef inline Chain *line_longest(Queue *queue, int32_t priority) noexcept:
    # Return the line with the most entries, or NULL; of several, the one whose turn is furthest away.
    cdef int32_t tenant = queue.rings[priority].turn, longest = tenant
    cdef Chain *most = NULL
    cdef Chain *line
    while tenant != NONE:
        line = &line_of(queue, tenant, priority).chain
        if most == NULL or line.length > most.length or (
            line.length == most.length and (not queue.by_tokens or is_before(queue, priority, longest, tenant))
        ):
            longest, most = tenant, line
        tenant = ring_after(queue, priority, tenant)
    return most

cdef inline int64_t entries_before(Queue *queue, int32_t row, list handles) except -1:
    # Return how many entries leave before this one, by simulating the pops on a copy of the queue. Append their
    # handles, unless `handles` is None.
    cdef Queue future
    cdef int64_t count = 0
    cdef int32_t entry
    try:
        queue_copy(&future, queue)
        entry = entry_next(&future)
        while entry != row:
            if handles is not None:
                handles.append(handle_of(&future, entry))
            entry_serve(&future, entry)
            entry = entry_next(&future)
            count += 1
    finally:
        queue_end(&future)
    return count
