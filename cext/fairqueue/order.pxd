"""How entries join and leave, and in which order: classes with their credits, then lines, then a line's entries.

A team counts the entries of its members, and joins and leaves rings with the first and the last of them.
"""

from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize

from fairqueue.queue cimport *
from fairqueue.tenants cimport *

cdef inline List *list_of(Queue *queue, Entry *entry) noexcept:
    if is_retried(entry):
        return &queue.classes[priority_of(entry)].retried
    return &line_of(queue, tenant_of(entry), priority_of(entry)).entries

cdef inline void entries_count(Queue *queue, Entry *entry, int32_t change) noexcept:
    cdef int32_t team = team_of(queue, tenant_of(entry))
    list_of(queue, entry).length += change
    queue.tenants[tenant_of(entry)].waiting += change
    if team != NONE:
        queue.tenants[team].waiting += change
        if not is_retried(entry):
            line_of(queue, team, priority_of(entry)).entries.length += change
    queue.classes[priority_of(entry)].length += change
    queue.length += change

cdef inline void line_begin(Queue *queue, int32_t row, int32_t priority) noexcept:
    # Put a tenant or a team, which had no entries of a class, in line for it.
    cdef Tenant *tenant = &queue.tenants[row]
    if not is_in_line(tenant):
        tenant.lift, tenant.counter = level(queue, tenant.group), counter_of(queue, tenant)
    turn_join(queue, row, priority)
    line_of(queue, row, priority).kinds = 0

