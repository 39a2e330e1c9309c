"""Kept requests, and the linked list that orders them by last use. `rows`: BlockPool.rows, key -> row."""

from cpython.long cimport PyLong_CheckExact
from cpython.mem cimport PyMem_Free
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t

from blockpool.index cimport NONE, fetch_ahead, index_find
from blockpool.pool cimport Block, Pool, Request, block_index, blocks_free, grown
from blockpool.siphash cimport is_none

cdef enum:
    REQUESTS_AT_FIRST = 16

cdef inline void request_free(Pool *pool, int32_t row) noexcept:
    PyMem_Free(pool.requests[row].held)
    pool.requests[row].held = NULL
    pool.requests[row].next = pool.free_request
    pool.free_request = row

cdef inline int32_t request_begin(Pool *pool, Py_ssize_t count) except NONE:
    # Return an empty row with room for `count` blocks.
    cdef int32_t row, room
    cdef Request *request
    if pool.free_request == NONE:
        room = max(2 * pool.requests_room, REQUESTS_AT_FIRST)
        pool.requests = <Request *>grown(pool.requests, room * sizeof(Request))
        for row in range(room - 1, pool.requests_room - 1, -1):
            pool.requests[row].held = NULL
            request_free(pool, row)
        pool.requests_room = room
    row = pool.free_request
    request = &pool.requests[row]
    request.held = <int32_t *>grown(NULL, count * sizeof(int32_t))
    request.count = 0
    pool.free_request = request.next
    return row

cdef inline int32_t request_enter(Pool *pool, dict rows, key, int32_t row) except -2:
    # Map `key` to `row`; return the row that it mapped to before, or NONE.
    # Of equal keys the dict keeps the first object, so `requests` must refer to that one.
    before = rows.get(key)
    rows[key] = row
    pool.requests[row].key = <PyObject *>key if before is None else pool.requests[<int32_t>before].key
    return NONE if before is None else before

cdef inline void request_link(Pool *pool, int32_t row) noexcept:
    # Make it the most recently used one.
    cdef Request *request = &pool.requests[row]
    request.previous = pool.newest
    request.next = NONE
    if pool.newest == NONE:
        pool.oldest = row
    else:
        pool.requests[pool.newest].next = row
    pool.newest = row

cdef inline void request_unlink(Pool *pool, int32_t row) noexcept:
    cdef Request *request = &pool.requests[row]
    if request.previous == NONE:
        pool.oldest = request.next
    else:
        pool.requests[request.previous].next = request.next
    if request.next == NONE:
        pool.newest = request.previous
    else:
        pool.requests[request.next].previous = request.previous

cdef inline void request_use(Pool *pool, int32_t row) noexcept:
    if row != pool.newest and not pool.first_in_first_out:
        request_unlink(pool, row)
        request_link(pool, row)

cdef inline void request_drop(Pool *pool, int32_t row) noexcept:
    # Its key must be absent from `rows`, or already map to another row.
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
    if request.key == NULL:
        pool.slid -= 1
        pool.slid_as[request.held[0]] = NONE
    request_unlink(pool, row)
    blocks_free(pool, request.held, request.count)
    request_free(pool, row)

cdef inline int request_evict(Pool *pool, dict rows, int32_t row) except -1:
    if pool.requests[row].key != NULL:
        del rows[<object>pool.requests[row].key]
        pool.evicted_requests += 1
    request_drop(pool, row)
    return 0

cdef inline int32_t slid_request(Pool *pool, int32_t id) noexcept:
    # Return the request that keeps this block because it slid out of a window, or NONE.
    return NONE if pool.slid == 0 or id == NONE else pool.slid_as[id]

cdef inline void request_hold(Pool *pool, int32_t row, Py_ssize_t count) noexcept:
    # Hold the blocks in `scratch` that have a hash. If another block is indexed for a hash, hold that one.
    # This request is used later than those that keep the same blocks because they slid out: drop these.
    cdef Request *request = &pool.requests[row]
    cdef Py_ssize_t i
    cdef int32_t holder, slid
    cdef Block *block
    for i in range(count):
        block = &pool.blocks[pool.scratch[i]]
        if is_none(&block.hash):
            continue
        holder = index_find(pool.index, &block.hash)
        if holder == NONE:
            holder = pool.scratch[i]
            block_index(pool, holder)
        block = &pool.blocks[holder]
        pool.kept += block.kept == 0
        block.kept += 1
        block.owner = row
        request.held[request.count] = holder
        request.count += 1
        slid = slid_request(pool, holder)
        if slid != NONE:
            request_drop(pool, slid)
    pool.holds += request.count
    request_link(pool, row)

