# Round robin: one ring of tenants for each class.


cdef void ring_join(State *state, int32_t tenant, int32_t priority) noexcept:
    # A tenant that was served in this round goes to the back of the ring, just before the tenant whose turn
    # it is. Any other goes before the first that was served.
    cdef Line *line = &state.tenants[tenant].lines[priority]
    cdef bint was_served = line.served == state.rounds[priority]
    cdef int32_t turn = state.turns[priority]
    cdef int32_t behind = turn
    if turn == NONE:
        line.ring_previous = line.ring_next = state.turns[priority] = tenant
        state.served[priority] = tenant if was_served else NONE
        return
    if not was_served and state.served[priority] != NONE:
        behind = state.served[priority]
        if turn == behind:
            state.turns[priority] = tenant
    elif was_served and state.served[priority] == NONE:
        state.served[priority] = tenant
    cdef Line *follower = &state.tenants[behind].lines[priority]
    line.ring_previous = follower.ring_previous
    line.ring_next = behind
    state.tenants[follower.ring_previous].lines[priority].ring_next = tenant
    follower.ring_previous = tenant


cdef void ring_leave(State *state, int32_t tenant, int32_t priority) noexcept:
    cdef Line *line = &state.tenants[tenant].lines[priority]
    cdef bint was_last = line.ring_next == state.turns[priority]
    if line.ring_next == tenant:
        state.turns[priority] = state.served[priority] = NONE
        return
    state.tenants[line.ring_previous].lines[priority].ring_next = line.ring_next
    state.tenants[line.ring_next].lines[priority].ring_previous = line.ring_previous
    if state.served[priority] == tenant:
        state.served[priority] = NONE if was_last else line.ring_next
    if state.turns[priority] == tenant:
        state.turns[priority] = line.ring_next


cdef inline void ring_turn(State *state, int32_t tenant, int32_t priority) noexcept:
    # Record a tenant's turn; it may have left the ring with its last entry. A second turn in a round means
    # that no other tenant is left to serve in it: the round is over, and this is the first turn of the next.
    cdef Line *line = &state.tenants[tenant].lines[priority]
    if line.served == state.rounds[priority]:
        state.rounds[priority] += 1
        state.served[priority] = NONE
    line.served = state.rounds[priority]
    if line.chain.length == 0:
        return
    if state.turns[priority] != tenant:
        ring_leave(state, tenant, priority)
        ring_join(state, tenant, priority)
        return
    # The ring is circular: moving to its back means that the next tenant becomes the front.
    state.turns[priority] = line.ring_next
    if state.served[priority] == NONE:
        state.served[priority] = tenant


cdef int32_t ring_after(State *state, int32_t tenant, int32_t priority) noexcept:
    tenant = state.tenants[tenant].lines[priority].ring_next
    return NONE if tenant == state.turns[priority] else tenant
