# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: annotation_typing=False, auto_pickle=False, autotestdict=False
"""The block allocator and prefix cache of one KV cache group.

Owns reference counts, the free list, the index from content to block, and the kept requests. A kept request
has ended, and its blocks stay cached in case the same tokens come again. The pool handles block ids only: it
has no tensors, no sequences and no clock.

A block is in one of three states. *Referenced*: running sequences read it. *Evictable*: no sequence reads it,
but a kept request holds it. *Free*: neither; its content is lost. The three add up to `total`.

Promises:

- A referenced block is never allocated again, whatever is evicted.
- A chain of keyed 128-bit hashes identifies content. Each covers a block's tokens and the hash of the block
  before, so equal hashes mean equal tokens from the start of the sequence. The index maps a hash to one
  block. A second block of the same content is not indexed; when its request ends, the indexed one is kept.
- Eviction drops whole kept requests, the least recently used first. Blocks that others need stay. Nothing is
  evicted while the free list suffices, and then only as much as needed.
- A kept request that another one covers is dropped at once, so there are never more of them than blocks.
  Together they hold at most 256 × `total` references to blocks; beyond that the oldest are evicted.
- No method takes longer when more requests are kept. Evicting a request takes time in proportion to its
  blocks, amortized by the `retire` before it.
- In a list of block ids, −1 stands for a block that has slid out of a window, and is skipped.
- A method that raises has changed nothing, except that `cache_full_blocks` may have hashed the tokens.
"""

from typing import NamedTuple

from cpython.buffer cimport PyBUF_CONTIG_RO, PyBUF_FORMAT, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.long cimport PyLong_AsLongAndOverflow, PyLong_AsLongLongAndOverflow, PyLong_Check, PyLong_CheckExact
from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.object cimport PyObject
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint64_t
from libc.string cimport memcpy
cimport cython

from blockpool.index cimport (
    NONE, Index, Place, fetch_ahead, index_add, index_find, index_prefix, index_remove, index_window,
)
from blockpool.siphash cimport Hash, is_none, is_same, siphash

cdef extern from "Python.h":
    # Declared with `PyObject *`, so that Cython counts no references for each element.
    PyObject *PyList_GET_ITEM(PyObject *list, Py_ssize_t index)
    void PyList_SET_ITEM(PyObject *list, Py_ssize_t index, PyObject *item)
    list PyList_New(Py_ssize_t length)
    void Py_INCREF(PyObject *item)
    object PySequence_Fast(object sequence, const char *message)
    Py_ssize_t PySequence_Fast_GET_SIZE(object sequence)
    PyObject **PySequence_Fast_ITEMS(object sequence)


class OutOfBlocks(Exception):
    """Fewer blocks are available than were requested; nothing has changed."""


class BlockPoolStatistics(NamedTuple):
    """The current use of the blocks, and counters since the pool was created.

    total = free + evictable + referenced. `cached_tokens`: tokens of the blocks that kept requests hold, each
    block counted once. `queries`, `hits`: tokens that `match_prefix` searched for and found.
    `evicted_requests`: kept requests dropped to make room, not those that another one covered or replaced.
    """

    total: int
    free: int
    evictable: int
    referenced: int
    cached_requests: int
    cached_tokens: int
    queries: int
    hits: int
    evicted_requests: int


cdef enum:
    IN_FREE_LIST = -1    # instead of a reference count
    BLOCKS_AT_MOST = 1 << 28
    BLOCK_SIZE_AT_MOST = 1 << 16
    HOLDS_A_BLOCK = 256  # bounds the memory of kept requests to 1 KiB a block; a block itself takes 100 B
    ROOM_AT_FIRST = 16
    PLACES_A_BLOCK = 2   # index places per block, so that collisions are rare


cdef struct Block:
    # 32 bytes, so that all fields of a block are in one cache line.
    Hash hash           # of its content, once it is full
    int32_t references  # IN_FREE_LIST: none, and not kept
    int32_t kept        # how often kept requests hold it
    int32_t owner       # the kept request that held it last; NONE once that request is dropped
    int32_t tip_of      # the kept request whose last block it is