cdef inline void entry_join(Queue *queue, int32_t row, Load load, int32_t priority, bint retried) noexcept:
    # Add the entry of `entry_reserve` to a tenant: last in its line, first if it has begun, or first of its class if it
    # is retried.
    cdef int32_t added = queue.free_entry
    cdef Entry *entry = &queue.entries[added]
    cdef List *entries
    cdef Line *line
    last_unlink(queue)
    queue.free_entry = entry.place
    entry.generation += 1
    entry.place = (row * 2 + retried) * CLASSES + priority
    queue.loads[added] = load
    entries = list_of(queue, entry)
    if queue.tenants[row].waiting == 0:
        turn_leave(queue, row, IDLE)
    while not retried and row != NONE:  # of its tenant, and its team
        line = line_of(queue, row, priority)
        if line.entries.length == 0:
            line_begin(queue, row, priority)
        line.kinds |= <uint64_t>1 << load.kind
        row = team_of(queue, row)
    if entries.length > 0:
        link(&queue.entries.link, sizeof(Entry) // sizeof(Link), added, entries.first)
    if entries.length == 0 or retried or load.begun:
        entries.first = added
    entries_count(queue, entry, 1)

cdef inline void line_end(Queue *queue, int32_t row, int32_t priority) noexcept:
    # Remove a tenant or a team from a ring, if no entry is left in its line.
    if line_of(queue, row, priority).entries.length == 0:
        group_of(queue, row).last_level = queue.tenants[row].counter
        turn_leave(queue, row, priority)

cdef inline void entry_leave(Queue *queue, int32_t row) noexcept:
    cdef Entry *entry = &queue.entries[row]
    cdef int32_t tenant = tenant_of(entry), priority = priority_of(entry), each = tenant
    cdef List *entries = list_of(queue, entry)
    entries_count(queue, entry, -1)
    entry.generation += 1
    last_unlink(queue)
    if entries.first == row:
        entries.first = entry.link.next
    while not is_retried(entry) and each != NONE:
        line_end(queue, each, priority)
        each = team_of(queue, each)
    if queue.tenants[tenant].waiting == 0:
        turn_join(queue, tenant, IDLE)
    if queue.classes[priority].length == 0:
        queue.classes[priority].credit = 0.0
    if entry.generation < GENERATIONS:
        entry.place, queue.free_entry = queue.free_entry, row
    else:  # the row is never used again
        unlink(&queue.entries.link, sizeof(Entry) // sizeof(Link), row)

cdef inline int32_t class_next(Queue *queue) noexcept:
    # Return the highest waiting class. If lower ones have credit for a pop, return the one with the most.
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
    cdef double earned = 0.0
    cdef int32_t i
    for i in range(CLASSES):
        if queue.classes[i].length > 0:
            queue.classes[i].credit = fmin(queue.classes[i].credit + earned, 4.0)
            earned = queue.min_share
    queue.classes[popped].credit = fmax(queue.classes[popped].credit - 1.0, 0.0)

cdef inline int32_t entry_next(Queue *queue) noexcept:
    # Return the entry that leaves next, or NONE.
    cdef int32_t priority = class_next(queue)
    if priority == NONE:
        return NONE
    if queue.classes[priority].retried.length > 0:
        return queue.classes[priority].retried.first
    return line_of(queue, line_next(queue, priority), priority).entries.first

cdef inline void turn_take(Queue *queue, int32_t row, int32_t priority, double cost) noexcept:
    # Count a turn of a tenant or a team, and charge it.
    cdef Ring *ring = &group_of(queue, row).rings[priority]
    queue.clock = queue.tenants[row].turn = queue.clock + 1
    if queue.by_tokens:
        tenant_charge(queue, row, cost, False)
    else:
        # A second turn in a round means that no other is left to serve in it. This is the first of the next round.
        turn_leave(queue, row, priority)
        if line_of(queue, row, priority).since == ring.round:
            ring.round, ring.first_served = ring.round + 1, NONE
        line_of(queue, row, priority).since = ring.round
        turn_join(queue, row, priority)

cdef inline void entry_serve(Queue *queue, int32_t row) noexcept:
    # Like `entry_leave`, and count the turns and charges of the tenant and its team. An entry of several pops leaves at
    # the last.
    cdef Entry *entry = &queue.entries[row]
    cdef int32_t tenant = tenant_of(entry), priority = priority_of(entry), team = team_of(queue, tenant), each = tenant
    cdef double before = queue.tenants[tenant].counter, cost = queue.loads[row].cost
    cdef double team_before = 0.0 if team == NONE else queue.tenants[team].counter
    credits_accrue(queue, priority)
    if is_retried(entry):
        entry_shrink(queue, row)
        return
    # Charge first: out of line, a counter below the level would be lifted to it.
    while each != NONE:
        turn_take(queue, each, priority, cost)
        each, cost = team_of(queue, each), queue.loads[row].team_cost
    if not entry_shrink(queue, row):
        return
    group_of(queue, tenant).last_level = before  # so that a refund of the last entry's charge is not lost
    if team != NONE:
        group_of(queue, team).last_level = team_before

cdef inline bint entry_shrink(Queue *queue, int32_t row) noexcept:
    # Count one pop of an entry. Return whether it has left.
    cdef Load *load = &queue.loads[row]
    if load.left == 1:
        entry_leave(queue, row)
        return True
    load.left -= 1
    load.passed = 0
    load.begun = 1
    return False

cdef inline int32_t first_of(Queue *queue, List *entries, uint64_t kinds) noexcept:
    # Return the first entry of these kinds, or NONE.
    cdef int32_t row = entries.first
    for _ in range(entries.length):
        if kinds >> queue.loads[row].kind & 1:
            return row
        row = queue.entries[row].link.next
    return NONE

cdef inline int32_t group_first(Queue *queue, int32_t group, int32_t priority, uint64_t kinds) noexcept:
    # Return the first entry of these kinds in the order of `pop`, of the members of a group in a class, or NONE. All
    # members are visited, or under round robin those before it. Unlike `group_append`, this changes no tree.
    cdef List *tenants = &queue.groups[group].rings[priority].tenants
    cdef Line *line
    cdef int32_t tenant = tenants.first, best = NONE, row, first = NONE
    for _ in range(tenants.length):
        line = line_of(queue, tenant, priority)
        if line.kinds & kinds and is_before(queue, priority, tenant, best):
            if queue.tenants[tenant].members != TOP:
                row = group_first(queue, queue.tenants[tenant].members, priority, kinds)
            else:
                row = first_of(queue, &line.entries, kinds)
            if row == NONE:
                line.kinds &= ~kinds
            else:
                best, first = tenant, row
                if not queue.by_tokens:
                    break
        tenant = line.link.next
    return first

cdef inline list_append(Queue *queue, List *entries, list handles, Py_ssize_t limit, uint64_t kinds):
    cdef int32_t row = entries.first
    for _ in range(entries.length):
        if len(handles) == limit:
            break
        if kinds >> queue.loads[row].kind & 1:
            handles.append(handle_of(queue, row))
        row = queue.entries[row].link.next

cdef inline group_append(
    Queue *queue, int32_t group, int32_t priority, list handles, Py_ssize_t limit, uint64_t kinds, list taken
):
    # Append entries of the members of a group, member by member. Under tokens, the members visited are added to
    # `taken` and removed from the trees.
    cdef int32_t tenant = turn_next(queue, group, priority)
    cdef Line *line
    for _ in range(queue.groups[group].rings[priority].tenants.length):
        if len(handles) == limit:
            break
        line = line_of(queue, tenant, priority)
        if line.kinds & kinds and queue.tenants[tenant].members != TOP:
            group_append(queue, queue.tenants[tenant].members, priority, handles, limit, kinds, taken)
        elif line.kinds & kinds:
            list_append(queue, &line.entries, handles, limit, kinds)
        if queue.by_tokens:
            taken.append(tenant)
            tree_put(queue, priority, tenant, NONE)  # until all are known
        tenant = turn_next(queue, group, priority) if queue.by_tokens else line.link.next

cdef inline list order_begin(Queue *queue, Py_ssize_t limit, uint64_t kinds):
    # Return the first `limit` handles of these kinds in the order in which `pop` tries them: beginning with the class
    # that is next.
    cdef int32_t urgent = class_next(queue), priority, tenant, entry, i
    handles, taken = [], []
    last_unlink(queue)
    try:
        for i in range(-1, CLASSES):
            priority = urgent if i == -1 else i
            if len(handles) == limit or i == urgent or queue.classes[priority].length == 0:
                continue
            if limit == 1:
                entry = first_of(queue, &queue.classes[priority].retried, kinds)
                entry = group_first(queue, TOP, priority, kinds) if entry == NONE else entry
                if entry != NONE:
                    handles.append(handle_of(queue, entry))
                continue
            list_append(queue, &queue.classes[priority].retried, handles, limit, kinds)
            if queue.groups[TOP].rings[priority].tenants.length > 0:
                group_append(queue, TOP, priority, handles, limit, kinds, taken)
    finally:
        for tenant in taken:
            trees_restore(queue, tenant)
    return handles

cdef inline int32_t longest_of(Queue *queue, int32_t group, int32_t priority) noexcept:
    # Return the member of a group with the most entries in a class, or NONE; of several, the one with the most
    # distant turn.
    cdef List *tenants = &queue.groups[group].rings[priority].tenants
    cdef int32_t tenant = tenants.first, longest = tenant, more, i
    for i in range(tenants.length):
        more = line_of(queue, tenant, priority).entries.length - line_of(queue, longest, priority).entries.length
        if more > 0 or (more == 0 and (not queue.by_tokens or is_before(queue, priority, longest, tenant))):
            longest = tenant
        tenant = line_of(queue, tenant, priority).link.next
    return longest if tenants.length > 0 else NONE

cdef inline int32_t line_to_shorten(Queue *queue, int32_t priority, int32_t own, int32_t team, int32_t slack) noexcept:
    # Return the tenant that loses an entry of a class, or NONE. Its team, or the tenant itself if it has none, has at
    # least `slack` more entries than those that wait for the newcomer's team or tenant; or if it is of the
    # newcomer's team, than those that wait for the newcomer's tenant. Rows are NONE if nothing of them is known.
    cdef int32_t unit = own if team == NONE else team, longest = longest_of(queue, TOP, priority)
    if longest == NONE or line_of(queue, longest, priority).entries.length < waiting_of(queue, unit) + slack:
        longest = team
        if team == NONE or line_of(queue, team, priority).entries.length == 0:
            return NONE
    if queue.tenants[longest].members == TOP:
        return longest
    unit, longest = longest, longest_of(queue, queue.tenants[longest].members, priority)
    if unit == team and line_of(queue, longest, priority).entries.length < waiting_of(queue, own) + slack:
        return NONE
    return longest

cdef inline int32_t waiting_of(Queue *queue, int32_t tenant) noexcept:
    return 0 if tenant == NONE else queue.tenants[tenant].waiting

cdef inline int32_t last_not_begun(Queue *queue, List *entries) noexcept:
    # Return the last entry that has not begun, or NONE.
    cdef int32_t row = entries.first
    for _ in range(entries.length):
        row = queue.entries[row].link.previous
        if not queue.loads[row].begun:
            return row
    return NONE

cdef inline list entries_before(Queue *queue, int32_t row):
    # Return the handles that leave before this entry, or all if it is NONE, by simulating the pops on a copy of the queue.
    cdef Queue future = queue[0]
    cdef int32_t entry = entry_next(queue), i
    cdef Group *group
    entries = PyByteArray_FromStringAndSize(<char *>queue.entries, queue.entries_capacity * sizeof(Entry))
    tenants = PyByteArray_FromStringAndSize(<char *>queue.tenants, queue.tenants_capacity * sizeof(Tenant))
    groups = PyByteArray_FromStringAndSize(<char *>queue.groups, queue.groups_capacity * sizeof(Group))
    loads = PyByteArray_FromStringAndSize(<char *>queue.loads, queue.entries_capacity * sizeof(Load))
    future.entries = <Entry *>PyByteArray_AS_STRING(entries)
    future.loads = <Load *>PyByteArray_AS_STRING(loads)
    future.tenants = <Tenant *>PyByteArray_AS_STRING(tenants)
    future.groups = <Group *>PyByteArray_AS_STRING(groups)
    nodes = []
    for i in range(queue.groups_capacity):
        group = &future.groups[i]
        nodes.append(PyByteArray_FromStringAndSize(<char *>group.nodes, group.capacity * queue.nodes_size))
        group.nodes = <int32_t *>PyByteArray_AS_STRING(nodes[i])
    handles = []
    while entry != row:
        handles.append(handle_of(&future, entry))
        entry_serve(&future, entry)
        entry = entry_next(&future)
    return handles
