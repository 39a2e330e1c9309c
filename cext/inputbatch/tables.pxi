# Block tables: appending blocks, staging changes for the device, and sliding windows.

cdef int append_blocks(InputBatch batch, int64_t slot, tuple block_ids) except -1:
    cdef Stay *stay = stay_of(batch, slot)
    cdef int64_t serial = stay.serial
    cdef int32_t room = stay.room
    cdef int32_t counts[GROUPS_AT_MOST]
    cdef int32_t group, count
    cdef int64_t place
    check_groups(batch, block_ids)
    for group in range(batch.groups):
        count = batch.held[<int64_t>group * batch.slots + slot].count
        ids = <object>PyTuple_GET_ITEM(block_ids, group)
        counts[group] = read_blocks(batch, slot, group, count, stay.committed, ids)
    if stay.serial != serial or stay.room != room:
        raise ValueError(f"slot {slot} was changed meanwhile")  # by code that a buffer's exporter ran
    for group in range(batch.groups):
        if counts[group] > 0:
            place = <int64_t>group * batch.slots + slot
            stage(batch, group, slot, batch.held[place].count)
            batch.held[place].count += counts[group]
    count_room(batch, slot)
    return 0


cdef int append_one_block_each(InputBatch batch, slots, tuple block_ids) except -1:
    cdef int32_t *chosen = batch.scratch
    cdef int32_t *ids
    cdef int32_t group, i, count
    cdef int64_t slot
    cdef Held *held
    check_groups(batch, block_ids)
    cdef int32_t counts[GROUPS_AT_MOST]
    fetch_content(slots)
    fetch_content(<object>PyTuple_GET_ITEM(block_ids, 0))
    for group in range(batch.groups):
        ids = batch.scratch + <int64_t>(group + 1) * batch.slots
        counts[group] = read_ids(
            <object>PyTuple_GET_ITEM(block_ids, group), ids, batch.slots, 0, batch.largest_block, "block ids"
        )
    count = read_slots(batch, slots)
    for group in range(batch.groups):
        if counts[group] != count:
            raise ValueError(f"there must be {count} block ids in group {group}, not {counts[group]}")
    for i in range(count):
        slot = chosen[i]
        prefetch(&batch.stays[slot])
        for group in range(batch.groups):
            held = &batch.held[<int64_t>group * batch.slots + slot]
            if held.count == batch.table_columns:
                raise ValueError(f"slot {slot} has its {batch.table_columns} blocks")
            prefetch(batch.tables[group] + slot * batch.table_columns + held.count)
    for i in range(count):
        slot = chosen[i]
        for group in range(batch.groups):
            held = &batch.held[<int64_t>group * batch.slots + slot]
            stage(batch, group, slot, held.count)
            batch.tables[group][slot * batch.table_columns + held.count] = (
                batch.scratch[<int64_t>(group + 1) * batch.slots + i]
            )
            held.count += 1
        count_room(batch, slot)
    return 0


cdef int32_t read_blocks(
    InputBatch batch, int64_t slot, int32_t group, int32_t start, int32_t committed, ids
) except -1:
    # Read ids into the table's row from column `start` on, which is not in use yet.
    cdef int32_t *row = batch.tables[group] + slot * batch.table_columns
    cdef int32_t hidden = hidden_blocks(batch, group, committed)
    cdef int32_t least = NONE if hidden > start else 0
    cdef int32_t room = batch.table_columns - start
    cdef int32_t count = read_ids(ids, row + start, room, least, batch.largest_block, "block ids")
    cdef int32_t column
    if least == NONE:
        for column in range(hidden, start + count):
            if row[column] < 0:
                raise ValueError(f"block {column} of group {group} is still seen and must not be -1")
    return count


cdef void stage(InputBatch batch, int32_t group, int64_t slot, int32_t first) noexcept:
    cdef uint64_t *staged = batch.staged + group * batch.bit_words
    if not has_bit(staged, slot):
        set_bit(staged, slot)
        batch.held[<int64_t>group * batch.slots + slot].unseen = first


cdef void count_room(InputBatch batch, int64_t slot) noexcept:
    cdef Stay *stay = &batch.stays[slot]
    cdef int32_t fewest = INT32_MAX
    cdef int32_t group
    for group in range(batch.groups):
        fewest = min(fewest, batch.held[<int64_t>group * batch.slots + slot].count)
    stay.room = fewest * batch.block_size
    if rides(&batch.riders, stay):
        batch.riders.room[stay.row] = round_of(stay.room, batch.riders.origin[stay.row])


cdef int32_t hidden_blocks(InputBatch batch, int32_t group, int32_t committed) noexcept:
    # Return how many blocks no token from `committed` on attends to.
    cdef int32_t window = batch.windows[group]
    if window == 0 or committed < window:
        return 0
    return block_of(batch, committed - window + 1)


cdef inline int32_t block_of(InputBatch batch, int32_t position) noexcept:
    if batch.block_shift >= 0:
        return position >> batch.block_shift
    return position // batch.block_size


cdef int check_group(InputBatch batch, int64_t group) except -1:
    if not 0 <= group < batch.groups:
        raise ValueError(f"group {group} is outside 0...{batch.groups - 1}")
    return 0


cdef int check_groups(InputBatch batch, tuple block_ids) except -1:
    if PyTuple_GET_SIZE(block_ids) != batch.groups:
        raise ValueError(f"there must be {batch.groups} lists of block ids, one a group")
    return 0


cdef list slide_out(InputBatch batch, int64_t slot, int64_t group):
    cdef Stay *stay = stay_of(batch, slot)
    cdef int32_t column, hidden
    cdef int32_t *row
    cdef int64_t place
    check_group(batch, group)
    cdef list freed = []
    hidden = hidden_blocks(batch, group, stay.committed)
    place = group * batch.slots + slot
    if hidden <= batch.held[place].slid:
        return freed
    row = batch.tables[group] + slot * batch.table_columns
    for column in range(batch.held[place].slid, hidden):
        if row[column] != NONE:
            freed.append(row[column])
    for column in range(batch.held[place].slid, hidden):
        row[column] = NONE
    batch.held[place].slid = hidden
    return freed
