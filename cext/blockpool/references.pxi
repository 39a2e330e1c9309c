# Reference counts. `scratch` holds the ids of the call, as `read_blocks` wrote them.

cdef int drop_references(BlockPool pool, Py_ssize_t count) except -1:
    cdef Py_ssize_t i
    cdef Block *block
    for i in range(count):
        block = &pool.blocks[pool.scratch[i]]
        if block.references <= 0:
            restore_references(pool, i)
            raise ValueError(f"block {pool.scratch[i]} has no reference left: it was freed before")
        block.references -= 1
        pool.referenced -= block.references == 0
    return 0


cdef void restore_references(BlockPool pool, Py_ssize_t count) noexcept:
    cdef Py_ssize_t i
    for i in range(count):
        pool.referenced += pool.blocks[pool.scratch[i]].references == 0
        pool.blocks[pool.scratch[i]].references += 1


cdef void free_unneeded(BlockPool pool, int32_t *ids, Py_ssize_t count) noexcept:
    # Free the blocks without references or kept requests. The first of them is allocated next.
    cdef Py_ssize_t i
    cdef Block *block
    for i in range(count - 1, -1, -1):
        block = &pool.blocks[ids[i]]
        if block.references != 0 or block.kept != 0:
            continue
        if not is_none(&block.hash):
            index_remove(pool.index, &block.hash, ids[i])
            block.hash.low = block.hash.high = 0
        block.references = IN_FREE_LIST
        pool.free_list[pool.free] = ids[i]
        pool.free += 1


cdef void index_block(BlockPool pool, int32_t id) noexcept:
    index_add(pool.index, &pool.blocks[id].hash, id, PyList_GET_ITEM(<PyObject *>pool.numbers, id))
