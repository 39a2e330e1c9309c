# Preparing a step: its inputs are written into an arena.

cdef Step prepare_step(InputBatch batch, int32_t *num_scheduled):
    cdef Step step
    cdef int32_t odd_count
    if batch.newest is not None or (batch.oldest is not None and batch.steps_at_once == 1):
        raise RuntimeError(f"{batch.steps_at_once} steps are under way already")
    if batch.riders.prepared >= ROUNDS_AT_MOST:
        all_alight(batch)
    fetch_quarter(&batch.riders, 0)
    odd_count = list_odd(batch, num_scheduled)
    step = checked_step(batch, num_scheduled, odd_count)
    if step is None:
        return None
    if batch.hole_count > 0:
        compact(batch, None)
        odd_count = list_odd(batch, num_scheduled)
    batch.steps += 1
    step.number = batch.riders.latest = batch.steps
    if batch.last_chosen != 0:
        batch.last_served = batch.last_chosen
    choose_places(batch, step)
    write_step(batch, step, num_scheduled, odd_count)
    batch.riders.prepared += 1
    if batch.oldest is None:
        batch.oldest = step
    else:
        batch.newest = step
    return step


cdef Step checked_step(InputBatch batch, int32_t *num_scheduled, int32_t odd_count):
    # Check the step, and count it so that its sections can be placed. Make room for its samples, and prefetch
    # what will be read. After this no odd row is a steady decode.
    cdef Step step
    cdef int32_t *table = batch.tables[0]
    cdef int32_t rows = batch.rows_end - odd_count, decodes = rows, samples = rows
    cdef int64_t tokens = rows
    cdef int32_t i, slot, count, length, computed
    cdef Stay *stay
    for i in range(odd_count):
        slot = batch.rows[batch.odd[i]]
        if slot == NONE:
            continue
        stay = &batch.stays[slot]
        alight(&batch.riders, stay)
        count = num_scheduled[slot]
        if count == 0:
            continue
        computed = stay.computed
        length = stay.length + stay.pending
        prefetch(stay.tokens + computed)
        if count > 1:
            prefetch(stay.tokens + computed + CACHE_LINE // 4 - 1)
        prefetch(table + <int64_t>slot * batch.table_columns + block_of(batch, computed))
        if (
            count < 0 or count > length - computed or computed + count > stay.room
            or stay.over or length >= stay.limit
        ):
            refuse(batch, slot, count)
        rows += 1
        tokens += count
        if computed + count == length:
            samples += 1
            decodes += count == 1
            if length >= stay.capacity:
                (<SequenceState>batch.states[slot]).grow()
    if tokens > batch.max_batched_tokens:
        raise ValueError(f"{tokens} tokens are more than a step's {batch.max_batched_tokens}")
    if rows == 0:
        return None
    step = <Step>Step.__new__(Step)
    step.groups = batch.groups
    step.tokens, step.rows, step.decodes, step.samples = tokens, rows, decodes, samples
    return step


cdef int refuse(InputBatch batch, int32_t slot, int32_t count) except -1:
    cdef Stay *stay = &batch.stays[slot]
    left = stay.length + stay.pending - stay.computed
    if not 0 <= count <= left:
        raise ValueError(f"slot {slot} has {left} tokens to compute, not {count}")
    if not takes_part(stay):
        raise ValueError(f"slot {slot} has ended, or will with the steps under way")
    raise ValueError(f"the blocks of slot {slot} hold {stay.room} tokens, not {stay.computed + count}")


cdef void choose_places(InputBatch batch, Step step) noexcept:
    # Use arenas in turn, but never that of a step under way.
    cdef Step other = batch.oldest
    cdef int32_t arenas = PyList_GET_SIZE(batch.arenas)
    batch.arena_last = (batch.arena_last + 1) % arenas
    step.record = 0
    if other is not None:
        if other.arena_index == batch.arena_last:
            batch.arena_last = (batch.arena_last + 1) % arenas
        step.record = 1 - other.record
    step.arena_index = batch.arena_last
    step.words = <object>PyList_GET_ITEM(batch.arenas, batch.arena_last)
    cdef int32_t sizes[SECTIONS]
    sizes[:] = [
        step.tokens, step.tokens, step.tokens * batch.groups, step.rows + 1, step.rows, step.rows,
        step.samples, 0 if step.samples == step.rows else step.samples, 0,
    ]
    cdef int32_t start = HEADER
    cdef int32_t section
    for section in range(SECTIONS):
        step.starts[section] = start
        start += sizes[section]
    if step.samples == step.rows:  # both sections are the same slots in the same order, so they share words
        step.starts[7] = step.starts[5]


cdef void write_step(InputBatch batch, Step step, int32_t *num_scheduled, int32_t odd_count) noexcept:
    # In the order of rows: runs of steady decodes, and between them the odd rows.
    cdef Record *record = &batch.records[step.record]
    cdef int32_t *words = batch.arena_words[step.arena_index]
    cdef int32_t *others = batch.scratch
    cdef int32_t row = 0, place = 0, other_count = 0
    cdef int32_t i, odd, slot
    cdef Stay *stay
    record.run_count = 0
    write_places(&batch.riders)
    fetch_quarter(&batch.riders, 1)
    enter_blocks(batch)
    for i in range(odd_count + 1):
        odd = batch.odd[i] if i < odd_count else batch.rows_end
        if odd > row:
            write_run(batch, step, words, row, place, odd - row)
            place += odd - row
        row = odd + 1
        if i == odd_count:
            break
        slot = batch.rows[odd]
        if num_scheduled[slot] == 0:
            continue
        stay = &batch.stays[slot]
        if stay.computed + 1 == stay.length + stay.pending:
            write_decode(batch, step, words, slot, place)
            place += 1
        else:
            others[other_count] = slot
            other_count += 1
    fetch_quarter(&batch.riders, 2)
    # Rows, tokens and samples of decodes have the same indices.
    count_from(words + step.starts[3], 0, place + 1)
    count_from(words + step.starts[6], 0, place)
    if step.samples < step.rows:
        memcpy(words + step.starts[7], words + step.starts[5], place * sizeof(int32_t))
    write_others(batch, step, words, others, other_count, num_scheduled)
    memcpy(record.slots, words + step.starts[5], step.rows * sizeof(int32_t))
    record.changes = batch.riders.changes
    batch.riders.unplaced, batch.riders.unplaced_count = record.runs, record.run_count
    fetch_quarter(&batch.riders, 3)
    write_header(batch, step, words)


cdef void enter_blocks(InputBatch batch) noexcept:
    # Map the steady decodes that begin a block in this round.
    cdef Riders *riders = &batch.riders
    cdef int32_t *entering = batch.found
    cdef int32_t count = list_bits(in_phase(riders, riders.prepared), (batch.rows_end + 63) >> 6, entering)
    cdef int32_t i
    for i in range(count):
        if begins_block(batch, riders.origin[entering[i]] + riders.prepared):
            lift_row(batch, entering[i])


cdef inline bint begins_block(InputBatch batch, int32_t position) noexcept:
    return batch.riders.phase_count == batch.block_size or position % batch.block_size == 0


cdef inline void lift_row(InputBatch batch, int32_t row) noexcept:
    cdef Riders *riders = &batch.riders
    cdef int32_t column = block_of(batch, riders.origin[row] + riders.prepared)
    cdef int64_t entry = <int64_t>batch.rows[row] * batch.table_columns + column
    cdef int32_t group
    for group in range(batch.groups):
        riders.lift[group][row] = (
            (batch.tables[group][entry] - column) * batch.block_size + riders.origin[row]
        )


cdef void write_run(InputBatch batch, Step step, int32_t *words, int32_t row, int32_t place, int32_t count) noexcept:
    cdef Riders *riders = &batch.riders
    cdef Record *record = &batch.records[step.record]
    cdef int32_t *slot_mapping = words + step.starts[2] + place
    cdef int32_t *next_id = latest_tokens(riders) if batch.oldest is None else riders.next_id
    cdef int32_t group
    record.runs[record.run_count] = Run(row, place, count)
    record.run_count += 1
    write_along(
        words + step.starts[0] + place, words + step.starts[1] + place, words + step.starts[4] + place,
        words + step.starts[5] + place, slot_mapping, next_id + row, riders.origin + row,
        riders.lift[0] + row, batch.rows + row, riders.prepared, count,
    )
    for group in range(1, batch.groups):
        slot_mapping += step.tokens
        add_to_all(slot_mapping, riders.lift[group] + row, riders.prepared, count)


cdef void write_decode(InputBatch batch, Step step, int32_t *words, int32_t slot, int32_t place) noexcept:
    cdef Stay *stay = &batch.stays[slot]
    cdef int32_t position = stay.computed
    words[step.starts[0] + place] = -1 - stay.sample if stay.pending else stay.tokens[position]
    words[step.starts[1] + place] = position
    words[step.starts[4] + place] = position + 1
    words[step.starts[5] + place] = slot
    map_tokens(batch, words + step.starts[2] + place, step.tokens, slot, position, 1)
    stay.computed = position + 1
    stay.last_scheduled = step.number
    stay.sample = place
    stay.pending += 1


cdef void write_others(
    InputBatch batch, Step step, int32_t *words, int32_t *others, int32_t count, int32_t *num_scheduled
) noexcept:
    # A row with more than one token to compute has no placeholders.
    cdef int32_t *input_ids = words + step.starts[0]
    cdef int32_t *positions = words + step.starts[1]
    cdef int32_t *query_starts = words + step.starts[3]
    cdef int32_t *sample_rows = words + step.starts[6]
    cdef int32_t *sample_slots = words + step.starts[7]
    cdef int32_t row = step.decodes, token = step.decodes, sample = step.decodes
    cdef int32_t i, j, slot, position, tokens
    cdef Stay *stay
    for i in range(count):
        slot = others[i]
        tokens = num_scheduled[slot]
        stay = &batch.stays[slot]
        position = stay.computed
        memcpy(input_ids + token, stay.tokens + position, tokens * sizeof(int32_t))
        for j in range(tokens):
            positions[token + j] = position + j
        map_tokens(batch, words + step.starts[2] + token, step.tokens, slot, position, tokens)
        token += tokens
        query_starts[row + 1] = token
        words[step.starts[4] + row] = position + tokens
        words[step.starts[5] + row] = slot
        batch.records[step.record].counts[row] = -tokens
        stay.computed = position + tokens
        stay.last_scheduled = step.number
        if stay.computed == stay.length:
            batch.records[step.record].counts[row] = tokens
            sample_rows[sample] = row
            sample_slots[sample] = slot
            stay.sample = sample
            stay.pending = 1
            sample += 1
        row += 1


cdef void map_tokens(
    InputBatch batch, int32_t *slot_mapping, int32_t tokens, int64_t slot, int32_t position, int32_t count
) noexcept:
    # Write the slot mapping, block by block.
    cdef int32_t group, column, first, last, start, i
    cdef int32_t end = position + count
    cdef int32_t *target
    for group in range(batch.groups):
        target = slot_mapping + <int64_t>group * tokens - position
        column = block_of(batch, position)
        first = position
        while first < end:
            last = min(<int64_t>(column + 1) * batch.block_size, <int64_t>end)
            start = (
                batch.tables[group][slot * batch.table_columns + column] - column
            ) * <int64_t>batch.block_size
            for i in range(first, last):
                target[i] = start + i
            first = last
            column += 1


cdef void write_header(InputBatch batch, Step step, int32_t *words) noexcept:
    cdef int32_t start = step.starts[SECTIONS - 1]
    cdef int32_t writes = 0
    step.end = start + take_staged(batch, words + start, &writes)
    words[0] = step.tokens
    words[1] = step.rows
    words[2] = step.decodes
    words[3] = step.samples
    words[4] = step.end - start
    words[5] = writes
    words[6] = batch.groups
    memcpy(words + HEADER - SECTIONS, step.starts, SECTIONS * sizeof(int32_t))


cdef int32_t take_staged(InputBatch batch, int32_t *target, int32_t *writes) noexcept:
    # Write only entries within the window; those that have slid out stay unchanged on the device.
    cdef int32_t *begin = target
    cdef int32_t *changed = batch.found
    cdef uint64_t *staged
    cdef int32_t *row
    cdef int32_t group, i, changes, first, count
    cdef int64_t slot
    cdef Held *held
    for group in range(batch.groups):
        staged = batch.staged + group * batch.bit_words
        changes = list_bits(staged, batch.bit_words, changed)
        memset(staged, 0, batch.bit_words * sizeof(uint64_t))
        for i in range(changes):
            slot = changed[i]
            if not batch.occupied[slot]:
                continue
            held = &batch.held[<int64_t>group * batch.slots + slot]
            row = batch.tables[group] + slot * batch.table_columns
            count = held.count
            first = held.unseen
            while first < count and row[first] == NONE:
                first += 1
            if first == count:
                continue
            target[0] = group
            target[1] = slot
            target[2] = first
            target[3] = count - first
            target[4] = row[first]  # usually the only one
            if count - first > 1:
                memcpy(target + 5, row + first + 1, (count - first - 1) * sizeof(int32_t))
            target += 4 + count - first
            writes[0] += 1
    return target - begin
