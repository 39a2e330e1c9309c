# Conversion of arguments and results, and buffers that grow.

cdef list list_answer(BlockPool pool, Py_ssize_t gone, Py_ssize_t length):
    # Return the first `length` of `found` as a list, with −1 for the first `gone`.
    cdef PyObject **found = pool.found
    cdef PyObject *result
    cdef Py_ssize_t i
    cdef object none = NONE
    answer = PyList_New(length)
    result = <PyObject *>answer
    for i in range(gone):
        found[i] = <PyObject *>none
    for i in range(length):
        Py_INCREF(found[i])
        PyList_SET_ITEM(result, i, found[i])
    return answer


cdef BlockHashes own_hashes(BlockPool pool, hashes):
    if not isinstance(hashes, BlockHashes):
        raise TypeError(f"hashes must be BlockHashes, not {type(hashes).__name__}")
    cdef BlockHashes chain = hashes
    if chain.block_size != pool.block_size or not is_same(&chain.key, &pool.key):
        raise ValueError("these hashes have another key or block size than the pool")
    return chain


cdef Py_ssize_t read_blocks(BlockPool pool, block_ids) except -1:
    # Write to `scratch` the ids that are not NONE; return their number.
    cdef Py_ssize_t count = read_range(pool, block_ids, 0, -1)
    cdef Py_ssize_t i
    cdef Py_ssize_t own = 0
    for i in range(count):
        pool.scratch[own] = pool.scratch[i]
        own += pool.scratch[i] != NONE
    return own


cdef Py_ssize_t read_range(BlockPool pool, block_ids, Py_ssize_t begin, Py_ssize_t end) except -1:
    # Write to `scratch` the ids from `begin` up to `end`, or to the last if `end` is −1; return their number.
    if not isinstance(block_ids, (list, tuple)) and PyObject_CheckBuffer(block_ids):
        return read_buffer(pool, block_ids, begin, end)
    sequence = PySequence_Fast(block_ids, "block ids must be a sequence of numbers")
    cdef Py_ssize_t length = PySequence_Fast_GET_SIZE(sequence)
    cdef PyObject **items = PySequence_Fast_ITEMS(sequence)
    cdef Py_ssize_t i
    end = end_of(length, end)
    reserve_scratch(pool, end - begin)
    for i in range(begin, end):
        pool.scratch[i - begin] = block_or_none(pool, items[i])
    return end - begin


cdef Py_ssize_t read_buffer(BlockPool pool, block_ids, Py_ssize_t begin, Py_ssize_t end) except -1:
    cdef Py_buffer view
    cdef Py_ssize_t i
    cdef const int32_t *ids
    tokens_open(&view, block_ids)
    try:
        ids = <const int32_t *>view.buf
        end = end_of(view.len // 4, end)
        reserve_scratch(pool, end - begin)
        for i in range(begin, end):
            if ids[i] < NONE or ids[i] >= pool.total:
                raise ValueError(f"there is no block {ids[i]}: they are 0...{pool.total - 1}")
            pool.scratch[i - begin] = ids[i]
    finally:
        PyBuffer_Release(&view)
    return end - begin


cdef int32_t block_or_none(BlockPool pool, PyObject *number) except -2:
    cdef int overflow = 0
    cdef long id
    if not PyLong_Check(<object>number):
        raise TypeError(f"a block id is an int, not {type(<object>number).__name__}")
    id = PyLong_AsLongAndOverflow(<object>number, &overflow)
    if overflow or id < NONE or id >= pool.total:
        raise ValueError(f"there is no block {<object>number}: they are 0...{pool.total - 1}")
    return <int32_t>id


cdef int32_t number_of_block(BlockPool pool, PyObject *number) except -1:
    cdef int32_t id = block_or_none(pool, number)
    if id == NONE:
        raise ValueError("-1 stands for no block")
    return id


cdef int reserve_scratch(BlockPool pool, Py_ssize_t count) except -1:
    if count > pool.scratch_room:
        pool.scratch = <int32_t *>grown(pool.scratch, 2 * count * sizeof(int32_t))
        pool.found = <PyObject **>grown(pool.found, 2 * count * sizeof(PyObject *))
        pool.scratch_room = 2 * count
    return 0


cdef int64_t counted(number) except -1:
    # Convert to a count; one that is too large becomes INT64_MAX.
    cdef int overflow = 0
    cdef int64_t value = PyLong_AsLongLongAndOverflow(number, &overflow)
    if overflow > 0:
        return INT64_MAX
    if overflow < 0 or value < 0:
        raise ValueError(f"a count must not be negative, not {number}")
    return value


cdef void *grown(void *rows, size_t size) except NULL:
    # On failure the old array stays valid and the caller still owns it.
    rows = PyMem_Realloc(rows, size)
    if rows == NULL:
        raise MemoryError
    return rows


cdef Py_ssize_t end_of(Py_ssize_t length, Py_ssize_t end) except -1:
    if end > length:
        raise ValueError(f"block {end - 1} of a sequence that has {length}")
    return length if end < 0 else end
