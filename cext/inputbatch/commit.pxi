# The end of a step: samples go to the sequences that are still present, and decodes become steady decodes.

cdef int32_t under_way(InputBatch batch) noexcept:
    return (batch.oldest is not None) + (batch.newest is not None)


cdef object commit_step(InputBatch batch, Step step, int32_t *sampled):
    # In the order of the step's rows: runs of steady decodes, and between them the other rows.
    cdef Record *record = &batch.records[step.record]
    cdef Results results
    cdef int32_t sample = step.decodes
    cdef int32_t row = 0, i, end, rows = step.rows
    cdef bint look_closer
    cdef Run *run
    cdef Ending ending
    cdef list finished = [], failed = []
    fetch_all(sampled, step.samples)
    empty_ring(&batch.riders)  # meanwhile the samples are prefetched
    make_answers(batch, step.samples)
    if step is not batch.oldest:
        raise ValueError("only the oldest step under way can be committed")
    results = Results(
        <int64_t *>batch.keys_lent.data.as_longlongs, <int32_t *>batch.tokens_lent.data.as_ints, batch.scratch,
        0, 0, 0, 0,
    )
    if record.changes != batch.riders.changes:
        find_runs(batch, step)
    batch.oldest, batch.newest = batch.newest, None
    if batch.oldest is None:
        batch.riders.unplaced = NULL  # the next step has tokens, not placeholders
    look_closer = batch.riders.closest <= batch.riders.committed or any_hit(
        sampled, step.decodes, batch.vocab_size, batch.eos, batch.eos_count
    )
    for i in range(record.run_count + 1):
        end = record.runs[i].place if i < record.run_count else rows
        while row < end:
            if row < step.decodes:
                commit_row(batch, record.slots[row], 1, row, sampled, &results)
            else:
                commit_row(batch, record.slots[row], record.counts[row], sample, sampled, &results)
                sample += record.counts[row] > 0
            row += 1
        if i < record.run_count:
            run = &record.runs[i]
            if look_closer:
                commit_run(batch, run, sampled, &results)
            else:
                commit_riders(batch, run.row, run.place, run.count, sampled, &results)
            row += run.count
    memcpy(results.tokens, sampled, step.samples * sizeof(int32_t))
    if look_closer:
        batch.riders.closest = least_of(batch.riders.closer, batch.rows_end)
    list_filled(batch, &results)
    batch.riders.committed += 1
    board(batch, results.boarders)
    samples = leave_out_lost(batch, &results, step.samples) if results.lost > 0 else batch.all_samples
    keys, tokens = batch.keys_lent, batch.tokens_lent  # from here on these are referred to
    # Only now, with all changes done, create objects that could trigger the garbage collection.
    for i in range(results.ended):
        ending = batch.endings[i]
        if ending.reason == FAILED:
            failed.append((ending.slot, ending.place))
        else:
            finished.append((ending.slot, ending.reason, ending.place))
    return tuple.__new__(
        Committed,
        (
            memoryview(keys),
            memoryview(tokens),
            memoryview(samples),
            finished,
            failed,
            int32s(batch.filled, results.filled),
        ),
    )


cdef int make_answers(InputBatch batch, int32_t count) except -1:
    # Reuse the arrays of the previous step if nothing refers to them, because they are in the cache. Create
    # the view first: it could trigger the garbage collection, and so any code.
    cdef c_array every
    if batch.all_samples is None or PyObject_Size(batch.all_samples) != count:
        every = clone(INT32S, count, False)
        count_from(<int32_t *>every.data.as_ints, 0, count)
        batch.all_samples = memoryview(every).toreadonly()
    if batch.keys_lent is None or (<PyObject *>batch.keys_lent).ob_refcnt > 1:
        batch.keys_lent = clone(INT64S, count, False)
    else:
        resize_smart(batch.keys_lent, count)
    if batch.tokens_lent is None or (<PyObject *>batch.tokens_lent).ob_refcnt > 1:
        batch.tokens_lent = clone(INT32S, count, False)
    else:
        resize_smart(batch.tokens_lent, count)
    return 0


