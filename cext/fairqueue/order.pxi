# The order in which entries leave.


cdef inline int32_t class_next(State *state) noexcept:
    # Return the highest class that waits, or if lower ones have credit for a pop, the one with the most.
    cdef int32_t priority, first = NONE, owed = NONE
    for priority in range(CLASSES):
        if state.lengths[priority] == 0:
            continue
        if first == NONE:
            first = priority
            if state.min_share == 0.0:
                return first
        elif state.credits[priority] >= ONE_POP:
            if owed == NONE or state.credits[priority] > state.credits[owed]:
                owed = priority
    return first if owed == NONE else owed


cdef inline void credits_accrue(State *state, int32_t popped) noexcept:
    # At each pop every waiting class except the highest earns `min_share`, and the popped class pays 1.
    cdef int32_t priority, first = NONE
    if state.min_share == 0.0:
        return
    for priority in range(CLASSES):
        if state.lengths[priority] == 0:
            continue
        if first == NONE:
            first = priority
        else:
            state.credits[priority] = fmin(state.credits[priority] + state.min_share, CREDIT_AT_MOST)
    state.credits[popped] = fmax(state.credits[popped] - 1.0, 0.0)


cdef inline int32_t entry_next(State *state) noexcept:
    cdef int32_t priority = class_next(state)
    cdef int32_t tenant
    if priority == NONE:
        return NONE
    if state.retried[priority].length > 0:
        return state.retried[priority].first
    tenant = state.heaps[priority].rows[0] if state.by_tokens else state.turns[priority]
    return state.tenants[tenant].lines[priority].chain.first


cdef int64_t order_begin(State *state, int64_t *order, int64_t limit) noexcept:
    # Write the first `limit` handles in the order in which `pop` tries them; return their number.
    cdef int32_t urgent = class_next(state)
    cdef int64_t count = 0
    cdef int32_t priority
    if urgent != NONE:
        count = order_class(state, urgent, order, 0, limit)
    for priority in range(CLASSES):
        if priority != urgent:
            count = order_class(state, priority, order, count, limit)
    return count


cdef int64_t order_class(
    State *state, int32_t priority, int64_t *order, int64_t count, int64_t limit
) noexcept:
    cdef int32_t tenant, i
    if count == limit or state.lengths[priority] == 0:
        return count
    count = order_chain(state, &state.retried[priority], order, count, limit)
    if state.by_tokens:
        heap_sort(state, priority)
        for i in range(state.heaps[priority].count):
            tenant = state.heaps[priority].rows[i]
            count = order_chain(state, &state.tenants[tenant].lines[priority].chain, order, count, limit)
        return count
    tenant = state.turns[priority]
    while tenant != NONE and count < limit:
        count = order_chain(state, &state.tenants[tenant].lines[priority].chain, order, count, limit)
        tenant = ring_after(state, tenant, priority)
    return count


cdef int64_t order_chain(State *state, Chain *chain, int64_t *order, int64_t count, int64_t limit) noexcept:
    cdef int32_t row = chain.first
    while row != NONE and count < limit:
        order[count] = number_of(state, row)
        count += 1
        row = state.entries[row].next
    return count


cdef int32_t line_longest(State *state, int32_t priority) noexcept:
    # Return the tenant with the most entries in this class; of several, the one whose turn is furthest away.
    cdef int32_t longest = NONE
    cdef int32_t tenant, length, most = 0, i
    if state.by_tokens:
        for i in range(state.heaps[priority].count):
            tenant = state.heaps[priority].rows[i]
            length = state.tenants[tenant].lines[priority].chain.length
            if length > most or (length == most and precedes(state, priority, longest, tenant)):
                longest, most = tenant, length
        return longest
    tenant = state.turns[priority]
    while tenant != NONE:
        length = state.tenants[tenant].lines[priority].chain.length
        if length >= most:
            longest, most = tenant, length
        tenant = ring_after(state, tenant, priority)
    return longest


cdef int64_t entries_before(State *state, int32_t row) noexcept:
    # Two tenants alternate until one line ends. So before the entry of rank r, r entries of its own line
    # leave, and of every other line as many, plus one if that tenant's turn is earlier, but at most all.
    cdef bint retried = state.entries[row].retried
    cdef int32_t owner = state.entries[row].tenant
    cdef int32_t priority = state.entries[row].priority
    cdef int64_t rank = 0, before = 0
    cdef int32_t tenant, i
    for i in range(priority):
        before += state.lengths[i]
    while state.entries[row].previous != NONE:
        row = state.entries[row].previous
        rank += 1
    if retried:
        return before + rank
    before += state.retried[priority].length
    cdef bint earlier = True
    tenant = state.turns[priority]
    while tenant != NONE:
        if tenant == owner:
            before += rank
            earlier = False
        else:
            before += min(<int64_t>state.tenants[tenant].lines[priority].chain.length, rank + earlier)
        tenant = ring_after(state, tenant, priority)
    return before


cdef int64_t pops_before(State *state, int32_t row) except -1:
    cdef State future
    cdef int64_t before = 0
    cdef int32_t entry
    state_copy(&future, state)
    entry = entry_next(&future)
    while entry != row:
        entry_serve(&future, entry)
        before += 1
        entry = entry_next(&future)
    state_end(&future)
    return before


cdef list handles_before(State *state, int32_t row):
    cdef State future
    cdef int32_t entry
    handles = []
    state_copy(&future, state)
    try:
        entry = entry_next(&future)
        while entry != row:
            handles.append(handle_of(&future, entry))
            entry_serve(&future, entry)
            entry = entry_next(&future)
    finally:
        state_end(&future)
    return handles
