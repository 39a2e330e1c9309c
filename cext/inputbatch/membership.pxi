# Adding and removing sequences, and their rows.

cdef int add_all(InputBatch batch, slots, new_states, new_block_ids) except -1:
    cdef int32_t rows_end = batch.rows_end
    cdef int32_t done = 0, i, count
    cdef tuple states, block_ids
    fetch_content(slots)
    fetch_content(new_block_ids)
    fetch_content(new_states)
    fetch_items(new_block_ids, 1)
    fetch_items(new_states, STATE_LINES)
    states, block_ids = tuple(new_states), tuple(new_block_ids)
    count = read_ids(slots, batch.scratch, batch.slots, INT32_MIN, INT32_MAX, "slots")
    if PyTuple_GET_SIZE(states) != count or PyTuple_GET_SIZE(block_ids) != count:
        raise ValueError(f"there must be a state and block ids for each of the {count} slots")
    try:
        while done < count:
            if done % AHEAD == 0:
                fetch_belongings(batch, states, block_ids, done, min(count, done + AHEAD))
            add_state(
                batch,
                batch.scratch[done],
                <SequenceState?>PyTuple_GET_ITEM(states, done),
                <tuple?>PyTuple_GET_ITEM(block_ids, done),
            )
            done += 1
    finally:
        if done < count:
            for i in range(done):
                leave(batch, stay_of(batch, batch.scratch[i]) - batch.stays)
            give_back_rows(batch, rows_end)
    return 0


cdef void fetch_belongings(InputBatch batch, tuple states, tuple block_ids, int32_t first, int32_t end) noexcept:
    # The objects that newcomers refer to are in no cache yet. Prefetch all lists of block ids, then, while
    # those arrive, tokens, and last the contents of the lists.
    cdef object state
    cdef int32_t i, slot
    for i in range(first, end):
        fetch_first(<object>PyTuple_GET_ITEM(block_ids, i))
    for i in range(first, end):
        slot = batch.scratch[i]
        state = <object>PyTuple_GET_ITEM(states, i)
        if 0 <= slot < batch.slots:
            prefetch(&batch.stays[slot])
            prefetch(batch.tables[0] + <int64_t>slot * batch.table_columns)
        if type(state) is SequenceState:
            prefetch((<SequenceState>state).ids + (<SequenceState>state).computed_outside)
            prefetch((<SequenceState>state).ids + (<SequenceState>state).length)
    for i in range(first, end):
        fetch_first_content(<object>PyTuple_GET_ITEM(block_ids, i))


cdef inline void fetch_first(lists) noexcept:
    if type(lists) is tuple and PyTuple_GET_SIZE(lists) > 0:
        prefetch(PyTuple_GET_ITEM(lists, 0))


cdef inline void fetch_first_content(lists) noexcept:
    if type(lists) is tuple and PyTuple_GET_SIZE(lists) > 0:
        fetch_content(<object>PyTuple_GET_ITEM(lists, 0))


cdef void write_counts(InputBatch batch) noexcept:
    cdef Columns *columns = &batch.columns
    cdef Riders *riders = &batch.riders
    cdef int32_t row, slot, computed, tokens, length
    cdef Stay *stay
    for row in range(batch.rows_end):
        slot = batch.rows[row]
        if slot == NONE:
            continue
        if has_bit(riders.riding, row):
            computed = riders.origin[row] + riders.prepared
            length = riders.origin[row] + riders.committed + 1
            tokens = computed + 1
        else:
            stay = &batch.stays[slot]
            computed, length, tokens = stay.computed, stay.length, stay.length + stay.pending
        columns.num_computed_tokens[slot] = computed
        columns.num_tokens[slot] = tokens
        columns.output_tokens[slot] = length - columns.num_prompt_tokens[slot]


cdef void give_back_rows(InputBatch batch, int32_t rows_end) noexcept:
    while batch.rows_end > rows_end:
        batch.rows_end -= 1
        clear_bit(batch.holes, batch.rows_end)
        batch.hole_count -= 1
    if batch.hole_count == 0:
        batch.hole_hint = 0


