"""The chain of hashes that identifies the content of a sequence's blocks."""

from cpython.buffer cimport PyBuffer_Release
from libc.stdint cimport int32_t

from blockpool.conversion cimport tokens_open
from blockpool.pool cimport grown
from blockpool.siphash cimport Hash, is_none, siphash

cdef struct Chain:
    Hash key
    Hash root
    Hash *hashes
    Py_ssize_t count
    Py_ssize_t room
    int32_t block_size

cdef inline int chain_hash(Chain *chain, const char *tokens, Py_ssize_t blocks) except -1:
    cdef size_t bytes_a_block = chain.block_size * 4
    cdef Hash *parent
    cdef Hash hash
    cdef Py_ssize_t room = max(blocks, 2 * chain.room)
    if blocks > chain.room:
        chain.hashes = <Hash *>grown(chain.hashes, room * sizeof(Hash))
        chain.room = room
    while chain.count < blocks:
        parent = &chain.hashes[chain.count - 1] if chain.count else &chain.root
        hash = siphash(&chain.key, parent, tokens + chain.count * bytes_a_block, bytes_a_block)
        if is_none(&hash):
            hash.low = 1  # 0 stands for none
        chain.hashes[chain.count] = hash
        chain.count += 1
    return 0

cdef inline int chain_extend(Chain *chain, token_ids, Py_ssize_t least) except -1:
    # Hash all full blocks of `token_ids` that are not hashed yet. ValueError if fewer than `least` are full.
    cdef Py_buffer view
    cdef Py_ssize_t full
    tokens_open(&view, token_ids)
    try:
        full = view.len // 4 // chain.block_size
        if full < least:
            raise ValueError(f"{least} blocks were given as full, but the tokens fill {full}")
        if full < chain.count:
            raise ValueError(f"tokens of {full} full blocks, but {chain.count} were hashed before")
        chain_hash(chain, <const char *>view.buf, full)
    finally:
        PyBuffer_Release(&view)
    return 0