cdef inline int request_cover(Pool *pool, dict rows, int32_t row) except -1:
    # Drop the requests that `row` covers: it holds their last block, with at least as many blocks before it.
    cdef Request *request = &pool.requests[row]
    cdef int32_t i, other
    cdef int32_t last = request.count - 1
    for i in range(request.count):
        other = pool.blocks[request.held[i]].tip_of
        if other != NONE and (i == last or pool.requests[other].count <= i + 1):
            del rows[<object>pool.requests[other].key]
            request_drop(pool, other)
    pool.blocks[request.held[last]].tip_of = row
    return 0

cdef inline bint request_is_covered(Pool *pool, dict rows, key, int32_t last, Py_ssize_t count) except -1:
    # Whether another request ends with the same block and holds more than `count`: all of this one, and some
    # that have slid out of its window. That one is used instead, and takes the place of the one under `key`.
    cdef int32_t holder = index_find(pool.index, &pool.blocks[last].hash)
    cdef int32_t other = NONE if holder == NONE else pool.blocks[holder].tip_of
    if other == NONE or pool.requests[other].count <= count:
        return False
    replaced = rows.get(key)
    if replaced is not None and <int32_t>replaced == other:
        return False
    if replaced is not None:
        del rows[key]
        request_drop(pool, <int32_t>replaced)
    request_use(pool, other)
    return True

cdef inline int request_keep(Pool *pool, dict rows, key, Py_ssize_t count) except -1:
    # Keep the blocks in `scratch` that have a hash, if any, under `key`. An exception changes nothing.
    cdef Py_ssize_t i, hashed = 0
    cdef int32_t row, replaced, last = NONE
    for i in range(count):
        if not is_none(&pool.blocks[pool.scratch[i]].hash):
            hashed += 1
            last = pool.scratch[i]
    if hashed == 0:
        return 0
    key = key if PyLong_CheckExact(key) else int(key)
    if request_is_covered(pool, rows, key, last, hashed):
        return 0
    row = request_begin(pool, hashed)
    try:
        replaced = request_enter(pool, rows, key, row)
    except BaseException:
        request_free(pool, row)
        raise
    request_hold(pool, row, count)
    if replaced != NONE:
        request_drop(pool, replaced)
    return request_cover(pool, rows, row)

cdef inline int slid_begin(Pool *pool) except -1:
    cdef int32_t i
    if pool.slid_as == NULL:
        pool.slid_as = <int32_t *>grown(NULL, pool.total * sizeof(int32_t))
        for i in range(pool.total):
            pool.slid_as[i] = NONE
    return 0

cdef inline int block_keep(Pool *pool, int32_t id) except -1:
    # Keep a block that slid out of a window, if it has a hash. If another block is indexed for its hash, keep
    # that one. `slid_begin` must have been called.
    cdef int32_t holder, row
    cdef Request *request
    if is_none(&pool.blocks[id].hash):
        return 0
    holder = index_find(pool.index, &pool.blocks[id].hash)
    row = slid_request(pool, holder)
    if row != NONE:
        request_use(pool, row)
        return 0
    row = request_begin(pool, 1)
    if holder == NONE:
        holder = id
        block_index(pool, id)
    request = &pool.requests[row]
    request.key = NULL
    request.held[0] = holder
    request.count = 1
    pool.kept += pool.blocks[holder].kept == 0
    pool.blocks[holder].kept += 1
    pool.holds += 1
    pool.slid += 1
    pool.slid_as[holder] = row
    request_link(pool, row)
    return 0

cdef inline void blocks_use(Pool *pool, Py_ssize_t count) noexcept:
    # Count a use of the requests that keep the blocks in `scratch`: of all without a key, then of the one that
    # holds the last block.
    cdef Py_ssize_t i
    cdef int32_t row
    if pool.slid:
        for i in range(count):
            row = pool.slid_as[pool.scratch[i]]
            if row != NONE:
                request_use(pool, row)
    for i in range(count - 1, -1, -1):
        if pool.blocks[pool.scratch[i]].owner != NONE:
            request_use(pool, pool.blocks[pool.scratch[i]].owner)
            break
