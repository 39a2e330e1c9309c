"""Whose turn it is in a class: a ring of tenants for round robin, a heap by counter for tokens."""

from libc.math cimport INFINITY, fmax, fmin

from fairqueue.queue cimport CLASSES, HEAPS, IDLE, NONE, Class, Line, Queue, Tenant, int32_t

cdef inline void ring_join(Queue *queue, int32_t tenant, int32_t priority) noexcept:
    # Add a tenant that this round has served to the back, and any other before the first that was served.
    cdef Class *ring = &queue.classes[priority]
    cdef Line *line = &queue.tenants[tenant].lines[priority]
    cdef Line *follower
    cdef bint was_served = line.served == ring.round
    line.next = ring.turn if was_served or ring.first_served == NONE else ring.first_served
    if line.next == NONE:
        line.previous = line.next = tenant
    else:
        follower = &queue.tenants[line.next].lines[priority]
        line.previous = follower.previous
        queue.tenants[line.previous].lines[priority].next = tenant
        follower.previous = tenant
    if ring.turn == NONE or (ring.turn == ring.first_served and not was_served):
        ring.turn = tenant
    if was_served and ring.first_served == NONE:
        ring.first_served = tenant

cdef inline void ring_leave(Queue *queue, int32_t tenant, int32_t priority) noexcept:
    cdef Class *ring = &queue.classes[priority]
    cdef Line *line = &queue.tenants[tenant].lines[priority]
    if line.next == tenant:
        ring.turn = ring.first_served = NONE
        return
    queue.tenants[line.previous].lines[priority].next = line.next
    queue.tenants[line.next].lines[priority].previous = line.previous
    if ring.first_served == tenant:
        ring.first_served = NONE if line.next == ring.turn else line.next
    if ring.turn == tenant:
        ring.turn = line.next

cdef inline void ring_turn(Queue *queue, int32_t tenant, int32_t priority) noexcept:
    # Record a tenant's turn; it may have left the ring with its last entry. A second turn in a round means
    # that no other tenant is left to serve in it: the round is over, and this is the first turn of the next.
    cdef Class *ring = &queue.classes[priority]
    cdef Line *line = &queue.tenants[tenant].lines[priority]
    if line.served == ring.round:
        ring.round += 1
        ring.first_served = NONE
    line.served = ring.round
    if line.chain.length > 0:
        ring_leave(queue, tenant, priority)
        ring_join(queue, tenant, priority)

cdef inline bint is_before(Queue *queue, int32_t heap, int32_t one, int32_t other) noexcept:
    cdef Tenant *a = &queue.tenants[one]
    cdef Tenant *b = &queue.tenants[other]
    if a.counter != b.counter:
        return a.counter < b.counter
    if a.turn != b.turn:
        return a.turn < b.turn
    return one < other if heap == IDLE else a.lines[heap].joined < b.lines[heap].joined

cdef inline void heap_put(Queue *queue, int32_t heap, int32_t place, int32_t tenant) noexcept:
    queue.heaps[place * HEAPS + heap] = tenant
    queue.tenants[tenant].places[heap] = place