cdef c_array leave_out_lost(InputBatch batch, Results *results, int32_t count):
    # Remove lost samples from the results, which are by sample so far. Return the indices of the others.
    cdef c_array samples = clone(INT32S, count - results.lost, False)
    cdef int32_t sample, done = 0, gone = 0
    for sample in range(count):
        if gone < results.lost and results.losses[gone] == sample:
            gone += 1
        else:
            results.keys[done] = results.keys[sample]
            results.tokens[done] = results.tokens[sample]
            samples.data.as_ints[done] = sample
            done += 1
    resize_smart(batch.keys_lent, done)
    resize_smart(batch.tokens_lent, done)
    return samples


cdef void find_runs(InputBatch batch, Step step) noexcept:
    # Find the runs again, because rows have been added, removed or moved since the step was prepared.
    cdef Record *record = &batch.records[step.record]
    cdef Run *run = NULL
    cdef Stay *stay
    cdef int32_t place
    record.run_count = 0
    for place in range(step.decodes):
        if record.slots[place] != NONE:
            stay = &batch.stays[record.slots[place]]
            if rides(&batch.riders, stay):
                if run != NULL and run.row + run.count == stay.row and run.place + run.count == place:
                    run.count += 1
                else:
                    run = &record.runs[record.run_count]
                    record.run_count += 1
                    run[0] = Run(stay.row, place, 1)


cdef void commit_run(InputBatch batch, Run *run, int32_t *sampled, Results *results) noexcept:
    cdef Riders *riders = &batch.riders
    # Rows that must be checked are committed one by one.
    cdef int32_t *hits = batch.odd
    cdef int32_t start = 0, i, end, count, slot
    mark_hits(
        batch.marks, sampled + run.place, batch.vocab_size, riders.closer + run.row, riders.committed,
        batch.eos, batch.eos_count, run.count,
    )
    count = list_marks(batch.marks, run.count, hits)
    for i in range(count + 1):
        end = hits[i] if i < count else run.count
        commit_riders(batch, run.row + start, run.place + start, end - start, sampled, results)
        if i < count:
            slot = batch.rows[run.row + end]
            alight(riders, &batch.stays[slot])
            commit_row(batch, slot, 1, run.place + end, sampled, results)
        start = end + 1


cdef void commit_riders(
    InputBatch batch, int32_t row, int32_t place, int32_t count, int32_t *sampled, Results *results
) noexcept:
    # None of these rows ends with its token.
    cdef Riders *riders = &batch.riders
    memcpy(results.keys + place, riders.keys + row, count * sizeof(int64_t))
    memcpy(
        riders.ring + (riders.committed & (RING - 1)) * riders.ring_width + row, sampled + place,
        count * sizeof(int32_t),
    )


cdef void empty_ring(Riders *riders) noexcept:
    # Copy tokens to the buffers: in each round for other rows, and for all rows within RING rounds.
    cdef int32_t round = riders.committed
    cdef int32_t word = round % RING
    while word < riders.words:
        complete_rows(
            riders.ring, riders.ring_width, riders.ends, riders.since, riders.fresh[word] & riders.riding[word],
            64 * word, round,
        )
        riders.fresh[word] = 0
        write_down(riders.ring, riders.ring_width, riders.ends, riders.riding[word], 64 * word, round)
        word += RING


cdef void list_filled(InputBatch batch, Results *results) noexcept:
    # A row whose next token begins a block has filled one.
    cdef Riders *riders = &batch.riders
    cdef int32_t *filling = batch.found
    cdef int32_t count = list_bits(in_phase(riders, riders.committed + 1), (batch.rows_end + 63) >> 6, filling)
    cdef int32_t i
    for i in range(count):
        if begins_block(batch, riders.origin[filling[i]] + riders.committed + 1):
            batch.filled[results.filled] = batch.rows[filling[i]]
            results.filled += 1


cdef void commit_row(
    InputBatch batch, int32_t slot, int32_t count, int32_t sample, int32_t *sampled, Results *results
) noexcept:
    # Commit a row that is not, or no longer, a steady decode.
    cdef Stay *stay
    cdef int32_t token, before
    if slot == NONE or batch.stays[slot].over:
        if count > 0:
            lose(results, sample)
        return
    stay = &batch.stays[slot]
    before = stay.committed
    stay.committed = before + (count if count > 0 else -count)
    if block_of(batch, stay.committed) != block_of(batch, before):
        batch.filled[results.filled] = slot
        results.filled += 1
    if count < 0:
        return
    token = sampled[sample]
    if token < 0 or token >= batch.vocab_size:
        end_stay(batch, slot, FAILED, sample, results)
        lose(results, sample)
        return
    # Replace the placeholder; `checked_step` has made room.
    stay.tokens[stay.length] = token
    stay.length += 1
    stay.pending -= 1
    results.keys[sample] = batch.columns.keys[slot]
    if stay.length >= stay.min_end and ends_with(batch, slot, token, stay.length):
        end_stay(batch, slot, STOP, sample - results.lost, results)
    elif stay.length >= stay.limit:
        end_stay(batch, slot, LENGTH, sample - results.lost, results)
    else:
        batch.boarders[results.boarders] = slot
        results.boarders += 1


