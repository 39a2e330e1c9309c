# The sequences that can be in a step, and the odd rows, which must be handled one by one for it.

cdef object survey_all(InputBatch batch):
    cdef int32_t odd_count = list_odd(batch, NULL)
    if is_dense(batch):
        memcpy(batch.columns.num_scheduled, batch.occupied, batch.slots_end * sizeof(int32_t))
    else:
        set_ones(batch.columns.num_scheduled, batch.rows, batch.rows_end)
    return survey_rows(batch, odd_count, batch.rows_end - odd_count, NULL)


cdef inline bint is_dense(InputBatch batch) noexcept:
    # If so, reading all slots in order touches fewer cache lines than reading the slots of all rows.
    return batch.slots_end <= 4 * batch.rows_end


cdef int32_t list_odd(InputBatch batch, int32_t *num_scheduled) noexcept:
    # List the odd rows, in order: holes, rows that are not steady decodes, and those whose blocks are full or
    # that are late. With `num_scheduled`, also rows whose count is not exactly one token.
    cdef Riders *riders = &batch.riders
    cdef uint64_t *odd = batch.due
    cdef int32_t words = (batch.rows_end + 63) >> 6
    cdef int32_t word
    mark_late(batch)
    if num_scheduled != NULL:
        mark_others(batch, num_scheduled)
    find_due(odd, riders.room, riders.prepared, batch.rows_end)
    for word in range(words):
        odd[word] |= ~riders.riding[word] | batch.unlike[word]
        batch.unlike[word] = 0
    if batch.rows_end & 63:
        odd[words - 1] &= (<uint64_t>1 << (batch.rows_end & 63)) - 1
    return list_bits(odd, words, batch.odd)


cdef void mark_late(InputBatch batch) noexcept:
    cdef Riders *riders = &batch.riders
    cdef int32_t i, count
    if riders.prepared < riders.soonest:
        return
    mark_due(batch.marks, riders.late, riders.prepared, batch.rows_end)
    count = list_marks(batch.marks, batch.rows_end, batch.found)
    for i in range(count):
        set_bit(batch.unlike, batch.found[i])
    riders.soonest = least_of(riders.late, batch.rows_end)


cdef void mark_others(InputBatch batch, int32_t *num_scheduled) noexcept:
    cdef int32_t i, count, slot
    if is_dense(batch):
        find_unlike(batch.due, num_scheduled, batch.occupied, batch.slots_end)
        count = list_bits(batch.due, (batch.slots_end + 63) >> 6, batch.found)
        for i in range(count):
            slot = batch.found[i]
            if batch.occupied[slot]:
                set_bit(batch.unlike, batch.stays[slot].row)
    else:
        mark_not_one(batch.marks, num_scheduled, batch.rows, batch.rows_end)
        count = list_marks(batch.marks, batch.rows_end, batch.found)
        for i in range(count):
            set_bit(batch.unlike, batch.found[i])


cdef object survey_some(InputBatch batch, int32_t max_rows):
    cdef Turn last
    cdef int32_t able = 0
    cdef int32_t row, slot
    for row in range(batch.rows_end):
        slot = batch.rows[row]
        if slot != NONE:
            bring_up_to_date(&batch.riders, &batch.stays[slot])
            if takes_part(&batch.stays[slot]):
                batch.turns[able] = turn_of(batch, slot)
                able += 1
    count_from(batch.odd, 0, batch.rows_end)
    if able <= max_rows:
        return survey_rows(batch, batch.rows_end, 0, NULL)
    last.last_scheduled = -1
    if max_rows > 0:
        last = nth_turn(batch.turns, able, max_rows - 1)
        batch.last_chosen = batch.stays[last.slot].serial
    return survey_rows(batch, batch.rows_end, 0, &last)


cdef inline Turn turn_of(InputBatch batch, int32_t slot) noexcept:
    cdef Turn turn
    cdef int64_t serial = batch.stays[slot].serial
    turn.last_scheduled = batch.stays[slot].last_scheduled
    turn.place = serial if serial > batch.last_served else serial + (<int64_t>1 << 62)
    turn.slot = slot
    return turn


cdef object survey_rows(InputBatch batch, int32_t odd_count, int32_t decodes, Turn *last):
    # Survey the rows in `odd`; `decodes` other rows have their count of 1 already.
    cdef Stay *stays = batch.stays
    cdef int32_t *num_scheduled = batch.columns.num_scheduled
    cdef int64_t *prefills = batch.admissions
    cdef int32_t *short = batch.filled
    cdef int32_t prefill_count = 0, short_count = 0
    cdef int32_t i, row, slot, count
    cdef Riders *riders = &batch.riders
    cdef Stay *stay
    cdef Turn turn
    for i in range(odd_count):
        row = batch.odd[i]
        slot = batch.rows[row]
        if slot == NONE:
            continue
        if last == NULL and riders.late[row] > riders.prepared and has_bit(riders.riding, row):
            num_scheduled[slot] = 1
            decodes += 1
            if riders.room[row] <= riders.prepared:
                short[short_count] = slot
                short_count += 1
            continue
        stay = &stays[slot]
        bring_up_to_date(&batch.riders, stay)
        count = 0
        if takes_part(stay):
            if last != NULL:
                turn = turn_of(batch, slot)
            if last != NULL and precedes(last, &turn):
                pass
            elif stay.length + stay.pending - stay.computed == 1:
                count = 1
                decodes += 1
                if stay.computed >= stay.room:
                    short[short_count] = slot
                    short_count += 1
            else:
                prefills[prefill_count] = (stay.serial << SLOT_BITS) | slot
                prefill_count += 1
        num_scheduled[slot] = count
    sort(prefills, prefill_count)
    for i in range(prefill_count):
        batch.boarders[i] = prefills[i] & (SLOTS_AT_MOST - 1)
    return tuple.__new__(Survey, (decodes, int32s(batch.boarders, prefill_count), int32s(short, short_count)))


cdef int set_counts(InputBatch batch, slots, counts) except -1:
    cdef int32_t *amounts = batch.scratch + batch.slots
    cdef int32_t amount_count = read_ids(counts, amounts, batch.slots, 0, INT32_MAX, "counts")
    cdef int32_t count = read_slots(batch, slots)
    cdef int32_t i
    if amount_count != count:
        raise ValueError(f"there must be {count} counts, not {amount_count}")
    for i in range(count):
        batch.columns.num_scheduled[batch.scratch[i]] = amounts[i]
    return 0
