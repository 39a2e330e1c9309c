"""The tenants of a group: a ring for each class, under tokens also a tree with the next one on top, and their counters.

A team is a member of the first group (`TOP`), and has a group of its own members.
"""

from libc.math cimport INFINITY, fmax, fmin

from fairqueue.queue cimport *

cdef inline Line *line_of(Queue *queue, int32_t tenant, int32_t ring) noexcept:
    return &queue.tenants[tenant].lines[ring]

cdef inline Group *group_of(Queue *queue, int32_t tenant) noexcept:
    return &queue.groups[queue.tenants[tenant].group]

cdef inline int32_t team_of(Queue *queue, int32_t tenant) noexcept:
    # Return the row of a tenant's team, or NONE; of a team, NONE.
    cdef int32_t group = queue.tenants[tenant].group
    return NONE if group == TOP else queue.groups[group].team

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
    cdef Group *group = group_of(queue, tenant)
    cdef int32_t *nodes = group.nodes + tree
    cdef Py_ssize_t node = group.capacity + queue.tenants[tenant].place
    cdef int32_t best = leaf, other
    nodes[node * RINGS] = leaf
    while node > 1:
        other = nodes[(node ^ 1) * RINGS]
        if is_before(queue, tree, other, best):
            best = other
        node //= 2
        nodes[node * RINGS] = best

cdef inline void trees_restore(Queue *queue, int32_t tenant) noexcept:
    # Repeat a tenant's matches in every tree that it is in.
    cdef int32_t i
    for i in range(RINGS):
        if queue.tenants[tenant].rings >> i & 1:
            tree_put(queue, i, tenant, tenant)

cdef inline void turn_join(Queue *queue, int32_t tenant, int32_t priority) noexcept:
    # Add a tenant: at the end if this round has served it, else before the first that was served. Under
    # tokens there are no rounds, and the order of the ring has no meaning.
    cdef Ring *ring = &group_of(queue, tenant).rings[priority]
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
    cdef Ring *ring = &group_of(queue, tenant).rings[priority]
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

cdef inline int32_t turn_next(Queue *queue, int32_t group, int32_t priority) noexcept:
    # Return the next tenant or team in turn. The ring must not be empty.
    if queue.by_tokens:
        return queue.groups[group].nodes[RINGS + priority]
    return queue.groups[group].rings[priority].tenants.first

cdef inline int32_t line_next(Queue *queue, int32_t priority) noexcept:
    # Return the tenant whose line is next: of a team, the member that is. The ring must not be empty.
    cdef int32_t row = turn_next(queue, TOP, priority)
    cdef int32_t members = queue.tenants[row].members
    return row if members == TOP else turn_next(queue, members, priority)

cdef inline int32_t group_begin(Queue *queue, int32_t team) except -1:
    # Return a group without members. One that was used before has free places and rings without tenants already.
    cdef int32_t group, i, before = queue.groups_capacity, capacity = max(2 * before, 1)
    if queue.free_group == NONE:
        resize(<void **>&queue.groups, capacity, sizeof(Group))
        queue.groups_capacity = capacity
        memset(&queue.groups[before], 0, (capacity - before) * sizeof(Group))
        for group in range(capacity - 1, before - 1, -1):
            for i in range(RINGS):
                queue.groups[group].rings[i].first_served, queue.groups[group].rings[i].round = NONE, 1
            queue.groups[group].team = queue.free_group
            queue.free_group = group
    group = queue.free_group
    queue.free_group = queue.groups[group].team
    queue.groups[group].team, queue.groups[group].last_level = team, 0.0
    return group

cdef inline int32_t *places_of(Group *group) noexcept:
    # Return a row of places, of which those from `members` on are free.
    return group.nodes + 2 * RINGS * group.capacity

cdef inline int32_t place_reserve(Queue *queue, int32_t row) except -1:
    # Make sure that a group has a free place, under tokens.
    cdef Group *group = &queue.groups[row]
    cdef int32_t i, capacity = max(2 * group.capacity, ROWS_AT_FIRST)
    if not queue.by_tokens or group.members < group.capacity:
        return 0
    resize(<void **>&group.nodes, capacity, queue.nodes_size)
    memset(group.nodes, NONE, capacity * queue.nodes_size)
    group.capacity = capacity
    for i in range(capacity):  # all before were taken
        places_of(group)[i] = i
    for i in range(queue.tenants_capacity):
        if queue.tenants[i].group == row:
            trees_restore(queue, i)
    return 0

