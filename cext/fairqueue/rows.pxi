# Rows: arrays that grow by doubling, with linked lists of free rows.


cdef void state_begin(State *state) noexcept:
    # Make the queue empty; it keeps its memory.
    cdef int priority
    state.free_entry = state.free_tenant = NONE
    state.gone_count = 0
    state.length = state.lined = state.waiting_tenants = 0
    state.floor = 0.0
    for priority in range(CLASSES):
        state.lengths[priority] = 0
        state.retried[priority].first = state.retried[priority].last = NONE
        state.retried[priority].length = 0
        state.turns[priority] = state.served[priority] = NONE
        state.rounds[priority] = 1
        state.credits[priority] = 0.0
        state.heaps[priority].count = 0
    state.heaps[IDLE].count = 0


cdef void state_clear(State *state) noexcept:
    # From the last row to the first, so that the next entries have the first rows.
    cdef int32_t row
    state_begin(state)
    state.changes += 1
    for row in range(state.entries_room - 1, -1, -1):
        if state.lives[row] != NOBODY:
            entry_stale(state, row)
            entry_end(state, row)
        elif state.entries[row].generation < GENERATIONS:
            entry_free(state, row)
    for row in range(state.tenants_room - 1, -1, -1):
        tenant_end(state, row)


cdef void state_end(State *state) noexcept:
    cdef int heap
    PyMem_Free(state.entries_memory)
    PyMem_Free(state.loads)
    PyMem_Free(state.lives)
    PyMem_Free(state.eras)
    PyMem_Free(state.tenants)
    for heap in range(CLASSES + 1):
        PyMem_Free(state.heaps[heap].rows)


cdef int state_copy(State *copy, State *state) except -1:
    # Copy the queue for simulation: nothing can be pushed to or looked up in the copy.
    cdef int heap
    copy[0] = state[0]
    copy.entries_memory = NULL
    copy.loads = NULL
    copy.lives = NULL
    copy.eras = NULL
    copy.tenants = NULL
    for heap in range(CLASSES + 1):
        copy.heaps[heap].rows = NULL
    try:
        copy.entries_memory = copied(state.entries, state.entries_room * sizeof(Entry))
        copy.entries = <Entry *>copy.entries_memory
        copy.loads = <Load *>copied(state.loads, state.entries_room * sizeof(Load))
        copy.tenants = <Tenant *>copied(state.tenants, state.tenants_room * sizeof(Tenant))
        for heap in range(CLASSES + 1):
            if state.heaps[heap].rows != NULL:
                copy.heaps[heap].rows = <int32_t *>copied(
                    state.heaps[heap].rows, state.tenants_room * sizeof(int32_t)
                )
    except:
        state_end(copy)
        raise
    return 0


cdef inline int entry_reserve(State *state) except -1:
    # Ensure that `free_entry` is a row.
    cdef int32_t room, row, block
    if state.free_entry != NONE:
        return 0
    room = doubled(state.entries_room)
    state.loads = <Load *>grown(state.loads, room * sizeof(Load))
    state.lives = <uint8_t *>grown(state.lives, room * sizeof(uint8_t))
    state.eras = <int32_t *>grown(state.eras, blocks(room) * sizeof(int32_t))
    # With more entries than one large page holds, small pages would add a TLB miss to each access.
    cdef size_t size = room * sizeof(Entry)
    cdef size_t alignment = CACHE_LINE if size < LARGE_PAGE else LARGE_PAGE
    cdef void *memory = grown(NULL, size + alignment)
    cdef Entry *entries = <Entry *>((<size_t>memory + alignment - 1) // alignment * alignment)
    if size >= LARGE_PAGE:
        on_large_pages(entries, size)
    if state.entries_room:
        memcpy(entries, state.entries, state.entries_room * sizeof(Entry))
    PyMem_Free(state.entries_memory)
    state.entries_memory = memory
    state.entries = entries
    for block in range(blocks(state.entries_room), blocks(room)):
        state.eras[block] = 0
    for row in range(room - 1, state.entries_room - 1, -1):
        state.lives[row] = NOBODY
        state.entries[row].generation = 1
        entry_free(state, row)
    state.entries_room = room
    return 0


cdef inline int32_t blocks(int32_t room) noexcept:
    return (room + BLOCK - 1) // BLOCK


cdef inline void entry_end(State *state, int32_t row) noexcept:
    # A row whose generations are used up is never used again, and its block ends with it: 64 rows are lost in
    # 268 million uses of one.
    cdef Entry *entry = &state.entries[row]
    if entry.generation < GENERATIONS:
        entry.generation += 1
        entry_free(state, row)


cdef inline void entry_free(State *state, int32_t row) noexcept:
    # The row freed last is used first, because it is in the cache.
    state.entries[row].next = state.free_entry
    state.free_entry = row


cdef int tenant_reserve(State *state) except -1:
    # Ensure that `free_tenant` is a row, and that every heap has room for all tenants.
    cdef int32_t room, row, heap
    if state.free_tenant != NONE:
        return 0
    room = doubled(state.tenants_room)
    for heap in range(CLASSES + 1 - heaps_in_use(state), CLASSES + 1):
        state.heaps[heap].rows = <int32_t *>grown(state.heaps[heap].rows, room * sizeof(int32_t))
    state.tenants = <Tenant *>grown(state.tenants, room * sizeof(Tenant))
    for row in range(room - 1, state.tenants_room - 1, -1):
        tenant_end(state, row)
    state.tenants_room = room
    return 0


cdef int32_t heaps_in_use(State *state) noexcept:
    # Round robin uses only the heap of idle tenants, which is the last.
    return CLASSES + 1 if state.by_tokens else 1


cdef void tenant_begin(State *state, PyObject *name, double weight) noexcept:
    # Make the first free row a tenant.
    cdef Tenant *tenant = &state.tenants[state.free_tenant]
    cdef int i
    state.free_tenant = tenant.next_free
    tenant.name = name
    tenant.counter = tenant.lift = 0.0
    tenant.weight = weight
    tenant.turn = 0
    tenant.waiting = tenant.lined = 0
    for i in range(CLASSES + 1):
        tenant.places[i] = NONE
    for i in range(CLASSES):
        tenant.lines[i].chain.first = tenant.lines[i].chain.last = NONE
        tenant.lines[i].chain.length = 0
        tenant.lines[i].served = 0


cdef void tenant_end(State *state, int32_t row) noexcept:
    state.tenants[row].name = NULL
    state.tenants[row].next_free = state.free_tenant
    state.free_tenant = row


cdef int32_t doubled(int32_t room) except -1:
    if room >= ROOM_AT_MOST:
        raise MemoryError
    return 2 * room if room else ROOM_AT_FIRST


cdef void *grown(void *rows, size_t size) except NULL:
    # On failure the old array stays valid and the caller still owns it.
    rows = PyMem_Realloc(rows, size)
    if rows == NULL:
        raise MemoryError
    return rows


cdef void *copied(void *rows, size_t size) except NULL:
    cdef void *copy = PyMem_Malloc(size)
    if copy == NULL:
        raise MemoryError
    memcpy(copy, rows, size)
    return copy
