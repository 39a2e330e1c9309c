# Memory layout: one region for all that every step touches, tables with long rows, and arenas.

cdef int begin_memory(InputBatch batch) except -1:
    batch.memory = [zeroed_at_once(lay_out(batch, NULL))]
    lay_out(batch, <char *>address_of(batch.memory[0]))
    batch.riders.soonest = batch.riders.closest = INT32_MAX
    return 0


cdef int64_t lay_out(InputBatch batch, char *start) noexcept:
    # Assign addresses from `start` on and return the size; with NULL, only the size is meaningful. The region
    # begins at a page, so each `Stay` has its own cache line.
    cdef int64_t slots = batch.slots
    cdef int64_t by_group = batch.groups * slots
    cdef int64_t words = batch.bit_words
    cdef int64_t end = 0
    cdef int32_t group, record
    batch.stays = <Stay *>place(start, &end, slots * <int64_t>sizeof(Stay))
    batch.states = <PyObject **>place(start, &end, slots * <int64_t>sizeof(void *))
    batch.occupied = <int32_t *>place(start, &end, 4 * slots)
    batch.rows = <int32_t *>place(start, &end, 4 * slots)
    batch.holes = <uint64_t *>place(start, &end, 8 * words)
    batch.staged = <uint64_t *>place(start, &end, 8 * words * batch.groups)
    batch.held = <Held *>place(start, &end, by_group * <int64_t>sizeof(Held))
    batch.turns = <Turn *>place(start, &end, slots * <int64_t>sizeof(Turn))
    batch.admissions = <int64_t *>place(start, &end, 8 * slots)
    batch.scratch = <int32_t *>place(start, &end, 4 * (by_group + slots))
    batch.named = <uint8_t *>place(start, &end, slots)
    batch.unlike = <uint64_t *>place(start, &end, 8 * words)
    batch.due = <uint64_t *>place(start, &end, 8 * words)
    batch.marks = <uint8_t *>place(start, &end, slots + MARKS_MORE)
    batch.odd = <int32_t *>place(start, &end, 4 * slots + CACHE_LINE)  # `list_bits` writes beyond the last
    batch.found = <int32_t *>place(start, &end, 4 * slots + CACHE_LINE)
    batch.filled = <int32_t *>place(start, &end, 4 * slots)
    batch.boarders = <int32_t *>place(start, &end, 4 * slots)
    batch.endings = <Ending *>place(start, &end, slots * <int64_t>sizeof(Ending))
    for record in range(STEPS_AT_ONCE):
        batch.records[record].slots = <int32_t *>place(start, &end, 4 * slots)
        batch.records[record].counts = <int32_t *>place(start, &end, 4 * slots)
        batch.records[record].runs = <Run *>place(start, &end, slots * <int64_t>sizeof(Run))
    end = lay_out_riders(batch, start, end)
    end = lay_out_columns(batch, start, end)
    # Table rows shorter than a page share pages with others anyway; longer rows have pages of their own.
    if 4 * batch.table_columns < SMALL_PAGE:
        for group in range(batch.groups):
            batch.tables[group] = <int32_t *>place(start, &end, 4 * slots * batch.table_columns)
    return end


cdef int64_t lay_out_riders(InputBatch batch, char *start, int64_t end) noexcept:
    cdef Riders *riders = &batch.riders
    cdef int64_t slots = batch.slots
    cdef int32_t group
    riders.words = batch.bit_words
    riders.phase_count = largest_divisor(batch.block_size, PHASES_AT_MOST)
    riders.riding = <uint64_t *>place(start, &end, 8 * riders.words)
    riders.phases = <uint64_t *>place(start, &end, 8 * riders.words * <int64_t>riders.phase_count)
    riders.origin = <int32_t *>place(start, &end, 4 * slots)
    riders.room = <int32_t *>place(start, &end, 256 * <int64_t>riders.words)
    riders.late = <int32_t *>place(start, &end, 4 * slots)
    riders.closer = <int32_t *>place(start, &end, 4 * slots)
    riders.next_id = <int32_t *>place(start, &end, 4 * slots)
    for group in range(batch.groups):
        riders.lift[group] = <int32_t *>place(start, &end, 4 * slots)
    riders.keys = <int64_t *>place(start, &end, 8 * slots)
    riders.ends = <int32_t **>place(start, &end, slots * <int64_t>sizeof(void *))
    # One cache line more than a round takes: otherwise a row's tokens would evict each other from the cache.
    riders.ring_width = 64 * riders.words + CACHE_LINE // 4
    riders.ring = <int32_t *>place(start, &end, 4 * RING * <int64_t>riders.ring_width)
    riders.since = <int32_t *>place(start, &end, 4 * slots)
    riders.fresh = <uint64_t *>place(start, &end, 8 * riders.words)
    return end