cdef inline void lose(Results *results, int32_t sample) noexcept:
    # Record a sample without a recipient.
    results.losses[results.lost] = sample
    results.lost += 1


cdef void end_stay(InputBatch batch, int32_t slot, int32_t reason, int32_t place, Results *results) noexcept:
    take_out(&batch.stays[slot])
    batch.endings[results.ended] = Ending(slot, reason, place)
    results.ended += 1


cdef void board(InputBatch batch, int32_t count) noexcept:
    # A row that is a decode in all steps under way becomes a steady decode. If no step is under way, a row
    # with one token to compute does.
    cdef Riders *riders = &batch.riders
    cdef int32_t under_way = riders.prepared - riders.committed
    cdef int32_t i, row, slot, origin
    cdef Stay *stay
    for i in range(count):
        slot = batch.boarders[i]
        stay = &batch.stays[slot]
        if (
            stay.pending != under_way or stay.computed - stay.committed != under_way
            or stay.last_scheduled != riders.latest
        ):
            continue
        row = stay.row
        origin = stay.computed - riders.prepared
        riders.origin[row] = origin
        riders.room[row] = round_of(stay.room, origin)
        riders.late[row] = round_of(min(stay.capacity, stay.limit) - 1, origin)
        riders.closer[row] = round_of(stay.limit - 2, origin)
        if stay.stops or stay.length < stay.min_end:
            riders.closer[row] = INT32_MIN
        if under_way:
            riders.next_id[row] = -1 - stay.sample
        else:
            latest_tokens(riders)[row] = stay.tokens[stay.length - 1]
        riders.keys[row] = batch.columns.keys[slot]
        riders.ends[row] = stay.tokens + origin + 1
        if stay.computed % batch.block_size != 0:  # otherwise it enters a block first
            lift_row(batch, row)
        get_on(riders, row)


cdef void all_alight(InputBatch batch) noexcept:
    cdef int32_t row
    for row in range(batch.rows_end):
        if batch.rows[row] != NONE:
            alight(&batch.riders, &batch.stays[batch.rows[row]])
    batch.riders.committed = 0
    batch.riders.prepared = under_way(batch)


cdef inline bint ends_with(InputBatch batch, int32_t slot, int32_t token, int32_t length) noexcept:
    # Return whether a token ends a sequence that has its `min_tokens`.
    cdef Stay *stay = &batch.stays[slot]
    cdef SequenceState state
    cdef int32_t i
    if length == stay.min_end and batch.columns.needs[slot] & MIN_TOKENS:
        batch.columns.needs[slot] &= ~<uint8_t>MIN_TOKENS
        batch.need_counts[6] -= 1
    if not stay.ignore_eos:
        for i in range(batch.eos_count):
            if batch.eos[i] == token:
                return True
    if stay.stops:
        state = <SequenceState>batch.states[slot]
        for i in range(state.stop_count):
            if state.stops[i] == token:
                return True
    return False


cdef list cancel(InputBatch batch, Step step):
    cdef int32_t *slots = batch.records[step.record].slots
    cdef int32_t row, slot, group
    if step is not batch.oldest and step is not batch.newest:
        raise ValueError("the step is not under way")
    all_alight(batch)
    if step is batch.oldest:
        batch.oldest, batch.newest = batch.newest, None
    else:
        batch.newest = None
    batch.riders.prepared = under_way(batch)
    cdef list present = []
    for row in range(step.rows):
        slot = slots[row]
        if slot != NONE and not batch.stays[slot].over:
            present.append(slot)
            take_out(&batch.stays[slot])
    for row in range(batch.rows_end):
        slot = batch.rows[row]
        if slot != NONE:
            for group in range(batch.groups):
                set_bit(batch.staged + group * batch.bit_words, slot)
                batch.held[<int64_t>group * batch.slots + slot].unseen = 0
    return present
