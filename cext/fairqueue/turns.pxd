"""Whose turn it is in a class: its tenants form a ring, and under tokens also a tree with the next one on top."""

from fairqueue.queue cimport NONE, RINGS, Line, Queue, Ring, Tenant, int32_t

cdef inline Line *line_of(Queue *queue, int32_t tenant, int32_t ring) noexcept:
    return &queue.tenants[tenant].lines[ring]

cdef inline bint is_before(Queue *queue, int32_t tree, int32_t one, int32_t other) noexcept:
    cdef Tenant *a = &queue.tenants[one]
    cdef Tenant *b = &queue.tenants[other]
    if one == NONE or other == NONE:
        return other == NONE
    if a.counter != b.counter:
        return a.counter < b.counter
    if a.turn != b.turn:
        return a.turn < b.turn
    return a.lines[tree].since < b.lines[tree].since

# A tree is a tournament. Node 1 is its root, and the children of node i are 2i and 2i + 1. The leaves are a row of
# tenants each, or NONE; every other node is the one of its children that is before the other.
cdef inline void tree_put(Queue *queue, int32_t tree, int32_t tenant, int32_t leaf) noexcept:
    # Set the leaf of a tenant, and repeat its matches.
    cdef int32_t *nodes = queue.nodes + tree
    cdef Py_ssize_t node = queue.tenants_capacity + tenant
    cdef int32_t one, other
    nodes[node * RINGS] = leaf
    while node > 1:
        one, other = nodes[(node & ~1) * RINGS], nodes[(node | 1) * RINGS]
        node //= 2
        nodes[node * RINGS] = other if is_before(queue, tree, other, one) else one

cdef inline void trees_restore(Queue *queue, int32_t tenant) noexcept:
    # Repeat a tenant's matches in every tree that it is in.
    cdef int32_t i
    for i in range(RINGS):
        if queue.tenants[tenant].rings >> i & 1:
            tree_put(queue, i, tenant, tenant)

cdef inline void turn_join(Queue *queue, int32_t tenant, int32_t priority) noexcept:
    # Add a tenant that this round has served to the back, and any other before the first that was served. Under
    # tokens there are no rounds, and the order of the ring has no meaning.
    cdef Ring *ring = &queue.rings[priority]
    cdef Line *line = line_of(queue, tenant, priority)
    cdef bint was_served = line.since == ring.round
    line.next = ring.turn if was_served or ring.first_served == NONE else ring.first_served
    if line.next == NONE:
        ring.turn = line.next = line.previous = tenant
    line.previous = line_of(queue, line.next, priority).previous
    line_of(queue, line.previous, priority).next = tenant
    line_of(queue, line.next, priority).previous = tenant
    if not was_served and ring.turn == ring.first_served:
        ring.turn = tenant
    if was_served and ring.first_served == NONE:
        ring.first_served = tenant
    ring.tenants += 1
    queue.tenants[tenant].rings |= 1 << priority
    if queue.by_tokens:
        queue.clock += 1
        line.since = queue.clock
        tree_put(queue, priority, tenant, tenant)

cdef inline void turn_leave(Queue *queue, int32_t tenant, int32_t priority) noexcept:
    cdef Ring *ring = &queue.rings[priority]
    cdef Line *line = line_of(queue, tenant, priority)
    line_of(queue, line.previous, priority).next = line.next
    line_of(queue, line.next, priority).previous = line.previous
    if ring.first_served == tenant:
        ring.first_served = NONE if line.next == ring.turn else line.next
    if ring.turn == tenant:
        ring.turn = NONE if line.next == tenant else line.next
    ring.tenants -= 1
    queue.tenants[tenant].rings &= ~(1 << priority)
    if queue.by_tokens:
        tree_put(queue, priority, tenant, NONE)

cdef inline void turn_take(Queue *queue, int32_t tenant, int32_t priority) noexcept:
    # Record a turn of round robin; the tenant may have left the ring with its last entry. A second turn in a
    # round means that no other is left to serve in it: it is over, and this is the first turn of the next.
    cdef Ring *ring = &queue.rings[priority]
    cdef Line *line = line_of(queue, tenant, priority)
    if line.since == ring.round:
        ring.round += 1
        ring.first_served = NONE
    line.since = ring.round
    if line.chain.length > 0:
        turn_leave(queue, tenant, priority)
        turn_join(queue, tenant, priority)

cdef inline int32_t turn_next(Queue *queue, int32_t priority) noexcept:
    # Return the tenant whose turn it is, or NONE.
    cdef int32_t front = queue.rings[priority].turn
    return queue.nodes[RINGS + priority] if queue.by_tokens and front != NONE else front

cdef inline int32_t ring_after(Queue *queue, int32_t priority, int32_t tenant) noexcept:
    # Return the next tenant of the ring, or NONE after the last.
    tenant = line_of(queue, tenant, priority).next
    return NONE if tenant == queue.rings[priority].turn else tenant

cdef inline list turns_begin(Queue *queue, int32_t priority, Py_ssize_t limit):
    # Return the first `limit` tenants in the order of their turns.
    cdef int32_t tenant = turn_next(queue, priority)
    tenants = []
    try:
        while tenant != NONE and len(tenants) < limit:
            tenants.append(tenant)
            if queue.by_tokens:
                tree_put(queue, priority, tenant, NONE)  # until all are known
                tenant = turn_next(queue, priority)
            else:
                tenant = ring_after(queue, priority, tenant)
    finally:
        for tenant in tenants if queue.by_tokens else ():
            tree_put(queue, priority, tenant, tenant)
    return tenants
