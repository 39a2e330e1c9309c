# Memory: zeroed, copied, and the caller's arenas.

cdef c_array INT32S = array("i")
cdef c_array INT64S = array("q")
cdef c_array UINT8S = array("B")


cdef c_array int32s(const int32_t *numbers, Py_ssize_t count):
    cdef c_array copy = clone(INT32S, count, False)
    memcpy(copy.data.as_voidptr, numbers, count * sizeof(int32_t))
    return copy


cdef object zeroed(int64_t size):
    # The pages are not allocated until they are written.
    return memoryview(mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:size]


cdef void *allocated(int64_t count, int64_t size) except NULL:
    # Zeroed memory, to be freed by the caller.
    cdef void *memory = calloc(max(count, 1), size)
    if memory == NULL:
        raise MemoryError
    return memory


cdef void *address_of(object view) except NULL:
    # The caller keeps the view, and with it the memory, alive.
    cdef Py_buffer buffer
    PyObject_GetBuffer(view, &buffer, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS)
    PyBuffer_Release(&buffer)
    return buffer.buf


cdef list checked_arenas(arenas, int64_t size):
    if isinstance(arenas, int):
        check_range("arenas", arenas, 1, 64)
        arenas = [zeroed(size) for _ in range(arenas)]
    cdef list views = []
    for arena in arenas:
        view = memoryview(arena)
        if view.readonly or not view.c_contiguous:
            raise ValueError("an arena must be writable and contiguous")
        if view.nbytes < size:
            raise ValueError(f"an arena must have at least {size} bytes, not {view.nbytes}")
        view = view.cast("B")[:size].cast("i")
        if <uint64_t>address_of(view) % sizeof(int32_t):
            raise ValueError("an arena must be aligned to 4 bytes")
        views.append(view)
    check_range("the number of arenas", len(views), 1, 64)
    return views


cdef int64_t columns_for(int64_t tokens, int64_t block_size):
    return (tokens + block_size - 1) // block_size
