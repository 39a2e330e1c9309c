# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: annotation_typing=False, auto_pickle=False, autotestdict=False
"""The pages of one KV cache group: who needs which, what lies in them, and which can be had.

Owns reference counts, the free list, the index from content to block, and the requests that have ended and
whose blocks are kept in case the same tokens come again. Knows block ids, not what they are ids of: no tensor,
no sequence, no clock.

A block is in one of three states. *Referenced*: running sequences read it. *Evictable*: none does, but a kept
request holds it. *Free*: neither; its content is forgotten. The three add up to `total`.

Promises:

- A referenced block is never given out, whatever is evicted.
- Content is told by a chain of keyed 128-bit hashes, each over the tokens of a block and the hash of the block
  before it, so equal hashes mean equal tokens from the start of the sequence. A hash maps to one block that holds
  it. A second block of the same content stays as it is, out of the index; when its request ends, the first one
  is kept in its stead.
- Requests that have ended are dropped a whole one at a time, the least recently used first; of its blocks those
  stay that others need. Nothing is dropped as long as the free list suffices, and no more than suffices.
- A kept request that another one covers is dropped at once: so there are never more of them than blocks. They
  hold blocks at most 256 times as often as there are blocks, or the oldest are evicted.
- No method takes longer when more requests are kept. Evicting one takes time in proportion to its blocks, and
  is paid for by the `retire` before it.
- In a list of block ids, −1 stands for a block that has slid out of a window, and is skipped.
- A method that raises has changed nothing, but that `cache_full_blocks` may have hashed the tokens.
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

cdef extern from "Python.h":
    # As they are, without the references that `object` would take and give back for each element.
    PyObject *PyList_GET_ITEM(PyObject *list, Py_ssize_t index)
    void PyList_SET_ITEM(PyObject *list, Py_ssize_t index, PyObject *item)
    list PyList_New(Py_ssize_t length)
    void Py_INCREF(PyObject *item)
    object PySequence_Fast(object sequence, const char *message)
    Py_ssize_t PySequence_Fast_GET_SIZE(object sequence)
    PyObject **PySequence_Fast_ITEMS(object sequence)

cdef extern from *:
    """
    #if defined(__GNUC__) || defined(__clang__)
        #define fetch_ahead(address) __builtin_prefetch(address)
    #else
        #define fetch_ahead(address) ((void)(address))
    #endif
    """
    void fetch_ahead(const void *address) noexcept


class OutOfBlocks(Exception):
    """Fewer blocks could be had than were asked for; nothing has changed."""


class Statistics(NamedTuple):
    """What the blocks are used for now, and what happened since the beginning.

    total = free + evictable + referenced. `cached_tokens`: of blocks that are kept, each counted once.
    `queries`, `hits`: tokens that `match_prefix` was asked for and found. `evicted_requests`: dropped to make
    room, not because another covers or replaces them.
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
    NONE = -1            # no block, no request; ends every list
    IN_FREE_LIST = -1    # in place of a count of references
    BLOCKS_AT_MOST = 1 << 28
    BLOCK_SIZE_AT_MOST = 1 << 16
    HOLDS_A_BLOCK = 256  # bounds the memory of kept requests: 1 KiB a block, where a block itself has 100
    ROOM_AT_FIRST = 16
    PLACES_A_BLOCK = 2   # so that a lookup seldom meets another
    AHEAD = 8            # how many blocks before its turn a block is fetched


cdef struct Hash:
    uint64_t low
    uint64_t high       # both 0: none


cdef struct Block:
    # 32 bytes, so that whatever is asked about a block is in one line of the cache.
    Hash hash           # of its content, once it is full
    int32_t references  # IN_FREE_LIST: none, and not kept
    int32_t kept        # how often kept requests hold it
    int32_t owner       # the kept request that was the last to hold it; NONE once that one is dropped
    int32_t tip_of      # the kept request whose last block it is


cdef struct Place:
    # Of the index: open addressing with linear probing, at most half full. All that a lookup needs, so that it
    # is one miss of the cache for each block of a prefix.
    Hash hash           # its low bits say where it belongs; none: an empty place
    PyObject *number    # the block as an int, borrowed from BlockPool.numbers
    int64_t block


