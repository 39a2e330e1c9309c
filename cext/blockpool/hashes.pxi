# The chain of hashes that identifies the content of blocks.

@cython.final
@cython.no_gc  # it refers to no objects
cdef class BlockHashes:
    """The hash chain of one sequence's full blocks, which all its KV cache groups share.

    Each hash is SipHash-2-4-128 of the previous hash and the block's token ids, 4 bytes each. `hash_key`, 16
    bytes, must be random, so that a client cannot construct tokens that collide. The first hash follows the
    hash of `salt`: sequences with different salts share no blocks.
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
        # Padded without ambiguity, so that different salts stay different.
        padded = salt + b"\x80" + bytes((4 - len(salt) % 4) % 4)
        self.root = siphash(&self.key, NULL, PyBytes_AS_STRING(padded), PyBytes_GET_SIZE(padded))

    def __dealloc__(self):
        PyMem_Free(self.chain)

    def extend(self, token_ids: Buffer) -> int:
        """Hash every full block of the sequence that is not hashed yet; return the number of full blocks.

        `token_ids`: int32, contiguous, all tokens of the sequence from its start. Tokens that are hashed
        already are not read again; ValueError if there are fewer than that.
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
        """Return the hash of block `index`, 16 bytes."""
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
                hash.low = 1  # 0 stands for none
            self.chain[self.count] = hash
            self.count += 1
        return 0

    cdef int reserve(self, Py_ssize_t blocks) except -1:
        cdef Py_ssize_t room = max(blocks, 2 * self.room)
        self.chain = <Hash *>grown(self.chain, room * sizeof(Hash))
        self.room = room
        return 0


cdef int hash_tokens(BlockHashes chain, token_ids, Py_ssize_t blocks) except -1:
    # Extend the chain over all full blocks of `token_ids`, at least `blocks`.
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
