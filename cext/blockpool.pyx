# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: annotation_typing=False, auto_pickle=False, autotestdict=False
"""The block allocator and prefix cache of one KV cache group.

Owns reference counts, the free list, the index from content to block, and the kept requests. A kept request
has ended, and its blocks stay cached in case the same tokens come again. The pool handles block ids only: it
has no tensors, no sequences and no clock.

A block that has slid out of a running sequence's window is kept too, as a request of its own without a key:
a long sequence gives up one block at a time, and a short part of it may be all that another one needs.

A block is in one of three states. *Referenced*: running sequences read it. *Evictable*: no sequence reads it,
but a kept request holds it. *Free*: neither; its content is lost. The three add up to `total`.

Promises:

- A referenced block is never allocated again, whatever is evicted.
- A chain of keyed 128-bit hashes identifies content. Each covers a block's tokens and the hash of the block
  before, so equal hashes mean equal tokens from the start of the sequence. The index maps a hash to one
  block. A second block of the same content is not indexed; when its request ends, the indexed one is kept.
- Eviction drops whole kept requests, the least recently used first. Blocks that others need stay. Nothing is
  evicted while the free list suffices, and then only as much as needed.
- A kept request that another one covers is dropped at once, so there are never more of them than blocks, and
  as many of blocks that slid out. Together they hold at most 256 × `total` references to blocks; beyond that
  the oldest are evicted.
- No method takes longer when more requests are kept. Evicting a request takes time in proportion to its
  blocks, amortized by the `retire` before it.
- In a list of block ids, −1 stands for a block that has slid out of a window, and is skipped.
- A method that raises has changed nothing, except that `cache_full_blocks` may have hashed the tokens.
"""

from typing import NamedTuple

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.long cimport PyLong_Check
from cpython.mem cimport PyMem_Free
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t
cimport cython

from blockpool.chain cimport Chain, chain_extend
from blockpool.conversion cimport (
    PyList_New, PyList_SET_ITEM, Py_INCREF, block_or_none, block_size_of, counted, key_of, list_found, read_blocks,
    read_range,
)
from blockpool.index cimport NONE, index_find, index_prefix, index_window
from blockpool.kept cimport (
    block_keep, blocks_use, request_drop, request_evict, request_keep, slid_begin, slid_request,
)
from blockpool.pool cimport (
    Pool, PyList_GET_ITEM, blocks_free, contents_index, pool_begin, pool_bytes, pool_end, references_add,
    references_drop, references_restore, scratch_reserve,
)
from blockpool.siphash cimport Hash, is_same, siphash

cdef enum:
    BLOCKS_AT_MOST = 1 << 28
    # Bounds the memory of kept requests to 1 KiB a block. A block itself takes 100 B, and 80 B more if it slid out.
    HOLDS_A_BLOCK = 256


class OutOfBlocks(Exception):
    """Fewer blocks are available than were requested; nothing has changed."""


