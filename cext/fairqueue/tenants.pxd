"""The tenants: their rows, their counters, and which of them are remembered without entries."""

from libc.math cimport INFINITY, fmax, fmin
from libc.string cimport memset

from fairqueue.queue cimport (
    CLASSES, IDLE, NONE, RINGS, ROWS_AT_FIRST, PyObject, Queue, Tenant, int32_t, nodes_size, resized,
)
from fairqueue.turns cimport trees_restore, turn_join, turn_next

cdef inline void tenant_free(Queue *queue, int32_t row) noexcept:
    queue.tenants[row].next_free = queue.free_tenant
    queue.free_tenant = row

cdef inline int32_t tenant_begin(Queue *queue, dict rows, name, double weight) except -1:
    # Give a new tenant the first free row, and return it. It waits for nothing yet.
    cdef int32_t row, before = queue.tenants_capacity, capacity = max(2 * before, ROWS_AT_FIRST)
    cdef Tenant *tenant
    if queue.free_tenant == NONE:
        queue.nodes = <int32_t *>resized(queue.nodes, capacity, nodes_size(queue))
        queue.tenants = <Tenant *>resized(queue.tenants, capacity, sizeof(Tenant))
        memset(queue.nodes, NONE, capacity * nodes_size(queue))
        queue.tenants_capacity = capacity
        for row in range(before if queue.by_tokens else 0):
            trees_restore(queue, row)
        for row in range(capacity - 1, before - 1, -1):
            tenant_free(queue, row)
    row = rows[name] = queue.free_tenant
    tenant = &queue.tenants[row]
    queue.free_tenant = tenant.next_free
    memset(tenant, 0, sizeof(Tenant))
    tenant.name = <PyObject *>name
    tenant.weight = weight
    turn_join(queue, row, IDLE)
    return row

cdef inline bint is_in_line(Tenant *tenant) noexcept:
    return tenant.rings & ((1 << CLASSES) - 1) != 0

cdef inline double level(Queue *queue) noexcept:
    # Return the counter that a joining tenant is lifted to: the smallest in line, or the last that was.
    cdef double least = INFINITY
    cdef int32_t i, tenant
    for i in range(CLASSES):
        tenant = turn_next(queue, i)
        if tenant != NONE:
            least = fmin(least, queue.tenants[tenant].counter)
    return queue.last_level if least == INFINITY else least

cdef inline double counter_of(Queue *queue, Tenant *tenant) noexcept:
    return tenant.counter if is_in_line(tenant) else fmax(tenant.counter, level(queue))

cdef inline void tenant_charge(Queue *queue, int32_t row, double cost) noexcept:
    # The bound keeps every sum of charges finite.
    cdef Tenant *tenant = &queue.tenants[row]
    tenant.counter = fmin(counter_of(queue, tenant) + cost / tenant.weight, 1e300)
    trees_restore(queue, row)

cdef inline void tenant_refund(Queue *queue, int32_t row, double cost) noexcept:
    cdef Tenant *tenant = &queue.tenants[row]
    cdef double least = tenant.lift if is_in_line(tenant) else level(queue)
    cdef double counter = fmax(counter_of(queue, tenant) - cost / tenant.weight, least)
    # The level may be above the counter now and fall later: a refund must not raise the counter to it.
    tenant.counter = fmin(tenant.counter, counter)
    trees_restore(queue, row)

cdef inline void tenant_lift(Queue *queue, int32_t row) noexcept:
    # Raise the counter of a tenant that comes in line to the level.
    cdef Tenant *tenant = &queue.tenants[row]
    if queue.by_tokens and not is_in_line(tenant):
        tenant.lift = level(queue)
        tenant.counter = fmax(tenant.counter, tenant.lift)

cdef inline bint is_worth_remembering(Queue *queue, Tenant *tenant) noexcept:
    # Return whether an idle tenant affects the order.
    cdef double least = level(queue)
    cdef int32_t i = 0
    if queue.by_tokens:
        return tenant.counter > least or (tenant.counter == least and tenant.turn > 0)
    while i < CLASSES and tenant.lines[i].since != queue.rings[i].round:
        i += 1
    return i < CLASSES