cdef inline int32_t tenant_begin(Queue *queue, dict rows, name, int32_t group) except -1:
    # Assign the first free row to a new member of a group, and return the row. The tenant has no entries yet.
    cdef int32_t row, before = queue.tenants_capacity, capacity = max(2 * before, ROWS_AT_FIRST)
    cdef Tenant *tenant
    place_reserve(queue, group)
    if queue.free_tenant == NONE:
        resize(<void **>&queue.tenants, capacity, sizeof(Tenant))
        queue.tenants_capacity = capacity
        memset(&queue.tenants[before], 0, (capacity - before) * sizeof(Tenant))
        for row in range(capacity - 1, before - 1, -1):
            queue.tenants[row].next_free = queue.free_tenant
            queue.free_tenant = row
    row = rows[name] = queue.free_tenant
    tenant = &queue.tenants[row]
    queue.free_tenant = tenant.next_free
    memset(tenant, 0, sizeof(Tenant))
    tenant.name = <PyObject *>name
    tenant.group = group
    if queue.by_tokens:
        tenant.place = places_of(&queue.groups[group])[queue.groups[group].members]
    if group != TOP and queue.groups[group].members == 0:
        turn_leave(queue, queue.groups[group].team, IDLE)
    queue.groups[group].members += 1
    turn_join(queue, row, IDLE)
    return row

cdef inline int32_t team_begin(Queue *queue, dict teams, name) except -1:
    # Return the group of a new team. Until it has a member, it is idle.
    cdef int32_t row, group = group_begin(queue, NONE)
    try:
        row = tenant_begin(queue, teams, name, TOP)
    except MemoryError:
        queue.groups[group].team, queue.free_group = queue.free_group, group
        raise
    queue.groups[group].team, queue.tenants[row].members = row, group
    return group

cdef inline void tenant_end(Queue *queue, int32_t row) noexcept:
    # Free the row of an idle tenant, or of a team without members, and the team's group.
    cdef Tenant *tenant = &queue.tenants[row]
    cdef Group *group = group_of(queue, row)
    turn_leave(queue, row, IDLE)
    group.members -= 1
    if queue.by_tokens:
        places_of(group)[group.members] = tenant.place
    if tenant.members != TOP:
        queue.groups[tenant.members].team, queue.free_group = queue.free_group, tenant.members
    if group.members == 0 and group.team != NONE:
        turn_join(queue, group.team, IDLE)
    tenant.next_free, queue.free_tenant = queue.free_tenant, row

cdef inline bint is_in_line(Tenant *tenant) noexcept:
    return tenant.rings & ((1 << CLASSES) - 1) != 0

cdef inline double level(Queue *queue, int32_t group) noexcept:
    # Return the counter that a joining member is lifted to: the smallest in line, else the last that was.
    cdef double least = INFINITY
    cdef int32_t i
    for i in range(CLASSES):
        if queue.groups[group].rings[i].tenants.length > 0:
            least = fmin(least, queue.tenants[turn_next(queue, group, i)].counter)
    return queue.groups[group].last_level if least == INFINITY else least

cdef inline double counter_of(Queue *queue, Tenant *tenant) noexcept:
    return tenant.counter if is_in_line(tenant) else fmax(tenant.counter, level(queue, tenant.group))

cdef inline void tenant_charge(Queue *queue, int32_t row, double cost, bint is_refund) noexcept:
    cdef Tenant *tenant = &queue.tenants[row]
    cdef double counter = counter_of(queue, tenant)
    if is_refund:
        # The level may be above the counter now and fall later: a refund must not raise the counter to it.
        counter = fmax(counter - cost, tenant.lift if is_in_line(tenant) else level(queue, tenant.group))
        tenant.counter = fmin(tenant.counter, counter)
    else:
        tenant.counter = fmin(counter + cost, 1e300)  # so that every sum of charges is finite
    trees_restore(queue, row)
