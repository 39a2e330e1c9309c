# Kept requests, and the linked list that orders them by last use.

cdef int32_t new_row(BlockPool pool, Py_ssize_t count) except NONE:
    # Return an empty row with room for `count` blocks.
    cdef int32_t row, room
    cdef Request *request
    if pool.free_request == NONE:
        room = 2 * pool.requests_room if pool.requests_room else ROOM_AT_FIRST
        pool.requests = <Request *>grown(pool.requests, room * sizeof(Request))
        for row in range(room - 1, pool.requests_room - 1, -1):
            pool.requests[row].held = NULL
            free_row(pool, row)
        pool.requests_room = room
    row = pool.free_request
    request = &pool.requests[row]
    request.held = <int32_t *>grown(NULL, count * sizeof(int32_t))
    request.count = 0
    pool.free_request = request.next
    return row


cdef void free_row(BlockPool pool, int32_t row) noexcept:
    if row == NONE:
        return
    PyMem_Free(pool.requests[row].held)
    pool.requests[row].held = NULL
    pool.requests[row].next = pool.free_request
    pool.free_request = row


cdef int32_t enter_key(BlockPool pool, key, int32_t row) except -2:
    # Map `key` to `row`; return the row that it mapped to before, or NONE.
    # Of equal keys the dict keeps the first object, so `requests` must refer to that one.
    before = pool.rows.get(key)
    pool.rows[key] = row
    pool.requests[row].key = <PyObject *>key if before is None else pool.requests[<int32_t>before].key
    return NONE if before is None else before


cdef void keep_row(BlockPool pool, int32_t row, Py_ssize_t count) noexcept:
    # Hold the blocks in `scratch` that have a hash, or instead the blocks that are indexed for that hash.
    cdef Request *request = &pool.requests[row]
    cdef Py_ssize_t i
    cdef int32_t holder
    cdef Block *block
    for i in range(count):
        block = &pool.blocks[pool.scratch[i]]
        if is_none(&block.hash):
            continue
        holder = index_find(pool.index, &block.hash)
        if holder == NONE:
            holder = pool.scratch[i]
            index_block(pool, holder)
        block = &pool.blocks[holder]
        pool.kept += block.kept == 0
        block.kept += 1
        block.owner = row
        request.held[request.count] = holder
        request.count += 1
    pool.holds += request.count
    link_row(pool, row)


cdef int cover_with(BlockPool pool, int32_t row) except -1:
    # Drop the requests that `row` covers: it holds their last block, with at least as many blocks before it.
    cdef Request *request = &pool.requests[row]
    cdef int32_t i, other
    cdef int32_t last = request.count - 1
    for i in range(request.count):
        other = pool.blocks[request.held[i]].tip_of
        if other != NONE and (i == last or pool.requests[other].count <= i + 1):
            del pool.rows[<object>pool.requests[other].key]
            drop_row(pool, other)
    pool.blocks[request.held[last]].tip_of = row
    return 0


cdef int evict_row(BlockPool pool, int32_t row) except -1:
    del pool.rows[<object>pool.requests[row].key]
    drop_row(pool, row)
    pool.evicted_requests += 1
    return 0


cdef void drop_row(BlockPool pool, int32_t row) noexcept:
    # The key of the row must not be in `rows`, or map to another row by now.
    cdef Request *request = &pool.requests[row]
    cdef Block *block
    cdef int32_t i
    for i in range(request.count):
        fetch_ahead(&pool.blocks[request.held[i]])
    for i in range(request.count):
        block = &pool.blocks[request.held[i]]
        fetch_ahead(&pool.index.places[<int64_t>block.hash.low & pool.index.mask])
        block.kept -= 1
        pool.kept -= block.kept == 0
        if block.owner == row:
            block.owner = NONE
    block = &pool.blocks[request.held[request.count - 1]]
    if block.tip_of == row:
        block.tip_of = NONE
    pool.holds -= request.count
    unlink_row(pool, row)
    free_unneeded(pool, request.held, request.count)
    free_row(pool, row)


cdef bint is_over(BlockPool pool) noexcept:
    cdef int64_t used = pool.total - pool.free
    if used > pool.used_at_most:
        return True
    return pool.entries_at_most >= 0.0 and used * pool.block_size > pool.entries_at_most


cdef void use_row(BlockPool pool, int32_t row) noexcept:
    if row != pool.newest and not pool.first_in_first_out:
        unlink_row(pool, row)
        link_row(pool, row)


cdef void link_row(BlockPool pool, int32_t row) noexcept:
    cdef Request *request = &pool.requests[row]
    request.previous = pool.newest
    request.next = NONE
    if pool.newest == NONE:
        pool.oldest = row
    else:
        pool.requests[pool.newest].next = row
    pool.newest = row


cdef void unlink_row(BlockPool pool, int32_t row) noexcept:
    cdef Request *request = &pool.requests[row]
    if request.previous == NONE:
        pool.oldest = request.next
    else:
        pool.requests[request.previous].next = request.next
    if request.next == NONE:
        pool.newest = request.previous
    else:
        pool.requests[request.next].previous = request.previous