cdef int32_t add_state(InputBatch batch, int64_t slot, SequenceState state, tuple block_ids) except -1:
    check_slot(batch, slot)
    if batch.stays[slot].serial != 0:
        raise ValueError(f"slot {slot} is occupied")
    check_groups(batch, block_ids)
    cdef int32_t counts[GROUPS_AT_MOST]
    cdef int32_t group
    for group in range(batch.groups):
        ids = <object>PyTuple_GET_ITEM(block_ids, group)
        counts[group] = read_blocks(batch, slot, group, 0, state.committed_outside, ids)
    if batch.stays[slot].serial != 0:
        raise ValueError(f"slot {slot} is occupied")  # by code that a buffer's exporter ran
    if state.stay != NULL:
        raise ValueError("the sequence is in a batch already")
    for group in range(batch.groups):
        if <int64_t>counts[group] * batch.block_size < state.computed_outside:
            raise ValueError(f"{counts[group]} blocks do not hold {state.computed_outside} computed tokens")
    if state.length >= batch.max_model_len:
        raise ValueError(f"{state.length} tokens leave no room for one more below {batch.max_model_len}")
    if state.computed_outside >= state.length:
        raise ValueError("no token of the sequence is left to compute: rewind it first")
    if state.length - state.prompt_length >= state.max_tokens:
        raise ValueError(f"the sequence has its {state.max_tokens} tokens of output")
    if state.largest >= batch.vocab_size:
        raise ValueError(f"token id {state.largest} is outside 0...{batch.vocab_size - 1}")
    batch.slots_end = max(batch.slots_end, <int32_t>slot + 1)
    return enter(batch, slot, state, counts)


cdef int32_t enter(InputBatch batch, int64_t slot, SequenceState state, int32_t *counts) noexcept:
    cdef Stay *stay = &batch.stays[slot]
    cdef Columns *columns = &batch.columns
    cdef int64_t place
    cdef int32_t group, fewest = INT32_MAX, bit
    cdef uint8_t needs
    batch.serials += 1
    stay.tokens = state.ids
    stay.serial = batch.serials
    stay.last_scheduled = batch.steps  # as if in the latest step, so that newcomers do not overtake
    stay.length = state.length
    stay.computed = state.computed_outside
    stay.committed = state.committed_outside
    stay.limit = min(<int64_t>state.prompt_length + state.max_tokens, <int64_t>batch.max_model_len)
    stay.min_end = min(<int64_t>state.prompt_length + state.min_tokens, <int64_t>INT32_MAX)
    stay.sample = 0
    stay.capacity = state.capacity
    stay.pending = 0
    stay.over = False
    stay.ignore_eos = state.ignore_eos
    stay.stops = state.stop_count > 0
    for group in range(batch.groups):
        place = <int64_t>group * batch.slots + slot
        batch.held[place].count = counts[group]
        batch.held[place].slid = 0
        batch.held[place].unseen = 0
        set_bit(batch.staged + group * batch.bit_words, slot)
        fewest = min(fewest, counts[group])
    stay.room = fewest * batch.block_size
    columns.num_scheduled[slot] = 0
    columns.num_prompt_tokens[slot] = state.prompt_length
    columns.max_tokens[slot] = state.max_tokens
    columns.min_tokens[slot] = state.min_tokens
    columns.top_k[slot] = state.top_k
    columns.logprobs[slot] = state.logprobs
    columns.temperature[slot] = state.temperature
    columns.top_p[slot] = state.top_p
    columns.min_p[slot] = state.min_p
    columns.presence_penalty[slot] = state.presence_penalty
    columns.frequency_penalty[slot] = state.frequency_penalty
    columns.repetition_penalty[slot] = state.repetition_penalty
    columns.seed[slot] = state.seed
    columns.keys[slot] = state.key
    needs = needs_of(state, batch.vocab_size)
    columns.needs[slot] = needs
    for bit in range(NEEDS):
        batch.need_counts[bit] += (needs >> bit) & 1
    stay.row = take_row(batch)
    batch.rows[stay.row] = slot
    batch.riders.late[stay.row] = batch.riders.closer[stay.row] = INT32_MAX
    batch.riders.changes += 1
    state.stay = stay
    state.riders = &batch.riders
    state.slot_outside = slot
    Py_INCREF(state)
    batch.states[slot] = <PyObject *>state
    batch.occupied[slot] = 1
    batch.num_reqs += 1
    return stay.row


cdef int32_t take_row(InputBatch batch) noexcept:
    cdef int32_t word, row
    if batch.hole_count == 0:
        row = batch.rows_end
        batch.rows_end += 1
        return row
    row = lowest_hole(batch)
    clear_bit(batch.holes, row)
    batch.hole_count -= 1
    return row


cdef int32_t lowest_hole(InputBatch batch) noexcept:
    cdef int32_t word = batch.hole_hint
    while batch.holes[word] == 0:
        word += 1
    batch.hole_hint = word
    return 64 * word + lowest_bit(batch.holes[word])


