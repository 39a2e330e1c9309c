"""The blocks of a pool: reference counts and the free list; and the memory of all that a pool owns."""

from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Realloc
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t

from blockpool.index cimport NONE, Index, Place, index_add, index_find, index_remove
from blockpool.siphash cimport Hash, is_none, is_same

cdef extern from "Python.h":
    # Declared with `PyObject *`, so that Cython counts no references for each element.
    PyObject *PyList_GET_ITEM(PyObject *list, Py_ssize_t index)

cdef enum:
    IN_FREE_LIST = -1     # instead of a reference count
    PLACES_A_BLOCK = 2    # index places per block, so that collisions are rare

cdef struct Block:
    # 32 bytes, so that all fields of a block are in one cache line.
    Hash hash             # of its content, once it is full
    int32_t references    # IN_FREE_LIST: none, and not kept
    int32_t kept          # how often kept requests hold it
    int32_t owner         # the kept request that held it last; NONE once that request is dropped
    int32_t tip_of        # the kept request that ends with it

cdef struct Request:      # a kept one
    PyObject *key         # borrowed: the key in BlockPool.rows keeps it alive; NULL: a block that slid out
    int32_t *held
    int32_t count
    int32_t previous      # less recently used
    int32_t next          # more recently used, or the next free row

cdef struct Pool:
    Block *blocks
    int32_t *free_list    # a stack: the last one is allocated first
    Index index
    PyObject *numbers     # the list of the ints 0 … total − 1, made once; borrowed from BlockPool.numbers
    int32_t *scratch      # the block ids of the current call
    PyObject **found      # the blocks that a lookup has found
    Py_ssize_t scratch_room  # the capacity of both
    Request *requests
    int32_t requests_room
    int32_t free_request
    int32_t oldest
    int32_t newest
    int32_t total
    int32_t free
    int32_t referenced    # blocks with a reference
    int64_t references    # of all blocks
    int32_t kept          # distinct blocks that kept requests hold
    int64_t holds         # the same, each block counted once for each request that holds it
    int32_t slid          # blocks that slid out of a window and are kept, each by a request without a key
    int32_t *slid_as      # by block: that request; allocated with the first
    int64_t evicted_requests
    bint first_in_first_out

cdef inline int pool_begin(Pool *pool, list numbers) except -1:
    # Create blocks 0 … len(numbers) − 1, all free. On MemoryError, `pool_end` frees what was allocated.
    cdef int32_t block
    pool.total = pool.free = <int32_t>len(numbers)
    pool.numbers = <PyObject *>numbers
    pool.oldest = pool.newest = pool.free_request = NONE
    pool.index.mask = 1
    while pool.index.mask < PLACES_A_BLOCK * <int64_t>pool.total:
        pool.index.mask *= 2
    pool.blocks = <Block *>PyMem_Calloc(pool.total, sizeof(Block))
    pool.free_list = <int32_t *>PyMem_Calloc(pool.total, sizeof(int32_t))
    pool.index.places = <Place *>PyMem_Calloc(pool.index.mask, sizeof(Place))
    if pool.blocks == NULL or pool.free_list == NULL or pool.index.places == NULL:
        raise MemoryError
    pool.index.mask -= 1
    for block in range(pool.total):
        pool.blocks[block].references = IN_FREE_LIST
        pool.blocks[block].owner = pool.blocks[block].tip_of = NONE
        pool.free_list[pool.total - 1 - block] = block
    return 0

cdef inline void pool_end(Pool *pool) noexcept:
    cdef int32_t row
    for row in range(pool.requests_room):
        PyMem_Free(pool.requests[row].held)
    PyMem_Free(pool.requests)
    PyMem_Free(pool.slid_as)
    PyMem_Free(pool.blocks)
    PyMem_Free(pool.free_list)
    PyMem_Free(pool.index.places)
    PyMem_Free(pool.scratch)
    PyMem_Free(pool.found)

cdef inline int64_t pool_bytes(Pool *pool) noexcept:
    return (
        pool.total * <int64_t>(sizeof(Block) + sizeof(int32_t))
        + (pool.index.mask + 1) * <int64_t>sizeof(Place)
        + pool.scratch_room * <int64_t>(sizeof(int32_t) + sizeof(PyObject *))
        + pool.requests_room * <int64_t>sizeof(Request)
        + (pool.slid_as != NULL) * pool.total * <int64_t>sizeof(int32_t)
        + pool.holds * <int64_t>sizeof(int32_t)
    )

cdef inline void *grown(void *rows, size_t size) except NULL:
    # On failure the old array stays valid and the caller still owns it.
    rows = PyMem_Realloc(rows, size)
    if rows == NULL:
        raise MemoryError
    return rows

cdef inline int scratch_reserve(Pool *pool, Py_ssize_t count) except -1:
    if count > pool.scratch_room:
        pool.scratch = <int32_t *>grown(pool.scratch, 2 * count * sizeof(int32_t))
        pool.found = <PyObject **>grown(pool.found, 2 * count * sizeof(PyObject *))
        pool.scratch_room = 2 * count
    return 0

cdef inline void block_index(Pool *pool, int32_t id) noexcept:
    index_add(pool.index, &pool.blocks[id].hash, id, PyList_GET_ITEM(pool.numbers, id))

cdef inline int contents_index(Pool *pool, Hash *hashes, Py_ssize_t count) except -1:
    # The blocks in `scratch` are full, with these hashes: index those with content that is not indexed yet.
    cdef Py_ssize_t i
    cdef Block *block
    for i in range(count):
        if pool.scratch[i] == NONE:
            continue
        block = &pool.blocks[pool.scratch[i]]
        if block.references <= 0:
            raise ValueError(f"block {pool.scratch[i]} is full, but has no reference")
        if not is_none(&block.hash) and not is_same(&block.hash, &hashes[i]):
            raise ValueError(f"block {pool.scratch[i]} is full of other tokens already")
    for i in range(count):
        if pool.scratch[i] != NONE:
            pool.blocks[pool.scratch[i]].hash = hashes[i]
            if index_find(pool.index, &hashes[i]) == NONE:
                block_index(pool, pool.scratch[i])
    return 0

cdef inline void references_restore(Pool *pool, Py_ssize_t count) noexcept:
    cdef Py_ssize_t i
    cdef Block *block
    for i in range(count):
        block = &pool.blocks[pool.scratch[i]]
        pool.referenced += block.references == 0
        block.references += 1
    pool.references += count

cdef inline int references_add(Pool *pool, Py_ssize_t count) except -1:
    # Add a reference to each block in `scratch`. If one is free, raise ValueError and change nothing.
    cdef Py_ssize_t i
    for i in range(count):
        if pool.blocks[pool.scratch[i]].references == IN_FREE_LIST:
            raise ValueError(f"block {pool.scratch[i]} is free: it holds nothing that could be read")
    references_restore(pool, count)
    return 0

cdef inline int references_drop(Pool *pool, Py_ssize_t count) except -1:
    # Remove a reference from each block in `scratch`. If one has none, raise ValueError and change nothing.
    cdef Py_ssize_t i
    cdef Block *block
    for i in range(count):
        block = &pool.blocks[pool.scratch[i]]
        if block.references <= 0:
            references_restore(pool, i)
            raise ValueError(f"block {pool.scratch[i]} has no reference left: it was freed before")
        block.references -= 1
        pool.references -= 1
        pool.referenced -= block.references == 0
    return 0

cdef inline void blocks_free(Pool *pool, int32_t *ids, Py_ssize_t count) noexcept:
    # Free those without references or kept requests. The first of them is allocated next.
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