class BlockPoolStatistics(NamedTuple):
    """The current use of the blocks, and counters since the pool was created.

    total = free + evictable + referenced. `cached_tokens`: tokens of the blocks that kept requests hold, each
    block counted once. `queries`, `hits`: tokens that `match_prefix` searched for and found.
    `evicted_requests`: kept requests dropped to make room, not those that another one covered or replaced.
    `cached_requests` and `evicted_requests` do not count blocks that slid out of a window.
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


@cython.final
@cython.no_gc  # it refers to no objects
cdef class BlockHashes:
    """The hash chain of one sequence's full blocks, which all its KV cache groups share.

    Each hash is SipHash-2-4-128 of the previous hash and the block's token ids, 4 bytes each. `hash_key`, 16
    bytes, must be random, so that a client cannot construct tokens that collide. The first hash follows the
    hash of `salt`: sequences with different salts share no blocks.
    """

    cdef Chain chain
    cdef readonly int32_t block_size

    def __cinit__(self, hash_key: bytes, block_size: int, salt: bytes = b""):
        self.chain.key = key_of(hash_key)
        self.block_size = self.chain.block_size = block_size_of(block_size)
        if not isinstance(salt, bytes):
            raise TypeError(f"salt must be bytes, not {type(salt).__name__}")
        # Padded without ambiguity, so that different salts stay different.
        padded = salt + b"\x80" + bytes((4 - len(salt) % 4) % 4)
        self.chain.root = siphash(&self.chain.key, NULL, PyBytes_AS_STRING(padded), PyBytes_GET_SIZE(padded))

    def __dealloc__(self):
        PyMem_Free(self.chain.hashes)

    def extend(self, token_ids: Buffer) -> int:
        """Hash every full block of the sequence that is not hashed yet; return the number of full blocks.

        `token_ids`: int32, contiguous, all tokens of the sequence from its start. Tokens that are hashed
        already are not read again; ValueError if there are fewer than that.
        """
        chain_extend(&self.chain, token_ids, 0)
        return self.chain.count

    def __len__(self) -> int:
        return self.chain.count

    def __getitem__(self, index: int) -> bytes:
        """Return the hash of block `index`, 16 bytes."""
        cdef Py_ssize_t i = index
        if i < 0:
            i += self.chain.count
        if not 0 <= i < self.chain.count:
            raise IndexError(f"block {index} of {self.chain.count} that are hashed")
        return PyBytes_FromStringAndSize(<char *>&self.chain.hashes[i], sizeof(Hash))

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + self.chain.room * sizeof(Hash)


@cython.final
@cython.no_gc  # it refers to ints only, so it cannot be part of a reference cycle
cdef class BlockPool:
    """The allocator of block ids 0 … `blocks` − 1, of `block_size` tokens each.

    `max_entries`, in tokens, and `threshold`, a fraction of it and of all blocks, decide when `trim` evicts.
    With `first_in_first_out` the request kept first is evicted first; otherwise the least recently used one.
    """

    cdef Pool pool
    cdef Hash key
    cdef list numbers         # the ints 0 … total − 1, made once
    cdef dict rows            # key -> row in `pool.requests`
    cdef readonly int32_t total
    cdef readonly int32_t block_size
    cdef int64_t most_in_use  # `trim` evicts while more blocks than this are in use
    cdef int64_t queries
    cdef int64_t hits

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
        cdef double fraction = threshold
        if not 1 <= blocks <= BLOCKS_AT_MOST:
            raise ValueError(f"blocks must be in 1...{BLOCKS_AT_MOST}, not {blocks}")
        if not 0.0 < fraction <= 1.0:
            raise ValueError(f"threshold must be above 0 and at most 1, not {threshold}")
        if max_entries is not None and max_entries < 1:
            raise ValueError(f"max_entries must be at least 1, not {max_entries}")
        self.block_size = block_size_of(block_size)
        self.key = key_of(hash_key)
        self.rows = {}
        self.numbers = list(range(blocks))
        pool_begin(&self.pool, self.numbers)
        self.pool.first_in_first_out = first_in_first_out
        self.total = self.pool.total
        most = int(fraction * blocks)
        self.most_in_use = most if max_entries is None else min(most, int(fraction * max_entries) // self.block_size)

    def __dealloc__(self):
        pool_end(&self.pool)

    @property
    def free(self) -> int:
        """The number of blocks in the free list."""
        return self.pool.free

    @property
    def evictable(self) -> int:
        """The number of blocks that no sequence reads, but kept requests hold."""
        return self.pool.total - self.pool.free - self.pool.referenced

    @property
    def available(self) -> int:
        """The number of blocks that `get_new_blocks` could allocate now: the free and the evictable."""
        return self.pool.total - self.pool.referenced

    @property
    def shared(self) -> int:
        """The number of references, less one for each block that has any."""
        return self.pool.references - self.pool.referenced

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
        cdef Pool *pool = &self.pool
        cdef PyObject *number
        cdef PyObject *numbers = pool.numbers
        cdef PyObject *result
        cdef Py_ssize_t i
        cdef int32_t *taken
        if wanted > pool.total - pool.referenced:
            raise OutOfBlocks(f"{wanted} blocks were requested, {self.available} of {pool.total} are available")
        given = PyList_New(wanted)
        while wanted > pool.free:
            request_evict(pool, self.rows, pool.oldest)
        result = <PyObject *>given
        taken = pool.free_list + pool.free - 1
        for i in range(wanted):
            pool.blocks[taken[-i]].references = 1
            number = PyList_GET_ITEM(numbers, taken[-i])
            Py_INCREF(number)
            PyList_SET_ITEM(result, i, number)
        pool.free -= <int32_t>wanted
        pool.referenced += <int32_t>wanted
        pool.references += wanted
        return given

    def touch(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each block, for another sequence that reads them. ValueError if one is free.

        The most recent kept request that holds the last block becomes the most recently used one. If that
        request has been dropped since, the block before decides, and so on. Next come those of the blocks
        that `retire_blocks` keeps, the last one first.
        """
        cdef Pool *pool = &self.pool
        cdef Py_ssize_t count = read_blocks(pool, block_ids)
        references_add(pool, count)
        blocks_use(pool, count)

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        """Remove a reference from each block, and free those that nothing needs; the first is reused first.

        ValueError if one has no reference left.
        """
        cdef Pool *pool = &self.pool
        cdef Py_ssize_t count = read_blocks(pool, block_ids)
        references_drop(pool, count)
        blocks_free(pool, pool.scratch, count)

    def retire_blocks(self, block_ids: Sequence[int]) -> None:
        """Remove a reference from each block that slid out of a window, and keep those that have a hash.

        Each is kept by itself and becomes the most recently used one, in the order of the ids. A request that is
        kept with it later takes its place. ValueError if a block has no reference left.
        """
        cdef Pool *pool = &self.pool
        cdef Py_ssize_t count = read_blocks(pool, block_ids)
        cdef Py_ssize_t i
        slid_begin(pool)
        references_drop(pool, count)
        try:
            for i in range(count):
                block_keep(pool, pool.scratch[i])
        except MemoryError:
            pass  # the others are freed
        blocks_free(pool, pool.scratch, count)
        self.bound_holds()

    def forget_blocks(self, hashes: BlockHashes, first: int, last: int) -> None:
        """Drop those of blocks `first` … `last` − 1 of a sequence that `retire_blocks` keeps.

        Blocks that kept requests with a key hold stay, and so do blocks that running sequences read.
        """
        cdef Chain *chain = self.chain_of(hashes)
        cdef Pool *pool = &self.pool
        cdef int64_t i
        cdef int32_t row
        for i in range(counted(first), min(counted(last), <int64_t>chain.count)):
            row = slid_request(pool, index_find(pool.index, &chain.hashes[i]))
            if row != NONE:
                request_drop(pool, row)

    # Contents

    def cache_full_blocks(
        self, block_ids: Sequence[int], token_ids: Buffer, first: int, last: int, hashes: BlockHashes
    ) -> None:
        """Index blocks `first` … `last` − 1 of a sequence, which are full, so that `match_prefix` finds them.

        `block_ids`: all blocks of the sequence, or at least the first `last`. `token_ids`: int32, all its
        tokens; read only if `hashes` has fewer than `last` blocks. Idempotent. ValueError if there are fewer
        blocks or tokens, a block is not referenced, or it held other tokens when it became full.
        """
        cdef Chain *chain = self.chain_of(hashes)
        cdef Pool *pool = &self.pool
        cdef Py_ssize_t begin = counted(first)
        cdef Py_ssize_t end = counted(last)
        if begin > end:
            raise ValueError(f"blocks {first}...{last} are none")
        if chain.count < end:
            chain_extend(chain, token_ids, end)
        contents_index(pool, chain.hashes + begin, read_range(pool, block_ids, begin, end))

    def match_prefix(self, hashes: BlockHashes, limit: int, *, window: int | None = None) -> list[int]:
        """Return the blocks of the longest cached prefix of a sequence: at most `limit`, all full.

        With `window`, a number of blocks, only the last `window` blocks of the prefix must be cached, because
        later tokens do not attend to those before; these are −1 in the result. No reference is added: call
        `touch` before anything else can evict them.
        """
        cdef Chain *chain = self.chain_of(hashes)
        cdef Pool *pool = &self.pool
        cdef int64_t longest = min(counted(limit), chain.count)
        cdef int64_t seen = longest if window is None else min(counted(window), longest)
        cdef int64_t length
        scratch_reserve(pool, longest)
        self.queries += longest * self.block_size
        if window is None:
            length = seen = index_prefix(pool.index, chain.hashes, longest, pool.found)
        else:
            length = index_window(pool.index, chain.hashes, longest, seen, pool.found)
            seen = min(seen, length)
        self.hits += length * self.block_size
        return list_found(pool, length - seen, length)

    cdef Chain *chain_of(self, hashes) except NULL:
        if not isinstance(hashes, BlockHashes):
            raise TypeError(f"hashes must be BlockHashes, not {type(hashes).__name__}")
        cdef Chain *chain = &(<BlockHashes>hashes).chain
        if chain.block_size != self.block_size or not is_same(&chain.key, &self.key):
            raise ValueError("these hashes have another key or block size than the pool")
        return chain

    # Requests that have ended

    def retire(self, key: int, block_ids: Sequence[int]) -> None:
        """Remove a reference from each block of an ended request, and keep its hashed blocks.

        They are kept as one request under `key`, the most recently used. It replaces a request kept under the
        same key, and every one that it covers. If another one covers it, that becomes the most recently used
        one instead. If no block has a hash, the kept requests do not change. ValueError if a block has no
        reference left.
        """
        cdef Pool *pool = &self.pool
        cdef Py_ssize_t count = read_blocks(pool, block_ids)
        if not PyLong_Check(key):
            raise TypeError(f"a key is an int, not {type(key).__name__}")
        references_drop(pool, count)
        try:
            request_keep(pool, self.rows, key, count)
        except BaseException:
            references_restore(pool, count)
            raise
        blocks_free(pool, pool.scratch, count)
        self.bound_holds()

    cdef int bound_holds(self) except -1:
        while self.pool.holds > HOLDS_A_BLOCK * <int64_t>self.pool.total:
            request_evict(&self.pool, self.rows, self.pool.oldest)
        return 0

    def trim(self) -> list[int]:
        """Evict kept requests in order until the cache is within its limits; return the keys of the evicted.

        The limits: blocks in use are at most `threshold` of all, and their capacity in tokens is at most
        `threshold` of `max_entries`. Stop as well when nothing is evictable. Evicted blocks that slid out of
        a window have no key.
        """
        evicted = []
        while self.pool.total - self.pool.free > self.most_in_use and self.evictable > 0:
            if self.pool.requests[self.pool.oldest].key != NULL:
                evicted.append(<object>self.pool.requests[self.pool.oldest].key)
            request_evict(&self.pool, self.rows, self.pool.oldest)
        return evicted

    def free_ids(self) -> list[int]:
        """Return the free blocks, ascending. Their content is lost."""
        cdef int32_t i
        return sorted([self.pool.free_list[i] for i in range(self.pool.free)])

    def evict(self, key: int) -> bool:
        """Drop one kept request. Return False, and change nothing, if none is kept under this key."""
        row = self.rows.get(key)
        if row is None:
            return False
        request_evict(&self.pool, self.rows, row)
        return True

    # Queries

    def statistics(self) -> BlockPoolStatistics:
        """Return a frozen summary."""
        return BlockPoolStatistics(
            total=self.pool.total,
            free=self.pool.free,
            evictable=self.evictable,
            referenced=self.pool.referenced,
            cached_requests=len(self.rows),
            cached_tokens=<int64_t>self.pool.kept * self.block_size,
            queries=self.queries,
            hits=self.hits,
            evicted_requests=self.pool.evicted_requests,
        )

    def reference_count(self, block: int) -> int:
        """Return the reference count of a block. ValueError if there is no such block."""
        cdef int32_t id = block_or_none(&self.pool, <PyObject *>block)
        if id == NONE:
            raise ValueError("-1 stands for no block")
        return max(self.pool.blocks[id].references, 0)

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + pool_bytes(&self.pool)
