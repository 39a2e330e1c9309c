# Tokens: counters, and one heap of tenants for each class.


cdef double level(State *state) noexcept:
    # Return the counter that a joining tenant is lifted to: the smallest in line, or the last that was.
    cdef double least = INFINITY
    cdef int32_t priority
    if not state.by_tokens or state.lined == 0:
        return state.floor
    for priority in range(CLASSES):
        if state.heaps[priority].count > 0:
            least = fmin(least, state.tenants[state.heaps[priority].rows[0]].counter)
    return least


cdef double counter_of(State *state, int32_t tenant) noexcept:
    cdef double counter = state.tenants[tenant].counter
    return counter if state.tenants[tenant].lined > 0 else fmax(counter, level(state))


cdef void tenant_charge(State *state, int32_t tenant, double cost) noexcept:
    cdef double counter = counter_of(state, tenant) + cost / state.tenants[tenant].weight
    state.tenants[tenant].counter = fmin(counter, COUNTER_AT_MOST)
    tenant_moved(state, tenant)


cdef void tenant_refund(State *state, int32_t tenant, double cost) noexcept:
    cdef double least = state.tenants[tenant].lift if state.tenants[tenant].lined > 0 else level(state)
    cdef double counter = fmax(counter_of(state, tenant) - cost / state.tenants[tenant].weight, least)
    # The level may be above the counter now and fall later: a refund must not raise the counter to it.
    state.tenants[tenant].counter = fmin(state.tenants[tenant].counter, counter)
    tenant_moved(state, tenant)


cdef void tenant_moved(State *state, int32_t tenant) noexcept:
    # The tenant's counter or turn has changed: restore its place in each heap that has it.
    cdef int32_t heap
    for heap in range(CLASSES + 1):
        if state.tenants[tenant].places[heap] != NONE:
            heap_settle(state, heap, state.tenants[tenant].places[heap])
    state.changes += 1


cdef bint tenant_matters(State *state, int32_t row) noexcept:
    # Return whether remembering an idle tenant affects the order.
    cdef Tenant *tenant = &state.tenants[row]
    cdef int32_t priority
    cdef double least
    if state.by_tokens:
        least = level(state)
        return tenant.counter > least or (tenant.counter == least and tenant.turn > 0)
    for priority in range(CLASSES):
        if tenant.lines[priority].served == state.rounds[priority]:
            return True
    return False


cdef bint precedes(State *state, int32_t heap, int32_t one, int32_t other) noexcept:
    cdef Tenant *a = &state.tenants[one]
    cdef Tenant *b = &state.tenants[other]
    if a.counter != b.counter:
        return a.counter < b.counter
    if a.turn != b.turn:
        return a.turn < b.turn
    if heap == IDLE:
        return one < other
    return a.lines[heap].joined < b.lines[heap].joined


cdef void heap_add(State *state, int32_t heap, int32_t tenant) noexcept:
    cdef Heap *members = &state.heaps[heap]
    members.rows[members.count] = tenant
    members.count += 1
    heap_settle(state, heap, members.count - 1)


cdef void heap_remove(State *state, int32_t heap, int32_t tenant) noexcept:
    cdef Heap *members = &state.heaps[heap]
    cdef int32_t place = state.tenants[tenant].places[heap]
    members.count -= 1
    state.tenants[tenant].places[heap] = NONE
    if place < members.count:
        members.rows[place] = members.rows[members.count]
        heap_settle(state, heap, place)


cdef void heap_settle(State *state, int32_t heap, int32_t place) noexcept:
    # Move one member up or down until none precedes its parent.
    cdef int32_t *rows = state.heaps[heap].rows
    cdef int32_t count = state.heaps[heap].count
    cdef int32_t tenant = rows[place]
    cdef int32_t child
    while place > 0 and precedes(state, heap, tenant, rows[(place - 1) // 2]):
        heap_put(state, heap, place, rows[(place - 1) // 2])
        place = (place - 1) // 2
    while True:
        child = 2 * place + 1
        if child >= count:
            break
        if child + 1 < count and precedes(state, heap, rows[child + 1], rows[child]):
            child += 1
        if not precedes(state, heap, rows[child], tenant):
            break
        heap_put(state, heap, place, rows[child])
        place = child
    heap_put(state, heap, place, tenant)


cdef void heap_sort(State *state, int32_t heap) noexcept:
    # A sorted array is a heap too. Shellsort: in place, and fast if it is sorted already.
    cdef int32_t *rows = state.heaps[heap].rows
    cdef int32_t count = state.heaps[heap].count
    cdef int32_t gap = 1
    cdef int32_t i, place, tenant
    while gap < count // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(gap, count):
            tenant = rows[i]
            place = i
            while place >= gap and precedes(state, heap, tenant, rows[place - gap]):
                heap_put(state, heap, place, rows[place - gap])
                place -= gap
            heap_put(state, heap, place, tenant)
        gap //= 3


cdef void heap_put(State *state, int32_t heap, int32_t place, int32_t tenant) noexcept:
    state.heaps[heap].rows[place] = tenant
    state.tenants[tenant].places[heap] = place
