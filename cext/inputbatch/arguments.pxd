"""Reading what callers pass: numbers in a range, and lists or buffers of int32."""

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_ND, PyBuffer_Release, PyObject_GetBuffer
from cpython.long cimport PyLong_AsLongAndOverflow, PyLong_Check
from cpython.sequence cimport PySequence_Fast_GET_ITEM, PySequence_Fast_GET_SIZE
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy


cdef inline int check_range(str what, int64_t value, int64_t least, int64_t most) except -1:
    if not least <= value <= most:
        raise ValueError(f"{what} must be in {least}...{most}, not {value}")
    return 0


cdef inline int check_lists(tuple block_ids, int32_t groups) except -1:
    if len(block_ids) != groups:
        raise ValueError(f"there must be {groups} lists of block ids, one a group")
    return 0


cdef inline int int32_buffer(source, Py_buffer *buffer, str what) except -1:
    # The caller releases the buffer, unless this raises.
    PyObject_GetBuffer(source, buffer, PyBUF_FORMAT | PyBUF_ND | PyBUF_C_CONTIGUOUS)
    cdef char kind = 0 if buffer.format == NULL or buffer.format[1] != 0 else buffer.format[0]
    if buffer.ndim != 1 or buffer.itemsize != sizeof(int32_t) or (kind != b"i" and kind != b"l"):
        PyBuffer_Release(buffer)
        raise TypeError(f"{what} must be int32, in one dimension")
    return 0


cdef inline int32_t read_ids(source, int32_t *target, int64_t room, int32_t least, int32_t most, str what) except -1:
    # Read a list or tuple of ints, or a buffer of int32; return their number. Nothing is written beyond `room`.
    # If it raises, the ids written so far are not read. Runs no foreign code, except to export a buffer.
    cdef Py_buffer buffer
    cdef Py_ssize_t count, i
    cdef object item
    cdef long number
    cdef int overflow = 0
    if isinstance(source, (list, tuple)):
        count = PySequence_Fast_GET_SIZE(source)
        if count > room:
            raise ValueError(f"{count} {what} are more than the {room} there is room for")
        for i in range(count):
            item = <object>PySequence_Fast_GET_ITEM(source, i)
            if not PyLong_Check(item):
                raise TypeError(f"{what} must be ints, not {type(item).__name__}")
            number = PyLong_AsLongAndOverflow(item, &overflow)
            if overflow != 0 or number < least or number > most:
                raise ValueError(f"{what} must be in {least}...{most}, not {item}")
            target[i] = number
        return count
    int32_buffer(source, &buffer, what)
    try:
        count = buffer.shape[0]
        if count > room:
            raise ValueError(f"{count} {what} are more than the {room} there is room for")
        memcpy(target, buffer.buf, count * sizeof(int32_t))
    finally:
        PyBuffer_Release(&buffer)
    for i in range(count):
        if target[i] < least or target[i] > most:
            raise ValueError(f"{what} must be in {least}...{most}, not {target[i]}")
    return count
