"""How entries join and leave the queue, and with them their tenants."""

from libc.math cimport fmax

from fairqueue.queue cimport IDLE, NONE, Chain, Class, Entry, Load, Queue, Tenant, entry_free, int32_t, int64_t
from fairqueue.ring cimport ring_join, ring_leave
from fairqueue.tokens cimport heap_add, heap_remove, is_in_line, level

cdef inline Chain *chain_of(Queue *queue, const Entry *entry) noexcept:
    if entry.retried:
        return &queue.classes[entry.priority].retried
    return &queue.tenants[entry.tenant].lines[entry.priority].chain

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

cdef inline void line_leave(Queue *queue, int32_t owner, int32_t priority) noexcept:
    if queue.by_tokens:
        queue.last_level = queue.tenants[owner].counter
        heap_remove(queue, priority, owner)
    else:
        ring_leave(queue, owner, priority)

cdef inline void entry_join(
    Queue *queue, int32_t owner, double cost, int32_t priority, int64_t size, bint retried
) noexcept:
    # Make the first free row an entry: last in its tenant's line, or before all of its class if `retried`.
    cdef int32_t row = queue.free_entry
    cdef Entry *entry = &queue.entries[row]
    cdef Tenant *tenant = &queue.tenants[owner]
    queue.free_entry = entry.next
    entry.tenant = owner
    entry.priority = priority
    entry.retried = retried
    queue.loads[row] = Load(cost, size, 0)
    cdef Chain *chain = chain_of(queue, entry)
    if tenant.places[IDLE] != NONE:
        heap_remove(queue, IDLE, owner)
    if chain.length == 0:
        if not retried:
            line_join(queue, owner, priority)
        chain.first = entry.previous = row
    else:
        entry.previous = queue.entries[chain.first].previous
    entry.next = chain.first
    queue.entries[entry.previous].next = row
    queue.entries[chain.first].previous = row
    if retried:
        chain.first = row
    chain.length += 1
    tenant.waiting += 1
    queue.classes[priority].length += 1
    queue.length += 1
    queue.clock += 1

cdef inline void entry_leave(Queue *queue, int32_t row) noexcept:
    cdef Entry *entry = &queue.entries[row]
    cdef Class *its_class = &queue.classes[entry.priority]
    cdef Chain *chain = chain_of(queue, entry)
    queue.entries[entry.previous].next = entry.next
    queue.entries[entry.next].previous = entry.previous
    if chain.first == row:
        chain.first = entry.next
    chain.length -= 1
    if chain.length == 0 and not entry.retried:
        line_leave(queue, entry.tenant, entry.priority)
    queue.tenants[entry.tenant].waiting -= 1
    its_class.length -= 1
    if its_class.length == 0:
        its_class.credit = 0.0
    queue.length -= 1
    queue.clock += 1
    entry_free(queue, row)