cdef struct Request:
    PyObject *key       # borrowed: the key in BlockPool.rows keeps it alive
    int32_t *held
    int32_t count
    int32_t previous    # less recently used
    int32_t next        # more recently used, or the next free row


# Content -------------------------------------------------------------------------------------------


@cython.final
@cython.no_gc  # it refers to nothing
cdef class BlockHashes:
    """The hashes of one sequence's full blocks, a chain that all its KV cache groups share.

    Each is SipHash-2-4-128 under `hash_key` (16 bytes: random, so that nobody can prepare tokens that collide)
    of the hash before it and the block's token ids, 4 bytes each. The first one follows the hash of `salt`:
    sequences with different salts have nothing in common.
    """

    cdef Hash key
    cdef Hash root
    cdef Hash *chain
    cdef Py_ssize_t count
    cdef Py_ssize_t room
    cdef readonly int32_t block_size

    def __cinit__(self, hash_key: bytes, block_size: int, salt: bytes = b""):
        self.key = key_of(hash_key)
        self.block_size = block_size_of(block_size)
        if not isinstance(salt, bytes):
            raise TypeError(f"salt must be bytes, not {type(salt).__name__}")
        # Filled up to a length that no block has, and so that no two salts become the same.
        padded = salt + b"\x80" + bytes((4 - len(salt) % 4) % 4)
        self.root = siphash(&self.key, NULL, PyBytes_AS_STRING(padded), PyBytes_GET_SIZE(padded))

    def __dealloc__(self):
        PyMem_Free(self.chain)

    def extend(self, token_ids: Buffer) -> int:
        """Hashes every full block of the sequence that is not hashed yet; returns how many there are.

        `token_ids`: int32, contiguous, all tokens of the sequence from its start. Those that are hashed already
        are not looked at again; ValueError if there are fewer than that.
        """
        cdef Py_buffer view
        tokens_open(&view, token_ids)
        try:
            self.extend_to(<const char *>view.buf, view.len // 4 // self.block_size)
        finally:
            PyBuffer_Release(&view)
        return self.count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> bytes:
        """The hash of block `index`, 16 bytes."""
        cdef Py_ssize_t i = index
        if i < 0:
            i += self.count
        if not 0 <= i < self.count:
            raise IndexError(f"block {index} of {self.count} that are hashed")
        return PyBytes_FromStringAndSize(<char *>&self.chain[i], sizeof(Hash))

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + self.room * sizeof(Hash)

    cdef int extend_to(self, const char *tokens, Py_ssize_t blocks) except -1:
        cdef size_t bytes_a_block = self.block_size * 4
        cdef Hash *parent
        cdef Hash hash
        if blocks < self.count:
            raise ValueError(f"tokens of {blocks} full blocks, but {self.count} were hashed before")
        if blocks > self.room:
            self.reserve(blocks)
        while self.count < blocks:
            parent = &self.chain[self.count - 1] if self.count else &self.root
            hash = siphash(&self.key, parent, tokens + self.count * bytes_a_block, bytes_a_block)
            if hash.low == 0 and hash.high == 0:
                hash.low = 1  # because 0 stands for none
            self.chain[self.count] = hash
            self.count += 1
        return 0

    cdef int reserve(self, Py_ssize_t blocks) except -1:
        cdef Py_ssize_t room = max(blocks, 2 * self.room)
        self.chain = <Hash *>grown(self.chain, room * sizeof(Hash))
        self.room = room
        return 0


# The pool ------------------------------------------------------------------------------------------


@cython.final
@cython.no_gc  # it refers to numbers only, so no cycle can pass through it
cdef class BlockPool:
    """Block ids 0 … `blocks` − 1 of `block_size` tokens each.

    `max_entries`, tokens, and `threshold`, a fraction of that and of all blocks, say when `trim` evicts.
    """

    cdef Block *blocks
    cdef int32_t *free_list   # the last one is given out first
    cdef Place *places
    cdef int64_t mask         # places in the index − 1
    cdef int32_t *scratch     # the block ids of the call under way
    cdef PyObject **found     # the blocks that a lookup has found
    cdef Py_ssize_t scratch_room  # of both
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
    cdef int32_t kept         # blocks that kept requests hold
    cdef int64_t holds        # how often they do
    cdef double used_at_most
    cdef double entries_at_most
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
        self.entries_at_most = -1.0 if max_entries is None else fraction * max_entries
        self.oldest = self.newest = self.free_request = NONE
        self.rows = {}
        self.numbers = list(range(self.total))
        self.mask = 1
        while self.mask < PLACES_A_BLOCK * <int64_t>self.total:
            self.mask *= 2
        self.blocks = <Block *>PyMem_Calloc(self.total, sizeof(Block))
        self.free_list = <int32_t *>PyMem_Calloc(self.total, sizeof(int32_t))
        self.places = <Place *>PyMem_Calloc(self.mask, sizeof(Place))
        if self.blocks == NULL or self.free_list == NULL or self.places == NULL:
            raise MemoryError
        self.mask -= 1
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
        PyMem_Free(self.places)
        PyMem_Free(self.scratch)
        PyMem_Free(self.found)

    @property
    def evictable(self) -> int:
        """How many blocks nobody reads, but kept requests hold."""
        return self.total - self.free - self.referenced

    @property
    def available(self) -> int:
        """How many `get_new_blocks` could give out now: the free and the evictable."""
        return self.total - self.referenced

    def blocks_for(self, tokens: int) -> int:
        """How many blocks that many tokens fill, the last one perhaps partly."""
        cdef int64_t count = counted(tokens)
        return count // self.block_size + (count % self.block_size != 0)

    # Running sequences

    def get_new_blocks(self, count: int) -> list[int]:
        """Gives out `count` blocks, each referenced once: of the free list, after evicting what is missing there.

        `OutOfBlocks` when fewer are free or evictable.
        """
        cdef int64_t wanted = counted(count)
        cdef PyObject *number
        cdef PyObject *numbers = <PyObject *>self.numbers
        cdef PyObject *result
        cdef Py_ssize_t i
        cdef int32_t *taken
        if wanted > self.total - self.referenced:
            raise OutOfBlocks(f"{wanted} blocks were asked for, {self.available} of {self.total} can be had")
        given = PyList_New(wanted)
        while wanted > self.free:
            self.evict_row(self.oldest)
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
        """Adds a reference to each: another sequence reads them. ValueError if one is free.

        The kept request that was the last to hold the last of them becomes the most recently used one; if that
        request has been dropped since, the last before it counts of which the request is still there.
        """
        cdef Py_ssize_t count = self.read_blocks(block_ids)
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
                self.use(block.owner)
                break

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        """Takes a reference from each. One that nobody needs any more is free, the first the next to be taken.

        ValueError if one has no reference left to take.
        """
        cdef Py_ssize_t count = self.read_blocks(block_ids)
        self.drop_references(count)
        self.settle(self.scratch, count)

    # Contents

    def cache_full_blocks(
        self, block_ids: Sequence[int], token_ids: Buffer, first: int, last: int, hashes: BlockHashes
    ) -> None:
        """Blocks `first` … `last` − 1 of a sequence are full: from now on `match_prefix` finds them.

        `block_ids`: all blocks of the sequence, or at least the first `last`. `token_ids`: int32, all its tokens;
        read only if `hashes` does not reach as far as `last`. Saying it again is no harm. ValueError when there
        are fewer blocks or tokens, a block is not referenced, or it held other tokens when it became full.
        """
        cdef BlockHashes chain = self.own_hashes(hashes)
        cdef Py_ssize_t begin = counted(first)
        cdef Py_ssize_t end = counted(last)
        cdef Py_ssize_t i
        cdef int32_t id
        cdef Block *block
        if begin > end:
            raise ValueError(f"blocks {first}...{last} are none")
        if chain.count < end:
            hash_tokens(chain, token_ids, end)
        self.read_range(block_ids, begin, end)
        for i in range(end - begin):
            id = self.scratch[i]
            if id == NONE:
                continue
            block = &self.blocks[id]
            if block.references <= 0:
                raise ValueError(f"block {id} is full, but nobody has it")
            if not is_none(&block.hash) and not is_same(&block.hash, &chain.chain[begin + i]):
                raise ValueError(f"block {id} is full of other tokens already")
        for i in range(end - begin):
            id = self.scratch[i]
            if id == NONE:
                continue
            self.blocks[id].hash = chain.chain[begin + i]
            if self.find(&chain.chain[begin + i]) == NONE:
                self.index_add(id)

    def match_prefix(self, hashes: BlockHashes, limit: int, *, window: int | None = None) -> list[int]:
        """The blocks that hold the longest prefix of a sequence that is there: at most `limit`, all full.

        With `window`, a number of blocks, only that many at the end of the prefix need to be there, because
        nothing later looks at those before them: they are −1 in the answer. No reference is taken: `touch` them
        before anything else can evict them.
        """
        cdef BlockHashes chain = self.own_hashes(hashes)
        cdef int64_t longest = min(counted(limit), chain.count)
        cdef int64_t seen = longest if window is None else min(counted(window), longest)
        cdef int64_t length
        self.reserve(longest)
        self.queries += longest * self.block_size
        if window is None:
            length = seen = find_prefix(self.places, self.mask, chain.chain, longest, self.found)
        else:
            length = find_window(self.places, self.mask, chain.chain, longest, seen, self.found)
            seen = min(seen, length)
        self.hits += length * self.block_size
        return self.listed(length - seen, length)

    # Requests that have ended

    def retire(self, key: int, block_ids: Sequence[int]) -> None:
        """A request has ended: takes a reference from each block, and keeps those whose content is known.

        They are kept as one request under `key`, the most recently used. A request kept under the same key is
        replaced; so is one that this one covers. With nothing to keep, what was kept stays as it was. ValueError
        if a block has no reference left to take.
        """
        cdef Py_ssize_t count = self.read_blocks(block_ids)
        cdef Py_ssize_t hashed = 0
        cdef Py_ssize_t i
        cdef int32_t row = NONE
        cdef int32_t replaced
        if not PyLong_Check(key):
            raise TypeError(f"a key is an int, not {type(key).__name__}")
        self.drop_references(count)
        for i in range(count):
            hashed += not is_none(&self.blocks[self.scratch[i]].hash)
        if hashed:
            try:
                row = self.new_row(hashed)
                replaced = self.enter(key if PyLong_CheckExact(key) else int(key), row)
            except BaseException:
                self.restore_references(count)
                self.free_row(row)
                raise
            self.keep(row, count)
            if replaced != NONE:
                self.drop(replaced)
            self.cover(row)
        self.settle(self.scratch, count)
        while self.holds > HOLDS_A_BLOCK * <int64_t>self.total:
            self.evict_row(self.oldest)

    def trim(self) -> list[int]:
        """Evicts kept requests, the least recently used first, until the cache is no fuller than it may be.

        That is: the blocks in use are at most `threshold` of all, and the tokens they have room for at most
        `threshold` of `max_entries`. Ends as well when nothing is evictable. Returns the keys of the evicted.
        """
        evicted = []
        while self.is_over() and self.total - self.free - self.referenced > 0:
            evicted.append(<object>self.requests[self.oldest].key)
            self.evict_row(self.oldest)
        return evicted

    def evict(self, key: int) -> bool:
        """Drops one kept request. False, and no change, if none is kept under this key."""
        row = self.rows.get(key)
        if row is None:
            return False
        self.evict_row(row)
        return True

    # Questions

    def statistics(self) -> Statistics:
        """A frozen summary."""
        return Statistics(
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
        """How many references a block has. ValueError if there is no such block."""
        return max(self.blocks[self.block_of(<PyObject *>block)].references, 0)

    def __sizeof__(self) -> int:
        return (
            object.__sizeof__(self)
            + self.total * (sizeof(Block) + sizeof(int32_t))
            + (self.mask + 1) * sizeof(Place)
            + self.scratch_room * (sizeof(int32_t) + sizeof(PyObject *))
            + self.requests_room * sizeof(Request)
            + self.holds * sizeof(int32_t)
        )

    # References. `scratch` holds the ids of the call, as `read_blocks` left them.

    cdef int drop_references(self, Py_ssize_t count) except -1:
        cdef Py_ssize_t i
        cdef Block *block
        for i in range(count):
            block = &self.blocks[self.scratch[i]]
            if block.references <= 0:
                self.restore_references(i)
                raise ValueError(f"block {self.scratch[i]} has no reference left: it was given back before")
            block.references -= 1
            self.referenced -= block.references == 0
        return 0

    cdef void restore_references(self, Py_ssize_t count) noexcept:
        cdef Py_ssize_t i
        for i in range(count):
            self.referenced += self.blocks[self.scratch[i]].references == 0
            self.blocks[self.scratch[i]].references += 1

    cdef void settle(self, int32_t *ids, Py_ssize_t count) noexcept:
        # Makes free those that nobody needs any more, so that the first is the next to be taken.
        cdef Py_ssize_t i
        cdef Block *block
        for i in range(count - 1, -1, -1):
            block = &self.blocks[ids[i]]
            if block.references != 0 or block.kept != 0:
                continue
            if not is_none(&block.hash):
                self.index_remove(ids[i])
                block.hash.low = block.hash.high = 0
            block.references = IN_FREE_LIST
            self.free_list[self.free] = ids[i]
            self.free += 1

    # Kept requests

    cdef int32_t new_row(self, Py_ssize_t count) except NONE:
        # A row with room for `count` blocks and nothing in it.
        cdef int32_t row, room
        cdef Request *request
        if self.free_request == NONE:
            room = 2 * self.requests_room if self.requests_room else ROOM_AT_FIRST
            self.requests = <Request *>grown(self.requests, room * sizeof(Request))
            for row in range(room - 1, self.requests_room - 1, -1):
                self.requests[row].held = NULL
                self.free_row(row)
            self.requests_room = room
        row = self.free_request
        request = &self.requests[row]
        request.held = <int32_t *>grown(NULL, count * sizeof(int32_t))
        request.count = 0
        self.free_request = request.next
        return row

    cdef void free_row(self, int32_t row) noexcept:
        if row == NONE:
            return
        PyMem_Free(self.requests[row].held)
        self.requests[row].held = NULL
        self.requests[row].next = self.free_request
        self.free_request = row

    cdef int32_t enter(self, key, int32_t row) except -2:
        # From now on `key` means `row`; returns the row that it meant before.
        # (Of equal keys, the dict has the first.)
        before = self.rows.get(key)
        self.rows[key] = row
        self.requests[row].key = <PyObject *>key if before is None else self.requests[<int32_t>before].key
        return NONE if before is None else before

    cdef void keep(self, int32_t row, Py_ssize_t count) noexcept:
        # Of the blocks in `scratch`, holds those whose content is known, or the ones that are indexed for it.
        cdef Request *request = &self.requests[row]
        cdef Py_ssize_t i
        cdef int32_t holder
        cdef Block *block
        for i in range(count):
            block = &self.blocks[self.scratch[i]]
            if is_none(&block.hash):
                continue
            holder = self.find(&block.hash)
            if holder == NONE:
                holder = self.scratch[i]
                self.index_add(holder)
            block = &self.blocks[holder]
            self.kept += block.kept == 0
            block.kept += 1
            block.owner = row
            request.held[request.count] = holder
            request.count += 1
        self.holds += request.count
        self.link(row)

    cdef int cover(self, int32_t row) except -1:
        # Drops the requests whose last block this one holds, with as many before it.
        cdef Request *request = &self.requests[row]
        cdef int32_t i, other
        cdef int32_t last = request.count - 1
        for i in range(request.count):
            other = self.blocks[request.held[i]].tip_of
            if other != NONE and (i == last or self.requests[other].count <= i + 1):
                del self.rows[<object>self.requests[other].key]
                self.drop(other)
        self.blocks[request.held[last]].tip_of = row
        return 0

    cdef int evict_row(self, int32_t row) except -1:
        del self.rows[<object>self.requests[row].key]
        self.drop(row)
        self.evicted_requests += 1
        return 0

    cdef void drop(self, int32_t row) noexcept:
        # Its key is not in `rows`, or means another row by now.
        cdef Request *request = &self.requests[row]
        cdef Block *block
        cdef int32_t i
        for i in range(request.count):
            fetch_ahead(&self.blocks[request.held[i]])
        for i in range(request.count):
            block = &self.blocks[request.held[i]]
            fetch_ahead(&self.places[<int64_t>block.hash.low & self.mask])
            block.kept -= 1
            self.kept -= block.kept == 0
            if block.owner == row:
                block.owner = NONE
        block = &self.blocks[request.held[request.count - 1]]
        if block.tip_of == row:
            block.tip_of = NONE
        self.holds -= request.count
        self.unlink(row)
        self.settle(request.held, request.count)
        self.free_row(row)

    cdef bint is_over(self) noexcept:
        cdef int64_t used = self.total - self.free
        if used > self.used_at_most:
            return True
        return self.entries_at_most >= 0.0 and used * self.block_size > self.entries_at_most

    cdef void use(self, int32_t row) noexcept:
        if row != self.newest:
            self.unlink(row)
            self.link(row)

    cdef void link(self, int32_t row) noexcept:
        cdef Request *request = &self.requests[row]
        request.previous = self.newest
        request.next = NONE
        if self.newest == NONE:
            self.oldest = row
        else:
            self.requests[self.newest].next = row
        self.newest = row

    cdef void unlink(self, int32_t row) noexcept:
        cdef Request *request = &self.requests[row]
        if request.previous == NONE:
            self.oldest = request.next
        else:
            self.requests[request.previous].next = request.next
        if request.next == NONE:
            self.newest = request.previous
        else:
            self.requests[request.next].previous = request.previous

    # The index

    cdef int32_t find(self, Hash *hash) noexcept:
        cdef Place *place = place_of(self.places, self.mask, hash)
        return NONE if is_none(&place.hash) else <int32_t>place.block

    cdef void index_add(self, int32_t id) noexcept:
        # Its hash is not there yet.
        cdef Place *place = place_of(self.places, self.mask, &self.blocks[id].hash)
        place.hash = self.blocks[id].hash
        place.number = PyList_GET_ITEM(<PyObject *>self.numbers, id)
        place.block = id

    cdef void index_remove(self, int32_t id) noexcept:
        # No effect when another block is indexed for its hash, or none. What was pushed on by it moves back, so
        # that no search ends at the gap.
        cdef Place *found = place_of(self.places, self.mask, &self.blocks[id].hash)
        cdef int64_t gap, place, home
        if is_none(&found.hash) or found.block != id:
            return
        gap = place = found - self.places
        while True:
            place = (place + 1) & self.mask
            if is_none(&self.places[place].hash):
                break
            home = <int64_t>self.places[place].hash.low & self.mask
            if ((place - home) & self.mask) >= ((place - gap) & self.mask):
                self.places[gap] = self.places[place]
                gap = place
        self.places[gap].hash.low = self.places[gap].hash.high = 0

    # Arguments and answers

    cdef list listed(self, Py_ssize_t gone, Py_ssize_t length):
        # The first `length` of `found` as a list, with −1 for the first `gone`.
        cdef PyObject **found = self.found
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

    cdef BlockHashes own_hashes(self, hashes):
        if not isinstance(hashes, BlockHashes):
            raise TypeError(f"hashes must be BlockHashes, not {type(hashes).__name__}")
        cdef BlockHashes chain = hashes
        if chain.block_size != self.block_size or not is_same(&chain.key, &self.key):
            raise ValueError("these hashes have another key or block size than the pool")
        return chain

    cdef Py_ssize_t read_blocks(self, block_ids) except -1:
        # Leaves in `scratch` the ids that are not NONE; returns how many they are.
        cdef Py_ssize_t count = self.read_range(block_ids, 0, -1)
        cdef Py_ssize_t i
        cdef Py_ssize_t own = 0
        for i in range(count):
            self.scratch[own] = self.scratch[i]
            own += self.scratch[i] != NONE
        return own

    cdef Py_ssize_t read_range(self, block_ids, Py_ssize_t begin, Py_ssize_t end) except -1:
        # Leaves in `scratch` the ids from `begin` on, up to `end` or, if that is −1, all; returns how many.
        if not isinstance(block_ids, (list, tuple)) and PyObject_CheckBuffer(block_ids):
            return self.read_buffer(block_ids, begin, end)
        sequence = PySequence_Fast(block_ids, "block ids must be a sequence of numbers")
        cdef Py_ssize_t length = PySequence_Fast_GET_SIZE(sequence)
        cdef PyObject **items = PySequence_Fast_ITEMS(sequence)
        cdef Py_ssize_t i
        end = end_of(length, end)
        self.reserve(end - begin)
        for i in range(begin, end):
            self.scratch[i - begin] = self.block_or_none(items[i])
        return end - begin

    cdef Py_ssize_t read_buffer(self, block_ids, Py_ssize_t begin, Py_ssize_t end) except -1:
        cdef Py_buffer view
        cdef Py_ssize_t i
        cdef const int32_t *ids
        tokens_open(&view, block_ids)
        try:
            ids = <const int32_t *>view.buf
            end = end_of(view.len // 4, end)
            self.reserve(end - begin)
            for i in range(begin, end):
                if ids[i] < NONE or ids[i] >= self.total:
                    raise ValueError(f"there is no block {ids[i]}: they are 0...{self.total - 1}")
                self.scratch[i - begin] = ids[i]
        finally:
            PyBuffer_Release(&view)
        return end - begin

    cdef int32_t block_or_none(self, PyObject *number) except -2:
        cdef int overflow = 0
        cdef long id
        if not PyLong_Check(<object>number):
            raise TypeError(f"a block id is an int, not {type(<object>number).__name__}")
        id = PyLong_AsLongAndOverflow(<object>number, &overflow)
        if overflow or id < NONE or id >= self.total:
            raise ValueError(f"there is no block {<object>number}: they are 0...{self.total - 1}")
        return <int32_t>id

    cdef int32_t block_of(self, PyObject *number) except -1:
        cdef int32_t id = self.block_or_none(number)
        if id == NONE:
            raise ValueError("-1 stands for no block")
        return id

    cdef int reserve(self, Py_ssize_t count) except -1:
        if count > self.scratch_room:
            self.scratch = <int32_t *>grown(self.scratch, 2 * count * sizeof(int32_t))
            self.found = <PyObject **>grown(self.found, 2 * count * sizeof(PyObject *))
            self.scratch_room = 2 * count
        return 0


# Lookups are apart from the pool, so that the compiler knows that nothing of it changes meanwhile.


cdef inline Place *place_of(Place *places, int64_t mask, Hash *hash) noexcept:
    # Where this hash is, or the empty place where it would be.
    cdef int64_t place = <int64_t>hash.low & mask
    while not is_same(&places[place].hash, hash) and not is_none(&places[place].hash):
        place = (place + 1) & mask
    return &places[place]


cdef Py_ssize_t find_prefix(
    Place *places, int64_t mask, Hash *chain, Py_ssize_t longest, PyObject **found
) noexcept:
    # Leaves the blocks in `found`; returns how many they are.
    cdef Place *place
    cdef Py_ssize_t i
    for i in range(min(longest, AHEAD)):
        fetch_ahead(&places[<int64_t>chain[i].low & mask])
    for i in range(longest):
        if i + AHEAD < longest:
            fetch_ahead(&places[<int64_t>chain[i + AHEAD].low & mask])
        place = place_of(places, mask, &chain[i])
        if is_none(&place.hash):
            return i
        found[i] = place.number
        fetch_ahead(place.number)
    return longest


cdef Py_ssize_t find_window(
    Place *places, int64_t mask, Hash *chain, Py_ssize_t longest, Py_ssize_t window, PyObject **found
) noexcept:
    # From the end, until `window` blocks in a row are there; returns where they end.
    cdef Place *place
    cdef Py_ssize_t length = longest
    cdef Py_ssize_t first = longest
    while first > 0 and length - first < window:
        first -= 1
        place = place_of(places, mask, &chain[first])
        found[first] = place.number
        if is_none(&place.hash):
            length = first
    return length


cdef Py_ssize_t end_of(Py_ssize_t length, Py_ssize_t end) except -1:
    if end > length:
        raise ValueError(f"block {end - 1} of a sequence that has {length}")
    return length if end < 0 else end


cdef int hash_tokens(BlockHashes chain, token_ids, Py_ssize_t blocks) except -1:
    # Of a sequence that has at least that many full blocks.
    cdef Py_buffer view
    cdef Py_ssize_t full
    tokens_open(&view, token_ids)
    try:
        full = view.len // 4 // chain.block_size
        if full < blocks:
            raise ValueError(f"{blocks} blocks are said to be full, but the tokens fill {full}")
        chain.extend_to(<const char *>view.buf, full)
    finally:
        PyBuffer_Release(&view)
    return 0


cdef int tokens_open(Py_buffer *view, numbers) except -1:
    # Of int32 in a row. On success the caller releases it.
    cdef const char *form
    PyObject_GetBuffer(numbers, view, PyBUF_CONTIG_RO | PyBUF_FORMAT)
    form = view.format
    if form != NULL and form[0] in (b"@", b"=", b"<"):
        form += 1
    if form != NULL and form[0] == b"i" and form[1] == 0 and view.itemsize == 4 and view.ndim == 1:
        return 0
    PyBuffer_Release(view)
    raise TypeError("a buffer of numbers must have one dimension, of int32")


cdef bint is_none(Hash *hash) noexcept:
    return hash.low == 0 and hash.high == 0


cdef bint is_same(Hash *one, Hash *other) noexcept:
    return one.low == other.low and one.high == other.high


cdef Hash key_of(hash_key) except *:
    cdef Hash key
    if not isinstance(hash_key, bytes):
        raise TypeError(f"hash_key must be bytes, not {type(hash_key).__name__}")
    if len(hash_key) != sizeof(Hash):
        raise ValueError(f"hash_key must have 16 bytes, not {len(hash_key)}")
    memcpy(&key, PyBytes_AS_STRING(hash_key), sizeof(Hash))
    return key


cdef int32_t block_size_of(block_size) except -1:
    if not 1 <= block_size <= BLOCK_SIZE_AT_MOST:
        raise ValueError(f"block_size must be in 1...{BLOCK_SIZE_AT_MOST}, not {block_size}")
    return block_size


cdef int64_t counted(number) except -1:
    # A count, however large.
    cdef int overflow = 0
    cdef int64_t value = PyLong_AsLongLongAndOverflow(number, &overflow)
    if overflow > 0:
        return INT64_MAX
    if overflow < 0 or value < 0:
        raise ValueError(f"a count must not be negative, not {number}")
    return value


cdef void *grown(void *rows, size_t size) except NULL:
    # On failure the old array is still there, and still the caller's.
    rows = PyMem_Realloc(rows, size)
    if rows == NULL:
        raise MemoryError
    return rows


# SipHash-2-4 with 128 bits of result (Aumasson, Bernstein: SipHash, a fast short-input PRF) ---------


cdef struct Sip:
    uint64_t v0
    uint64_t v1
    uint64_t v2
    uint64_t v3


cdef inline Hash siphash(Hash *key, Hash *parent, const char *message, size_t length) noexcept:
    # Of the 16 bytes of `parent`, if there is one, and then the message.
    cdef Sip sip
    cdef Hash result
    cdef uint64_t word
    cdef size_t all_bytes = length
    sip.v0 = key.low ^ 0x736F6D6570736575ULL
    sip.v1 = key.high ^ 0x646F72616E646F6DULL ^ 0xEE
    sip.v2 = key.low ^ 0x6C7967656E657261ULL
    sip.v3 = key.high ^ 0x7465646279746573ULL
    if parent != NULL:
        all_bytes += sizeof(Hash)
        sip_word(&sip, parent.low)
        sip_word(&sip, parent.high)
    while length >= 8:
        memcpy(&word, message, 8)
        sip_word(&sip, word)
        message += 8
        length -= 8
    word = 0
    memcpy(&word, message, length)
    sip_word(&sip, word | <uint64_t>all_bytes << 56)
    sip.v2 ^= 0xEE
    sip_rounds(&sip, 4)
    result.low = sip.v0 ^ sip.v1 ^ sip.v2 ^ sip.v3
    sip.v1 ^= 0xDD
    sip_rounds(&sip, 4)
    result.high = sip.v0 ^ sip.v1 ^ sip.v2 ^ sip.v3
    return result


cdef inline void sip_word(Sip *sip, uint64_t word) noexcept:
    sip.v3 ^= word
    sip_rounds(sip, 2)
    sip.v0 ^= word


cdef inline void sip_rounds(Sip *sip, int count) noexcept:
    cdef int i
    for i in range(count):
        sip.v0 += sip.v1
        sip.v1 = rotated(sip.v1, 13) ^ sip.v0
        sip.v0 = rotated(sip.v0, 32)
        sip.v2 += sip.v3
        sip.v3 = rotated(sip.v3, 16) ^ sip.v2
        sip.v0 += sip.v3
        sip.v3 = rotated(sip.v3, 21) ^ sip.v0
        sip.v2 += sip.v1
        sip.v1 = rotated(sip.v1, 17) ^ sip.v2
        sip.v2 = rotated(sip.v2, 32)


cdef inline uint64_t rotated(uint64_t word, int bits) noexcept:
    return word << bits | word >> (64 - bits)