cdef int32_t read_slots(InputBatch batch, slots) except -1:
    # Read slots into the scratch: all must be occupied, and none named twice.
    cdef int32_t count = read_ids(slots, batch.scratch, batch.slots, INT32_MIN, INT32_MAX, "slots")
    cdef int32_t i, marked = 0
    cdef int32_t slot
    try:
        for i in range(count):
            slot = batch.scratch[i]
            check_slot(batch, slot)
            if not batch.occupied[slot]:
                raise ValueError(f"slot {slot} is empty")
            if batch.named[slot]:
                raise ValueError(f"slot {slot} is named twice")
            batch.named[slot] = True
            marked += 1
    finally:
        for i in range(marked):
            batch.named[batch.scratch[i]] = False
    return count


cdef void leave(InputBatch batch, int64_t slot) noexcept:
    cdef int32_t row = batch.stays[slot].row
    cdef uint8_t needs = batch.columns.needs[slot]
    cdef int32_t bit
    alight(&batch.riders, &batch.stays[slot])
    strike_out(batch, batch.oldest, slot)
    strike_out(batch, batch.newest, slot)
    for bit in range(NEEDS):
        batch.need_counts[bit] -= (needs >> bit) & 1
    batch.rows[row] = NONE
    set_bit(batch.holes, row)
    batch.hole_count += 1
    batch.hole_hint = min(batch.hole_hint, row >> 6)
    batch.num_reqs -= 1
    let_go(batch, slot)


cdef void strike_out(InputBatch batch, Step step, int32_t slot) noexcept:
    cdef int32_t *slots
    cdef int32_t row
    if step is not None:
        slots = batch.records[step.record].slots
        for row in range(step.rows):
            if slots[row] == slot:
                slots[row] = NONE
                break


cdef void let_go(InputBatch batch, int64_t slot) noexcept:
    cdef Stay *stay = &batch.stays[slot]
    cdef SequenceState state = <SequenceState>batch.states[slot]
    alight(&batch.riders, stay)
    batch.columns.num_scheduled[slot] = 0
    batch.occupied[slot] = 0
    state.length = stay.length
    state.computed_outside = state.committed_outside = stay.committed
    state.stay = NULL
    stay.serial = 0
    batch.states[slot] = NULL
    Py_DECREF(state)


cdef int compact(InputBatch batch, list moves) except -1:
    # Unless `moves` is None, each move is recorded before it is done.
    cdef int32_t source, target
    while batch.hole_count > 0:
        source = drop_last_holes(batch)
        if batch.hole_count > 0:
            target = lowest_hole(batch)
            if moves is not None:
                moves.append((source, target))
            move_row(batch, source, target)
    return 0


cdef int32_t drop_last_holes(InputBatch batch) noexcept:
    # Drop the holes at the end; return the last row.
    while batch.rows_end > 0 and batch.rows[batch.rows_end - 1] == NONE:
        batch.rows_end -= 1
        clear_bit(batch.holes, batch.rows_end)
        batch.hole_count -= 1
    if batch.hole_count == 0:
        batch.hole_hint = 0
    return batch.rows_end - 1


cdef void move_row(InputBatch batch, int32_t source, int32_t target) noexcept:
    cdef int32_t slot = batch.rows[source]
    cdef Riders *riders = &batch.riders
    cdef int32_t group
    batch.rows[target] = slot
    batch.stays[slot].row = target
    if has_bit(riders.riding, source):
        write_tokens(riders, source)
        write_places(riders)
        riders.origin[target] = riders.origin[source]
        riders.room[target] = riders.room[source]
        riders.late[target] = riders.late[source]
        riders.closer[target] = riders.closer[source]
        riders.next_id[target] = riders.next_id[source]
        latest_tokens(riders)[target] = latest_tokens(riders)[source]
        riders.keys[target] = riders.keys[source]
        riders.ends[target] = riders.ends[source]
        for group in range(batch.groups):
            riders.lift[group][target] = riders.lift[group][source]
        get_off(riders, source)
        get_on(riders, target)
    clear_bit(batch.holes, target)
    batch.hole_count -= 1
    batch.rows_end -= 1


cdef int check_slot(InputBatch batch, int64_t slot) except -1:
    if not 0 <= slot < batch.slots:
        raise ValueError(f"slot {slot} is outside 0...{batch.slots - 1}")
    return 0


cdef Stay *stay_of(InputBatch batch, int64_t slot) except NULL:
    check_slot(batch, slot)
    if batch.stays[slot].serial == 0:
        raise ValueError(f"slot {slot} is empty")
    bring_up_to_date(&batch.riders, &batch.stays[slot])
    return &batch.stays[slot]


cdef int remove_all(InputBatch batch, slots) except -1:
    cdef int32_t count = read_slots(batch, slots)
    cdef int32_t i
    cdef int32_t *leaving = batch.scratch
    for i in range(count):
        prefetch(batch.states[leaving[i]])
    for i in range(count):
        leave(batch, leaving[i])
    return 0
