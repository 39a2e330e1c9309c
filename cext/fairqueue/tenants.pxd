"""The tenants: a ring for each class, under tokens also a tree with the next one on top, and their counters."""

from libc.math cimport INFINITY, fmax, fmin

from fairqueue.queue cimport *

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

# A tree is a tournament. Node 1 is its root, and the children of node i are 2i and 2i + 1. Each leaf is the row
# of a tenant, or NONE. Every other node is the one of its children that is before the other.
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
    # Add a tenant: at the end if this round has served it, else before the first that was served. Under
    # tokens there are no rounds, and the order of the ring has no meaning.
    cdef Class *ring = &queue.classes[priority]
    cdef Line *line = line_of(queue, tenant, priority)
    cdef bint was_served = line.since == ring.round
    cdef int32_t next = ring.tenants.first if was_served or ring.first_served == NONE else ring.first_served
    line.link = Link(tenant, tenant)
    if ring.tenants.length > 0:
        link(&queue.tenants.lines[priority].link, sizeof(Tenant) // sizeof(Link), tenant, next)
    if ring.tenants.length == 0 or (not was_served and ring.first_served == ring.tenants.first):
        ring.tenants.first = tenant
    if was_served and ring.first_served == NONE:
        ring.first_served = tenant
    ring.tenants.length += 1
    queue.tenants[tenant].rings |= 1 << priority
    if queue.by_tokens:
        queue.clock += 1
        line.since = queue.clock
        tree_put(queue, priority, tenant, tenant)

cdef inline void turn_leave(Queue *queue, int32_t tenant, int32_t priority) noexcept:
    cdef Class *ring = &queue.classes[priority]
    cdef int32_t next = line_of(queue, tenant, priority).link.next
    if ring.first_served == tenant:
        ring.first_served = NONE if next == ring.tenants.first else next
    if ring.tenants.first == tenant:
        ring.tenants.first = next
    ring.tenants.length -= 1
    unlink(&queue.tenants.lines[priority].link, sizeof(Tenant) // sizeof(Link), tenant)
    queue.tenants[tenant].rings &= ~(1 << priority)
    if queue.by_tokens:
        tree_put(queue, priority, tenant, NONE)

cdef inline int32_t turn_next(Queue *queue, int32_t priority) noexcept:
    # Return the next tenant in turn. The ring must not be empty.
    return queue.nodes[RINGS + priority] if queue.by_tokens else queue.classes[priority].tenants.first

cdef inline int32_t tenant_begin(Queue *queue, dict rows, name) except -1:
    # Assign the first free row to a new tenant, and return the row. The tenant has no entries yet.
    cdef int32_t row, before = queue.tenants_capacity, capacity = max(2 * before, ROWS_AT_FIRST)
    cdef Tenant *tenant
    if queue.free_tenant == NONE:
        resize(<void **>&queue.tenants, capacity, sizeof(Tenant))
        resize(<void **>&queue.nodes, capacity, queue.nodes_size)
        memset(queue.nodes, NONE, capacity * queue.nodes_size)
        queue.tenants_capacity = capacity
        for row in range(before if queue.by_tokens else 0):
            trees_restore(queue, row)
        for row in range(capacity - 1, before - 1, -1):
            queue.tenants[row].next_free = queue.free_tenant
            queue.free_tenant = row
    row = rows[name] = queue.free_tenant
    tenant = &queue.tenants[row]
    queue.free_tenant = tenant.next_free
    memset(tenant, 0, sizeof(Tenant))
    tenant.name = <PyObject *>name
    turn_join(queue, row, IDLE)
    return row

cdef inline bint is_in_line(Tenant *tenant) noexcept:
    return tenant.rings & ((1 << CLASSES) - 1) != 0

cdef inline double level(Queue *queue) noexcept:
    # Return the counter that a joining tenant is lifted to: the smallest in line, else the last that was.
    cdef double least = INFINITY
    cdef int32_t i
    for i in range(CLASSES):
        if queue.classes[i].tenants.length > 0:
            least = fmin(least, queue.tenants[turn_next(queue, i)].counter)
    return queue.last_level if least == INFINITY else least

cdef inline double counter_of(Queue *queue, Tenant *tenant) noexcept:
    return tenant.counter if is_in_line(tenant) else fmax(tenant.counter, level(queue))

cdef inline void tenant_charge(Queue *queue, int32_t row, double cost, bint is_refund) noexcept:
    cdef Tenant *tenant = &queue.tenants[row]
    cdef double counter = counter_of(queue, tenant)
    if is_refund:
        # The level may be above the counter now and fall later: a refund must not raise the counter to it.
        counter = fmax(counter - cost, tenant.lift if is_in_line(tenant) else level(queue))
        tenant.counter = fmin(tenant.counter, counter)
    else:
        tenant.counter = fmin(counter + cost, 1e300)  # so that every sum of charges is finite
    trees_restore(queue, row)