cdef struct Request:
    PyObject *key       # borrowed: the key in BlockPool.rows keeps it alive
    int32_t *held
    int32_t count
    int32_t previous    # less recently used
    int32_t next        # more recently used, or the next free row


# Content -------------------------------------------------------------------------------------------


include "blockpool/hashes.pxi"


@cython.final
@cython.no_gc  # it refers to ints only, so it cannot be part of a reference cycle
cdef class BlockPool:
    """The allocator of block ids 0 … `blocks` − 1, of `block_size` tokens each.

    `max_entries`, in tokens, and `threshold`, a fraction of it and of all blocks, decide when `trim` evicts.
    With `first_in_first_out` the request kept first is evicted first; otherwise the least recently used one.
    """

    cdef Block *blocks
    cdef int32_t *free_list   # a stack: the last one is allocated first
    cdef Index index
    cdef int32_t *scratch     # the block ids of the current call
    cdef PyObject **found     # the blocks that a lookup has found
    cdef Py_ssize_t scratch_room  # the capacity of both
    cdef Request *requests
    cdef int32_t requests_room
    cdef int32_t free_request
    cdef int32_t oldest
    cdef int32_t newest
    cdef list numbers         # the ints 0 … total − 1, made once
    cdef dict rows            # key -> row in `requests`
    cdef Hash key
    cdef readonly int32_t total
    cdef readonly int32_t block_size
    cdef readonly int32_t free
    cdef int32_t referenced
    cdef int32_t kept         # distinct blocks that kept requests hold
    cdef int64_t holds        # the same, each block counted once for each request that holds it
    cdef double used_at_most
    cdef double entries_at_most
    cdef bint first_in_first_out
    cdef int64_t queries
    cdef int64_t hits
    cdef int64_t evicted_requests

    def __cinit__(
        self,
        blocks: int,
        block_size: int,
        *,
        hash_key: bytes,
        max_entries: int | None = None,
        threshold: float = 0.8,
        first_in_first_out: bool = False,
    ):
        cdef int64_t block
        cdef double fraction = threshold
        if not 1 <= blocks <= BLOCKS_AT_MOST:
            raise ValueError(f"blocks must be in 1...{BLOCKS_AT_MOST}, not {blocks}")
        if not 0.0 < fraction <= 1.0:
            raise ValueError(f"threshold must be above 0 and at most 1, not {threshold}")
        if max_entries is not None and max_entries < 1:
            raise ValueError(f"max_entries must be at least 1, not {max_entries}")
        self.block_size = block_size_of(block_size)
        self.key = key_of(hash_key)
        self.total = self.free = blocks
        self.used_at_most = fraction * self.total
        self.first_in_first_out = first_in_first_out
        self.entries_at_most = -1.0 if max_entries is None else fraction * max_entries
        self.oldest = self.newest = self.free_request = NONE
        self.rows = {}
        self.numbers = list(range(self.total))
        self.index.mask = 1
        while self.index.mask < PLACES_A_BLOCK * <int64_t>self.total:
            self.index.mask *= 2
        self.blocks = <Block *>PyMem_Calloc(self.total, sizeof(Block))
        self.free_list = <int32_t *>PyMem_Calloc(self.total, sizeof(int32_t))
        self.index.places = <Place *>PyMem_Calloc(self.index.mask, sizeof(Place))
        if self.blocks == NULL or self.free_list == NULL or self.index.places == NULL:
            raise MemoryError
        self.index.mask -= 1
        for block in range(self.total):
            self.blocks[block].references = IN_FREE_LIST
            self.blocks[block].owner = self.blocks[block].tip_of = NONE
            self.free_list[self.total - 1 - block] = <int32_t>block

    def __dealloc__(self):
        cdef int32_t row
        if self.requests != NULL:
            for row in range(self.requests_room):
                PyMem_Free(self.requests[row].held)
        PyMem_Free(self.requests)
        PyMem_Free(self.blocks)
        PyMem_Free(self.free_list)
        PyMem_Free(self.index.places)
        PyMem_Free(self.scratch)
        PyMem_Free(self.found)

    @property
    def evictable(self) -> int:
        """The number of blocks that no sequence reads, but kept requests hold."""
        return self.total - self.free - self.referenced

    @property
    def available(self) -> int:
        """The number of blocks that `get_new_blocks` could allocate now: the free and the evictable."""
        return self.total - self.referenced

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks `tokens` tokens need; the last one may be partly full."""
        cdef int64_t count = counted(tokens)
        return count // self.block_size + (count % self.block_size != 0)

    # Running sequences

    def get_new_blocks(self, count: int) -> list[int]:
        """Allocate `count` blocks, each with one reference; evict kept requests if too few are free.

        Raise `OutOfBlocks` if fewer are free or evictable.
        """
        cdef int64_t wanted = counted(count)
        cdef PyObject *number
        cdef PyObject *numbers = <PyObject *>self.numbers
        cdef PyObject *result
        cdef Py_ssize_t i
        cdef int32_t *taken
        if wanted > self.total - self.referenced:
            raise OutOfBlocks(f"{wanted} blocks were requested, {self.available} of {self.total} are available")
        given = PyList_New(wanted)
        while wanted > self.free:
            evict_row(self, self.oldest)
        result = <PyObject *>given
        taken = self.free_list + self.free - 1
        for i in range(wanted):
            self.blocks[taken[-i]].references = 1
            number = PyList_GET_ITEM(numbers, taken[-i])
            Py_INCREF(number)
            PyList_SET_ITEM(result, i, number)
        self.free -= <int32_t>wanted
        self.referenced += <int32_t>wanted
        return given

    def touch(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each block, for another sequence that reads them. ValueError if one is free.

        The most recent kept request that holds the last block becomes the most recently used one. If that
        request has been dropped since, the block before decides, and so on.
        """
        cdef Py_ssize_t count = read_blocks(self, block_ids)
        cdef Py_ssize_t i
        cdef Block *block
        for i in range(count):
            if self.blocks[self.scratch[i]].references == IN_FREE_LIST:
                raise ValueError(f"block {self.scratch[i]} is free: it holds nothing that could be read")
        for i in range(count):
            block = &self.blocks[self.scratch[i]]
            self.referenced += block.references == 0
            block.references += 1
        for i in range(count - 1, -1, -1):
            block = &self.blocks[self.scratch[i]]
            if block.owner != NONE:
                use_row(self, block.owner)
                break

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        """Remove a reference from each block, and free those that nothing needs; the first is reused first.

        ValueError if one has no reference left.
        """
        cdef Py_ssize_t count = read_blocks(self, block_ids)
        drop_references(self, count)
        free_unneeded(self, self.scratch, count)

    # Contents

    def cache_full_blocks(
        self, block_ids: Sequence[int], token_ids: Buffer, first: int, last: int, hashes: BlockHashes
    ) -> None:
        """Index blocks `first` … `last` − 1 of a sequence, which are full, so that `match_prefix` finds them.

        `block_ids`: all blocks of the sequence, or at least the first `last`. `token_ids`: int32, all its
        tokens; read only if `hashes` has fewer than `last` blocks. Idempotent. ValueError if there are fewer
        blocks or tokens, a block is not referenced, or it held other tokens when it became full.
        """
        cdef BlockHashes chain = own_hashes(self, hashes)
        cdef Py_ssize_t begin = counted(first)
        cdef Py_ssize_t end = counted(last)
        cdef Py_ssize_t i
        cdef int32_t id
        cdef Block *block
        if begin > end:
            raise ValueError(f"blocks {first}...{last} are none")
        if chain.count < end:
            hash_tokens(chain, token_ids, end)
        read_range(self, block_ids, begin, end)
        for i in range(end - begin):
            id = self.scratch[i]
            if id == NONE:
                continue
            block = &self.blocks[id]
            if block.references <= 0:
                raise ValueError(f"block {id} is full, but has no reference")
            if not is_none(&block.hash) and not is_same(&block.hash, &chain.chain[begin + i]):
                raise ValueError(f"block {id} is full of other tokens already")
        for i in range(end - begin):
            id = self.scratch[i]
            if id == NONE:
                continue
            self.blocks[id].hash = chain.chain[begin + i]
            if index_find(self.index, &chain.chain[begin + i]) == NONE:
                index_block(self, id)

    def match_prefix(self, hashes: BlockHashes, limit: int, *, window: int | None = None) -> list[int]:
        """Return the blocks of the longest cached prefix of a sequence: at most `limit`, all full.

        With `window`, a number of blocks, only the last `window` blocks of the prefix must be cached, because
        later tokens do not attend to those before; these are −1 in the result. No reference is added: call
        `touch` before anything else can evict them.
        """
        cdef BlockHashes chain = own_hashes(self, hashes)
        cdef int64_t longest = min(counted(limit), chain.count)
        cdef int64_t seen = longest if window is None else min(counted(window), longest)
        cdef int64_t length
        reserve_scratch(self, longest)
        self.queries += longest * self.block_size
        if window is None:
            length = seen = index_prefix(self.index, chain.chain, longest, self.found)
        else:
            length = index_window(self.index, chain.chain, longest, seen, self.found)
            seen = min(seen, length)
        self.hits += length * self.block_size
        return list_answer(self, length - seen, length)

    # Requests that have ended

    def retire(self, key: int, block_ids: Sequence[int]) -> None:
        """Remove a reference from each block of an ended request, and keep the blocks whose hash is known.

        They are kept as one request under `key`, the most recently used. It replaces a request kept under the
        same key, and every one that it covers. If no block has a hash, the kept requests do not change.
        ValueError if a block has no reference left.
        """
        cdef Py_ssize_t count = read_blocks(self, block_ids)
        cdef Py_ssize_t hashed = 0
        cdef Py_ssize_t i
        cdef int32_t row = NONE
        cdef int32_t replaced
        if not PyLong_Check(key):
            raise TypeError(f"a key is an int, not {type(key).__name__}")
        drop_references(self, count)
        for i in range(count):
            hashed += not is_none(&self.blocks[self.scratch[i]].hash)
        if hashed:
            try:
                row = new_row(self, hashed)
                replaced = enter_key(self, key if PyLong_CheckExact(key) else int(key), row)
            except BaseException:
                restore_references(self, count)
                free_row(self, row)
                raise
            keep_row(self, row, count)
            if replaced != NONE:
                drop_row(self, replaced)
            cover_with(self, row)
        free_unneeded(self, self.scratch, count)
        while self.holds > HOLDS_A_BLOCK * <int64_t>self.total:
            evict_row(self, self.oldest)

    def trim(self) -> list[int]:
        """Evict kept requests in order until the cache is within its limits; return the keys of the evicted.

        The limits: blocks in use are at most `threshold` of all, and their capacity in tokens is at most
        `threshold` of `max_entries`. Stop as well when nothing is evictable.
        """
        evicted = []
        while is_over(self) and self.total - self.free - self.referenced > 0:
            evicted.append(<object>self.requests[self.oldest].key)
            evict_row(self, self.oldest)
        return evicted

    def free_ids(self) -> list[int]:
        """Return the free blocks, ascending. Their content is lost."""
        cdef int32_t i
        return sorted([self.free_list[i] for i in range(self.free)])

    def evict(self, key: int) -> bool:
        """Drop one kept request. Return False, and change nothing, if none is kept under this key."""
        row = self.rows.get(key)
        if row is None:
            return False
        evict_row(self, row)
        return True

    # Questions

    def statistics(self) -> BlockPoolStatistics:
        """Return a frozen summary."""
        return BlockPoolStatistics(
            total=self.total,
            free=self.free,
            evictable=self.evictable,
            referenced=self.referenced,
            cached_requests=len(self.rows),
            cached_tokens=<int64_t>self.kept * self.block_size,
            queries=self.queries,
            hits=self.hits,
            evicted_requests=self.evicted_requests,
        )

    def reference_count(self, block: int) -> int:
        """Return the reference count of a block. ValueError if there is no such block."""
        return max(self.blocks[number_of_block(self, <PyObject *>block)].references, 0)

    def __sizeof__(self) -> int:
        return (
            object.__sizeof__(self)
            + self.total * (sizeof(Block) + sizeof(int32_t))
            + (self.index.mask + 1) * sizeof(Place)
            + self.scratch_room * (sizeof(int32_t) + sizeof(PyObject *))
            + self.requests_room * sizeof(Request)
            + self.holds * sizeof(int32_t)
        )


include "blockpool/references.pxi"
include "blockpool/kept.pxi"
include "blockpool/numbers.pxi"