cdef int64_t lay_out_columns(InputBatch batch, char *start, int64_t end) noexcept:
    cdef Columns *columns = &batch.columns
    cdef int64_t slots = batch.slots
    columns.num_scheduled = <int32_t *>place(start, &end, 4 * slots)
    columns.num_tokens = <int32_t *>place(start, &end, 4 * slots)
    columns.num_computed_tokens = <int32_t *>place(start, &end, 4 * slots)
    columns.output_tokens = <int32_t *>place(start, &end, 4 * slots)
    columns.num_prompt_tokens = <int32_t *>place(start, &end, 4 * slots)
    columns.max_tokens = <int32_t *>place(start, &end, 4 * slots)
    columns.min_tokens = <int32_t *>place(start, &end, 4 * slots)
    columns.top_k = <int32_t *>place(start, &end, 4 * slots)
    columns.logprobs = <int32_t *>place(start, &end, 4 * slots)
    columns.temperature = <float *>place(start, &end, 4 * slots)
    columns.top_p = <float *>place(start, &end, 4 * slots)
    columns.min_p = <float *>place(start, &end, 4 * slots)
    columns.presence_penalty = <float *>place(start, &end, 4 * slots)
    columns.frequency_penalty = <float *>place(start, &end, 4 * slots)
    columns.repetition_penalty = <float *>place(start, &end, 4 * slots)
    columns.seed = <uint64_t *>place(start, &end, 8 * slots)
    columns.keys = <int64_t *>place(start, &end, 8 * slots)
    columns.needs = <uint8_t *>place(start, &end, slots)
    return end


cdef inline void *place(char *start, int64_t *end, int64_t size) noexcept:
    cdef uint64_t here = <uint64_t>start + <uint64_t>end[0]
    end[0] = aligned(end[0] + size)
    return <void *>here


cdef int32_t largest_divisor(int32_t number, int32_t most) noexcept:
    cdef int32_t divisor = min(number, most)
    while number % divisor:
        divisor -= 1
    return divisor


cdef int begin_views(InputBatch batch) except -1:
    cdef Columns *columns = &batch.columns
    cdef int32_t group
    batch.num_scheduled = column(batch, columns.num_scheduled, "i")
    batch.num_tokens_view = column(batch, columns.num_tokens, "i")
    batch.num_computed_tokens_view = column(batch, columns.num_computed_tokens, "i")
    batch.output_tokens_view = column(batch, columns.output_tokens, "i")
    batch.num_prompt_tokens = column(batch, columns.num_prompt_tokens, "i")
    batch.max_tokens = column(batch, columns.max_tokens, "i")
    batch.min_tokens = column(batch, columns.min_tokens, "i")
    batch.top_k = column(batch, columns.top_k, "i")
    batch.logprobs = column(batch, columns.logprobs, "i")
    batch.temperature = column(batch, columns.temperature, "f")
    batch.top_p = column(batch, columns.top_p, "f")
    batch.min_p = column(batch, columns.min_p, "f")
    batch.presence_penalty = column(batch, columns.presence_penalty, "f")
    batch.frequency_penalty = column(batch, columns.frequency_penalty, "f")
    batch.repetition_penalty = column(batch, columns.repetition_penalty, "f")
    batch.seed = column(batch, columns.seed, "Q")
    views = []
    for group in range(batch.groups):
        if batch.tables[group] == NULL:
            table = zeroed(4 * <int64_t>batch.slots * batch.table_columns)
            batch.memory.append(table)
            batch.tables[group] = <int32_t *>address_of(table)
        else:
            table = part(batch, batch.tables[group], 4 * <int64_t>batch.slots * batch.table_columns)
        views.append(table.cast("i", (batch.slots, batch.table_columns)))
    batch.table_views = tuple(views)
    return 0


cdef object column(InputBatch batch, void *address, str kind):
    return part(batch, address, batch.slots * <int64_t>array(kind).itemsize).cast(kind)


cdef object part(InputBatch batch, void *address, int64_t size):
    # Return a view of a part of the region.
    region = batch.memory[0]
    cdef int64_t start = <char *>address - <char *>address_of(region)
    return region[start : start + size]


cdef int begin_arenas(InputBatch batch, arenas, int64_t size) except -1:
    if isinstance(arenas, int):
        check_range("arenas", arenas, 1, 64)
        arenas = [zeroed(size) for _ in range(arenas)]
    batch.arenas = []
    for arena in arenas:
        view = memoryview(arena)
        if view.readonly or not view.c_contiguous:
            raise ValueError("an arena must be writable and contiguous")
        if view.nbytes < size:
            raise ValueError(f"an arena must have at least {size} bytes, not {view.nbytes}")
        view = view.cast("B")[:size].cast("i")
        if <uint64_t>address_of(view) % sizeof(int32_t):
            raise ValueError("an arena must be aligned to 4 bytes")
        if len(batch.arenas) == 64:
            raise ValueError("there may be 64 arenas at most")
        batch.arena_words[len(batch.arenas)] = <int32_t *>address_of(view)
        batch.arenas.append(view)
    if not batch.arenas:
        raise ValueError("there must be an arena")
    batch.arena_last = len(batch.arenas) - 1
    batch.steps_at_once = min(STEPS_AT_ONCE, <int32_t>len(batch.arenas))
    return 0