cdef inline void heap_restore(Queue *queue, int32_t heap, int32_t place) noexcept:
    # Move one member up or down until none is before its parent.
    cdef int32_t *members = queue.heaps + heap
    cdef int32_t tenant = members[place * HEAPS]
    cdef int32_t child
    while place > 0 and is_before(queue, heap, tenant, members[(place - 1) // 2 * HEAPS]):
        heap_put(queue, heap, place, members[(place - 1) // 2 * HEAPS])
        place = (place - 1) // 2
    while 2 * place + 1 < queue.heap_lengths[heap]:
        child = 2 * place + 1
        if child + 1 < queue.heap_lengths[heap]:
            child += is_before(queue, heap, members[(child + 1) * HEAPS], members[child * HEAPS])
        if not is_before(queue, heap, members[child * HEAPS], tenant):
            break
        heap_put(queue, heap, place, members[child * HEAPS])
        place = child
    heap_put(queue, heap, place, tenant)

cdef inline void heap_add(Queue *queue, int32_t heap, int32_t tenant) noexcept:
    queue.heap_lengths[heap] += 1
    heap_put(queue, heap, queue.heap_lengths[heap] - 1, tenant)
    heap_restore(queue, heap, queue.heap_lengths[heap] - 1)

cdef inline void heap_remove(Queue *queue, int32_t heap, int32_t tenant) noexcept:
    cdef int32_t place = queue.tenants[tenant].places[heap]
    queue.heap_lengths[heap] -= 1
    queue.tenants[tenant].places[heap] = NONE
    if place < queue.heap_lengths[heap]:
        heap_put(queue, heap, place, queue.heaps[queue.heap_lengths[heap] * HEAPS + heap])
        heap_restore(queue, heap, place)

cdef inline void heap_sort(Queue *queue, int32_t heap) noexcept:
    # A sorted array is a heap too. Shellsort: in place, and fast if it is sorted already.
    cdef int32_t *members = queue.heaps + heap
    cdef int32_t gap = 1, i, place, tenant
    while gap < queue.heap_lengths[heap] // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(gap, queue.heap_lengths[heap]):
            tenant = members[i * HEAPS]
            place = i
            while place >= gap and is_before(queue, heap, tenant, members[(place - gap) * HEAPS]):
                heap_put(queue, heap, place, members[(place - gap) * HEAPS])
                place -= gap
            heap_put(queue, heap, place, tenant)
        gap //= 3

cdef inline double level(Queue *queue) noexcept:
    # Return the counter that a joining tenant is lifted to: the smallest in line, or the last that was.
    cdef double least = INFINITY
    cdef int32_t i
    for i in range(CLASSES):
        if queue.heap_lengths[i] > 0:
            least = fmin(least, queue.tenants[queue.heaps[i]].counter)
    return queue.last_level if least == INFINITY else least

cdef inline bint is_in_line(Queue *queue, int32_t tenant) noexcept:
    cdef int32_t i = 0
    while i < CLASSES and queue.tenants[tenant].places[i] == NONE:
        i += 1
    return i < CLASSES

cdef inline double counter_of(Queue *queue, int32_t tenant) noexcept:
    cdef double counter = queue.tenants[tenant].counter
    return counter if is_in_line(queue, tenant) else fmax(counter, level(queue))

cdef inline void tenant_count(Queue *queue, int32_t tenant, double counter) noexcept:
    # Set the counter, and restore the heaps that have the tenant; its turn may have changed too.
    cdef int32_t i
    queue.tenants[tenant].counter = counter
    for i in range(HEAPS):
        if queue.tenants[tenant].places[i] != NONE:
            heap_restore(queue, i, queue.tenants[tenant].places[i])
    queue.clock += 1

cdef inline void tenant_charge(Queue *queue, int32_t tenant, double cost) noexcept:
    # The bound keeps every sum of charges finite.
    tenant_count(queue, tenant, fmin(counter_of(queue, tenant) + cost / queue.tenants[tenant].weight, 1e300))

cdef inline void tenant_refund(Queue *queue, int32_t tenant, double cost) noexcept:
    cdef double least = queue.tenants[tenant].lift if is_in_line(queue, tenant) else level(queue)
    cdef double counter = fmax(counter_of(queue, tenant) - cost / queue.tenants[tenant].weight, least)
    # The level may be above the counter now and fall later: a refund must not raise the counter to it.
    tenant_count(queue, tenant, fmin(queue.tenants[tenant].counter, counter))

cdef inline bint tenant_matters(Queue *queue, int32_t row) noexcept:
    # Return whether remembering an idle tenant affects the order.
    cdef Tenant *tenant = &queue.tenants[row]
    cdef double least
    cdef int32_t i = 0
    if queue.by_tokens:
        least = level(queue)
        return tenant.counter > least or (tenant.counter == least and tenant.turn > 0)
    while i < CLASSES and tenant.lines[i].served != queue.classes[i].round:
        i += 1
    return i < CLASSES
