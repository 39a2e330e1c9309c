# Handles: the row in the low 32 bits, the row's generation in the high 32 bits.


cdef int64_t number_of(State *state, int32_t entry) noexcept:
    return <int64_t>state.entries[entry].generation << 32 | entry


cdef object handle_of(State *state, int32_t entry):
    return number_of(state, entry)


cdef int32_t entry_of(State *state, handle) noexcept:
    cdef int overflow = 0
    cdef int64_t number
    if not PyLong_Check(handle):
        return NONE
    number = PyLong_AsLongLongAndOverflow(handle, &overflow)
    return NONE if overflow else entry_at(state, number)


cdef int32_t entry_at(State *state, int64_t number) noexcept:
    cdef int64_t row = <uint32_t>number  # with a mask, Cython would make Python numbers
    if row >= state.entries_room:
        return NONE
    cdef int32_t life = state.lives[row]
    cdef int64_t generation
    if life == NOBODY:
        return NONE
    if life == OLDER:
        generation = state.entries[row].generation
    else:
        generation = <int64_t>state.eras[row // BLOCK] * LIVES + (life - LIVES)
    return <int32_t>row if generation == number >> 32 else NONE


cdef inline int64_t generation_next(State *state, int32_t row) noexcept:
    # Return the generation of the next entry in a free row. Eras that its block has passed are skipped.
    return max(<int64_t>state.entries[row].generation, <int64_t>state.eras[row // BLOCK] * LIVES)


cdef inline void entry_valid(State *state, int32_t row) noexcept:
    # Make the next handle of this row valid.
    cdef int64_t generation = generation_next(state, row)
    if generation // LIVES > state.eras[row // BLOCK]:
        era_begin(state, row // BLOCK)  # the row's last generation ended this era, so the next one begins
    state.entries[row].generation = generation
    state.lives[row] = LIVES + generation % LIVES


cdef inline void entry_stale(State *state, int32_t row) noexcept:
    state.lives[row] = NOBODY


cdef void era_begin(State *state, int32_t block) noexcept:
    cdef int32_t row
    state.eras[block] += 1
    for row in range(block * BLOCK, min((block + 1) * BLOCK, state.entries_room)):
        if state.lives[row] != NOBODY:
            state.lives[row] = OLDER


# Joining and leaving. The work after `entry_stale` may be deferred until more than this entry is read. It may
# also be done on a copy of the queue, which has no array `lives`.


cdef inline void entry_join(
    State *state, int32_t owner, double cost, int32_t priority, int64_t size, bint retried
) noexcept:
    # Make the first free row an entry: last in its tenant's line, or before all of its class if `retried`.
    cdef int32_t row = state.free_entry
    cdef Entry *entry = &state.entries[row]
    cdef Tenant *tenant = &state.tenants[owner]
    state.free_entry = entry.next
    entry_valid(state, row)
    entry.tenant = owner
    entry.priority = priority
    entry.retried = retried
    state.loads[row].cost = cost
    state.loads[row].size = size
    state.loads[row].passed = 0
    if tenant.waiting == 0:
        state.waiting_tenants += 1
        if tenant.places[IDLE] != NONE:
            heap_remove(state, IDLE, owner)
    if retried:
        chain_add_first(state, &state.retried[priority], row)
    else:
        line_join(state, owner, priority)
        chain_add_last(state, &tenant.lines[priority].chain, row)
        tenant.lined += 1
        state.lined += 1
    tenant.waiting += 1
    state.lengths[priority] += 1
    state.length += 1
    state.changes += 1


cdef void entry_gone(State *state, int32_t row) noexcept:
    # In a queue larger than the cache, an entry and then its neighbors must be fetched from memory. To avoid
    # stalls, it stays in its chain until more have gone or another method is called.
    entry_stale(state, row)
    FETCH(&state.entries[row])
    state.gone[state.gone_count] = row
    state.gone_count += 1
    if state.gone_count > GONE_ALONE:
        neighbours_fetch(state, state.gone[state.gone_count - 1 - GONE_ALONE])


cdef inline void neighbours_fetch(State *state, int32_t row) noexcept:
    cdef Entry *entry = &state.entries[row]
    if entry.previous != NONE:
        FETCH(&state.entries[entry.previous])
    if entry.next != NONE:
        FETCH(&state.entries[entry.next])


cdef inline void entry_leave(State *state, int32_t row) noexcept:
    # Unlink a stale entry from its chain, and update its line, its tenant and the free rows.
    cdef Entry *entry = &state.entries[row]
    cdef int32_t owner = entry.tenant
    cdef int32_t priority = entry.priority
    cdef Tenant *tenant = &state.tenants[owner]
    cdef Line *line = &tenant.lines[priority]
    if entry.retried:
        chain_remove(state, &state.retried[priority], row)
    else:
        chain_remove(state, &line.chain, row)
        tenant.lined -= 1
        state.lined -= 1
        if line.chain.length == 0:
            line_leave(state, owner, priority)
    tenant.waiting -= 1
    if tenant.waiting == 0:
        state.waiting_tenants -= 1
    state.lengths[priority] -= 1
    if state.lengths[priority] == 0:
        state.credits[priority] = 0.0
    state.length -= 1
    state.changes += 1
    entry_end(state, row)


cdef inline void entry_serve(State *state, int32_t row) noexcept:
    # Like `entry_leave`, and count the tenant's turn and charge.
    cdef Entry *entry = &state.entries[row]
    cdef int32_t owner = entry.tenant
    cdef int32_t priority = entry.priority
    cdef bint retried = entry.retried
    cdef double cost = state.loads[row].cost
    credits_accrue(state, priority)
    if retried:
        entry_leave(state, row)
        return
    state.moment += 1
    state.tenants[owner].turn = state.moment
    cdef double before = state.tenants[owner].counter
    if state.by_tokens:
        # Charge first: out of line, a counter below the level would be lifted to it.
        tenant_charge(state, owner, cost)
    entry_leave(state, row)
    if state.lined == 0:
        state.floor = before  # so that a refund of the last entry's charge is not lost
    if not state.by_tokens:
        ring_turn(state, owner, priority)


cdef void entry_passed(State *state, int32_t row) noexcept:
    if row != NONE and state.loads[row].passed < BYPASS_AT_MOST:
        state.loads[row].passed = state.loads[row].passed + 1


cdef inline void line_join(State *state, int32_t owner, int32_t priority) noexcept:
    # Add a tenant to the ring or the heap if its line is empty, before the line gets an entry.
    cdef Tenant *tenant = &state.tenants[owner]
    if tenant.lines[priority].chain.length > 0:
        return
    if not state.by_tokens:
        ring_join(state, owner, priority)
        return
    if tenant.lined == 0:
        tenant.lift = level(state)
        tenant.counter = fmax(tenant.counter, tenant.lift)
    state.moment += 1
    tenant.lines[priority].joined = state.moment
    heap_add(state, priority, owner)


cdef inline void line_leave(State *state, int32_t owner, int32_t priority) noexcept:
    if not state.by_tokens:
        ring_leave(state, owner, priority)
        return
    heap_remove(state, priority, owner)
    if state.lined == 0:
        state.floor = state.tenants[owner].counter


cdef void chain_add_first(State *state, Chain *chain, int32_t row) noexcept:
    state.entries[row].previous = NONE
    state.entries[row].next = chain.first
    if chain.first == NONE:
        chain.last = row
    else:
        state.entries[chain.first].previous = row
    chain.first = row
    chain.length += 1


cdef inline void chain_add_last(State *state, Chain *chain, int32_t row) noexcept:
    state.entries[row].previous = chain.last
    state.entries[row].next = NONE
    if chain.last == NONE:
        chain.first = row
    else:
        state.entries[chain.last].next = row
    chain.last = row
    chain.length += 1


cdef inline void chain_remove(State *state, Chain *chain, int32_t row) noexcept:
    cdef int32_t previous = state.entries[row].previous
    cdef int32_t following = state.entries[row].next
    if previous == NONE:
        chain.first = following
    else:
        state.entries[previous].next = following
    if following == NONE:
        chain.last = previous
    else:
        state.entries[following].previous = previous
    chain.length -= 1
