"""Conversion of arguments to C values, with errors, and of found blocks to a list."""

from cpython.buffer cimport PyBUF_CONTIG_RO, PyBUF_FORMAT, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.long cimport PyLong_AsLongAndOverflow, PyLong_AsLongLongAndOverflow, PyLong_Check
from cpython.object cimport PyObject
from libc.stdint cimport INT64_MAX, int32_t, int64_t
from libc.string cimport memcpy

from blockpool.index cimport NONE
from blockpool.pool cimport Pool, scratch_reserve
from blockpool.siphash cimport Hash

cdef extern from "Python.h":
    # Declared with `PyObject *`, so that Cython counts no references for each element.
    void PyList_SET_ITEM(PyObject *list, Py_ssize_t index, PyObject *item)
    list PyList_New(Py_ssize_t length)
    void Py_INCREF(PyObject *item)
    object PySequence_Fast(object sequence, const char *message)
    Py_ssize_t PySequence_Fast_GET_SIZE(object sequence)
    PyObject **PySequence_Fast_ITEMS(object sequence)

cdef enum:
    BLOCK_SIZE_AT_MOST = 1 << 16

cdef inline int64_t counted(number) except -1:
    # Convert to a count; one that is too large becomes INT64_MAX.
    cdef int overflow = 0
    cdef int64_t value = PyLong_AsLongLongAndOverflow(number, &overflow)
    if overflow > 0:
        return INT64_MAX
    if overflow < 0 or value < 0:
        raise ValueError(f"a count must not be negative, not {number}")
    return value

cdef inline int32_t block_size_of(block_size) except -1:
    if not 1 <= block_size <= BLOCK_SIZE_AT_MOST:
        raise ValueError(f"block_size must be in 1...{BLOCK_SIZE_AT_MOST}, not {block_size}")
    return block_size

cdef inline Hash key_of(hash_key) except *:
    cdef Hash key
    if not isinstance(hash_key, bytes):
        raise TypeError(f"hash_key must be bytes, not {type(hash_key).__name__}")
    if len(hash_key) != sizeof(Hash):
        raise ValueError(f"hash_key must have 16 bytes, not {len(hash_key)}")
    memcpy(&key, PyBytes_AS_STRING(hash_key), sizeof(Hash))
    return key

cdef inline int tokens_open(Py_buffer *view, numbers) except -1:
    # Open a contiguous int32 buffer. On success the caller releases it.
    cdef const char *form
    PyObject_GetBuffer(numbers, view, PyBUF_CONTIG_RO | PyBUF_FORMAT)
    form = view.format
    if form != NULL and form[0] in (b"@", b"=", b"<"):
        form += 1
    if form != NULL and form[0] == b"i" and form[1] == 0 and view.itemsize == 4 and view.ndim == 1:
        return 0
    PyBuffer_Release(view)
    raise TypeError("a buffer of numbers must have one dimension, of int32")

cdef inline int32_t block_or_none(Pool *pool, PyObject *number) except -2:
    cdef int overflow = 0
    cdef long id
    if not PyLong_Check(<object>number):
        raise TypeError(f"a block id is an int, not {type(<object>number).__name__}")
    id = PyLong_AsLongAndOverflow(<object>number, &overflow)
    if overflow or id < NONE or id >= pool.total:
        raise ValueError(f"there is no block {<object>number}: they are 0...{pool.total - 1}")
    return <int32_t>id

cdef inline Py_ssize_t end_of(Py_ssize_t length, Py_ssize_t end) except -1:
    if end > length:
        raise ValueError(f"block {end - 1} of a sequence that has {length}")
    return length if end < 0 else end

cdef inline Py_ssize_t read_buffer(Pool *pool, block_ids, Py_ssize_t begin, Py_ssize_t end) except -1:
    cdef Py_buffer view
    cdef Py_ssize_t i
    cdef const int32_t *ids
    tokens_open(&view, block_ids)
    try:
        ids = <const int32_t *>view.buf
        end = end_of(view.len // 4, end)
        scratch_reserve(pool, end - begin)
        for i in range(begin, end):
            if ids[i] < NONE or ids[i] >= pool.total:
                raise ValueError(f"there is no block {ids[i]}: they are 0...{pool.total - 1}")
            pool.scratch[i - begin] = ids[i]
    finally:
        PyBuffer_Release(&view)
    return end - begin

cdef inline Py_ssize_t read_range(Pool *pool, block_ids, Py_ssize_t begin, Py_ssize_t end) except -1:
    # Write to `scratch` the ids from `begin` up to `end`, or to the last if `end` is −1; return their number.
    if not isinstance(block_ids, (list, tuple)) and PyObject_CheckBuffer(block_ids):
        return read_buffer(pool, block_ids, begin, end)
    sequence = PySequence_Fast(block_ids, "block ids must be a sequence of numbers")
    cdef Py_ssize_t length = PySequence_Fast_GET_SIZE(sequence)
    cdef PyObject **items = PySequence_Fast_ITEMS(sequence)
    cdef Py_ssize_t i
    end = end_of(length, end)
    scratch_reserve(pool, end - begin)
    for i in range(begin, end):
        pool.scratch[i - begin] = block_or_none(pool, items[i])
    return end - begin

cdef inline Py_ssize_t read_blocks(Pool *pool, block_ids) except -1:
    # Write to `scratch` the ids that are not NONE; return their number.
    cdef Py_ssize_t i, own = 0
    for i in range(read_range(pool, block_ids, 0, -1)):
        pool.scratch[own] = pool.scratch[i]
        own += pool.scratch[i] != NONE
    return own

cdef inline list list_found(Pool *pool, Py_ssize_t gone, Py_ssize_t length):
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
