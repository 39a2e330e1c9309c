"""The index from content to block: open addressing with linear probing, at most half full."""

from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t

from blockpool.siphash cimport Hash, is_none, is_same

cdef extern from *:
    """
    #if defined(__GNUC__) || defined(__clang__)
        #define fetch_ahead(address) __builtin_prefetch(address)
    #else
        #define fetch_ahead(address) ((void)(address))
    #endif
    """
    void fetch_ahead(const void *address) noexcept

cdef enum:
    NONE = -1  # no block, no request; ends every list
    AHEAD = 8  # prefetch distance, in blocks

cdef struct Place:
    # It holds all that a lookup needs, so that each block of a prefix costs one cache miss.
    Hash hash           # its low bits select the place; none: an empty place
    PyObject *number    # the block as an int, borrowed from BlockPool.numbers
    int64_t block

cdef struct Index:
    Place *places
    int64_t mask  # their number - 1

cdef inline Place *index_place(Index index, Hash *hash) noexcept:
    # Return the place of this hash, or the empty place where it would go.
    cdef int64_t place = <int64_t>hash.low & index.mask
    while not is_same(&index.places[place].hash, hash) and not is_none(&index.places[place].hash):
        place = (place + 1) & index.mask
    return &index.places[place]

cdef inline int32_t index_find(Index index, Hash *hash) noexcept:
    cdef Place *place = index_place(index, hash)
    return NONE if is_none(&place.hash) else <int32_t>place.block

cdef inline void index_add(Index index, Hash *hash, int32_t block, PyObject *number) noexcept:
    # The hash must not be indexed yet.
    cdef Place *place = index_place(index, hash)
    place.hash = hash[0]
    place.number = number
    place.block = block

cdef inline void index_remove(Index index, Hash *hash, int32_t block) noexcept:
    # Do nothing if the index has another block, or none, for this hash. Entries after it move back toward
    # their home place, so that no later search ends at the gap.
    cdef Place *places = index.places
    cdef Place *found = index_place(index, hash)
    cdef int64_t gap, place, home
    if is_none(&found.hash) or found.block != block:
        return
    gap = place = found - places
    while True:
        place = (place + 1) & index.mask
        if is_none(&places[place].hash):
            break
        home = <int64_t>places[place].hash.low & index.mask
        if ((place - home) & index.mask) >= ((place - gap) & index.mask):
            places[gap] = places[place]
            gap = place
    places[gap].hash.low = places[gap].hash.high = 0

cdef inline Py_ssize_t index_prefix(Index index, Hash *chain, Py_ssize_t longest, PyObject **found) noexcept:
    # Write the blocks of the longest indexed prefix of `chain` to `found`; return their number.
    cdef Place *place
    cdef Py_ssize_t i
    for i in range(min(longest, AHEAD)):
        fetch_ahead(&index.places[<int64_t>chain[i].low & index.mask])
    for i in range(longest):
        if i + AHEAD < longest:
            fetch_ahead(&index.places[<int64_t>chain[i + AHEAD].low & index.mask])
        place = index_place(index, &chain[i])
        if is_none(&place.hash):
            return i
        found[i] = place.number
        fetch_ahead(place.number)
    return longest

cdef inline Py_ssize_t index_window(
    Index index, Hash *chain, Py_ssize_t longest, Py_ssize_t window, PyObject **found
) noexcept:
    # Search from the end until `window` consecutive blocks are found; return the index after the last.
    cdef Place *place
    cdef Py_ssize_t length = longest
    cdef Py_ssize_t first = longest
    while first > 0 and length - first < window:
        first -= 1
        place = index_place(index, &chain[first])
        found[first] = place.number
        if is_none(&place.hash):
            length = first
    return length
