# Memory, reading the caller's lists and buffers, and bits.

cdef c_array INT32S = array("i")
cdef c_array INT64S = array("q")


cdef c_array int32s(int32_t *numbers, Py_ssize_t count):
    cdef c_array copy = clone(INT32S, count, False)
    memcpy(copy.data.as_voidptr, numbers, count * sizeof(int32_t))
    return copy


cdef object zeroed(int64_t size):
    # The pages are not allocated until they are written.
    return memoryview(mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:size]


cdef object zeroed_at_once(int64_t size):
    # For memory that every step touches: on large pages, where the system has them, access is faster.
    cdef int64_t start
    if size < LARGE_PAGE // 2 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return zeroed(size)
    region = mmap.mmap(-1, size + 2 * LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        region.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(region)
    start = -<int64_t>address_of(view) & (LARGE_PAGE - 1)
    return view[start : start + size]


cdef void *address_of(object view) except NULL:
    # The caller keeps the view, and with it the memory, alive.
    cdef Py_buffer buffer
    cdef void *address
    PyObject_GetBuffer(view, &buffer, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS)
    address = buffer.buf
    PyBuffer_Release(&buffer)
    return address


cdef inline int64_t aligned(int64_t size) noexcept:
    return (size + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE


cdef int64_t columns_for(int64_t tokens, int64_t block_size):
    return (tokens + block_size - 1) // block_size


cdef int check_range(str what, value, int64_t least, int64_t most) except -1:
    if not least <= index(value) <= most:
        raise ValueError(f"{what} must be in {least}...{most}, not {value}")
    return 0


cdef int int32_buffer(source, Py_buffer *buffer, str what) except -1:
    # The caller releases the buffer, unless this raises.
    PyObject_GetBuffer(source, buffer, PyBUF_FORMAT | PyBUF_ND | PyBUF_C_CONTIGUOUS)
    cdef char kind = 0 if buffer.format == NULL or buffer.format[1] != 0 else buffer.format[0]
    if buffer.ndim != 1 or buffer.itemsize != sizeof(int32_t) or (kind != b"i" and kind != b"l"):
        PyBuffer_Release(buffer)
        raise TypeError(f"{what} must be int32, in one dimension")
    return 0


cdef inline int check_room(Py_ssize_t count, int64_t room, str what) except -1:
    if count > room:
        raise ValueError(f"{count} {what} are more than the {room} there is room for")
    return 0


cdef inline void fetch_content(source) noexcept:
    # Prefetch the contents of a list or an array, so that those of several arrive in parallel.
    if type(source) is list:
        prefetch(list_items(source))
    elif type(source) is array:
        prefetch((<c_array>source).data.as_ints)


cdef inline void fetch_items(source, int32_t lines) noexcept:
    # Prefetch this many cache lines of each object in a list.
    cdef Py_ssize_t i
    cdef int32_t line
    if type(source) is list:
        for i in range(PyList_GET_SIZE(source)):
            for line in range(lines):
                prefetch(<char *>PyList_GET_ITEM(source, i) + line * CACHE_LINE)


cdef int32_t read_ids(
    source, int32_t *target, int64_t room, int32_t least, int32_t most, str what
) except -1:
    # Read a list or tuple of ints, or a buffer of int32. Nothing is written beyond `room`. What was written
    # when it raises is not read. Runs no foreign code, except where a buffer is created.
    cdef Py_buffer buffer
    cdef Py_ssize_t count, i
    cdef PyObject *item
    cdef long number
    cdef int overflow = 0
    cdef bint is_list = isinstance(source, list)
    if is_list or isinstance(source, tuple):
        count = PyList_GET_SIZE(source) if is_list else PyTuple_GET_SIZE(source)
        check_room(count, room, what)
        for i in range(count):
            item = <PyObject *>PyList_GET_ITEM(source, i) if is_list else <PyObject *>PyTuple_GET_ITEM(source, i)
            if not PyLong_Check(<object>item):
                raise TypeError(f"{what} must be ints, not {type(<object>item).__name__}")
            number = PyLong_AsLongAndOverflow(<object>item, &overflow)
            if overflow != 0 or number < least or number > most:
                raise ValueError(f"{what} must be in {least}...{most}, not {<object>item}")
            target[i] = number
        return count
    if type(source) is array and (<c_array>source).ob_descr.typecode == b"i":  # without the buffer protocol
        count = Py_SIZE(source)
        check_room(count, room, what)
        memcpy(target, (<c_array>source).data.as_ints, count * sizeof(int32_t))
    else:
        int32_buffer(source, &buffer, what)
        try:
            count = buffer.shape[0]
            check_room(count, room, what)
            memcpy(target, buffer.buf, count * sizeof(int32_t))
        finally:
            PyBuffer_Release(&buffer)
    number = INT32_MAX
    overflow = INT32_MIN
    for i in range(count):
        number = min(number, <long>target[i])
        overflow = max(overflow, target[i])
    if count > 0 and (number < least or overflow > most):
        raise ValueError(f"{what} must be in {least}...{most}, not {number if number < least else overflow}")
    return count


cdef inline bint has_bit(uint64_t *bits, int64_t place) noexcept:
    return (bits[place >> 6] >> (place & 63)) & 1


cdef inline void set_bit(uint64_t *bits, int64_t place) noexcept:
    bits[place >> 6] |= <uint64_t>1 << (place & 63)


cdef inline void clear_bit(uint64_t *bits, int64_t place) noexcept:
    bits[place >> 6] &= ~(<uint64_t>1 << (place & 63))
