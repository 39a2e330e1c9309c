# The index from content to block. Lookups do not take the pool as an argument, so that the compiler knows
# that its fields do not change meanwhile.

cdef int32_t find_block(BlockPool pool, Hash *hash) noexcept:
    cdef Place *place = place_of(pool.places, pool.mask, hash)
    return NONE if is_none(&place.hash) else <int32_t>place.block


cdef void index_add(BlockPool pool, int32_t id) noexcept:
    # The hash of the block must not be indexed yet.
    cdef Place *place = place_of(pool.places, pool.mask, &pool.blocks[id].hash)
    place.hash = pool.blocks[id].hash
    place.number = PyList_GET_ITEM(<PyObject *>pool.numbers, id)
    place.block = id


cdef void index_remove(BlockPool pool, int32_t id) noexcept:
    # Do nothing if the index has another block, or none, for this hash. Entries after it move back toward
    # their home place, so that no later search ends at the gap.
    cdef Place *found = place_of(pool.places, pool.mask, &pool.blocks[id].hash)
    cdef int64_t gap, place, home
    if is_none(&found.hash) or found.block != id:
        return
    gap = place = found - pool.places
    while True:
        place = (place + 1) & pool.mask
        if is_none(&pool.places[place].hash):
            break
        home = <int64_t>pool.places[place].hash.low & pool.mask
        if ((place - home) & pool.mask) >= ((place - gap) & pool.mask):
            pool.places[gap] = pool.places[place]
            gap = place
    pool.places[gap].hash.low = pool.places[gap].hash.high = 0


cdef inline Place *place_of(Place *places, int64_t mask, Hash *hash) noexcept:
    # Return the place of this hash, or the empty place where it would go.
    cdef int64_t place = <int64_t>hash.low & mask
    while not is_same(&places[place].hash, hash) and not is_none(&places[place].hash):
        place = (place + 1) & mask
    return &places[place]


cdef Py_ssize_t find_prefix(
    Place *places, int64_t mask, Hash *chain, Py_ssize_t longest, PyObject **found
) noexcept:
    # Write the blocks to `found`; return their number.
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
    # Search from the end until `window` consecutive blocks are found; return the index after the last.
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
