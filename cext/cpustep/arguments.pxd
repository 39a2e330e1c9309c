"""Conversion of Python arguments to the kernel's types, with an error that names a wrong one."""

from libc.math cimport isfinite
from libc.stdint cimport int32_t, int64_t, uint32_t

from cpustep.declarations cimport Choice, Shape, Step

cdef inline int64_t integer(name, value, least, most) except? -1:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: must be an integer, not {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{name}: must be from {least} to {most}, not {value}")
    return value

cdef inline float number(name, value) except? -1:
    cdef double result = float(value)
    if not isfinite(result) or result < 0:
        raise ValueError(f"{name}: must be finite and not negative, not {value}")
    return <float>result

cdef inline int read_choice(
    Choice *choice, const float[:, ::1] rows, const float[::1] temperatures, const int32_t[::1] top_k,
    const double[::1] top_p, const float[::1] least, const double[::1] numbers, int64_t[::1] tokens,
    float[::1] highest,
) except -1:
    for name, length in (("temperatures", len(temperatures)), ("top_k", len(top_k)), ("top_p", len(top_p)),
                         ("least", len(least)), ("numbers", len(numbers)), ("tokens", len(tokens)),
                         ("highest", len(highest))):
        if length != rows.shape[0]:
            raise ValueError(f"{name}: {length} for {rows.shape[0]} rows of logits")
    if rows.shape[1] == 0 or rows.shape[1] > 1 << 24:
        raise ValueError(f"logits: rows of {rows.shape[1]}")
    choice.rows, choice.vocabulary = <int> rows.shape[0], <int> rows.shape[1]
    if choice.rows:
        choice.logits, choice.stride = &rows[0, 0], rows.shape[1]
        choice.temperatures, choice.top_k, choice.top_p = &temperatures[0], &top_k[0], &top_p[0]
        choice.least, choice.numbers = &least[0], &numbers[0]
        choice.tokens, choice.highest = &tokens[0], &highest[0]
    return 0

cdef inline int read_masks(Choice *choice, masks, mask_rows) except -1:
    # The arrays must stay alive while `choice` is used.
    cdef const uint32_t[:, ::1] bits
    cdef const int32_t[::1] rows
    choice.masks, choice.mask_rows = NULL, NULL
    if masks is None or not choice.rows:
        return 0
    bits, rows = masks, mask_rows
    if bits.shape[1] != (choice.vocabulary + 31) // 32:
        raise ValueError(f"masks: {bits.shape[1]} words for {choice.vocabulary} tokens")
    if len(rows) != choice.rows:
        raise ValueError(f"mask_rows: {len(rows)} for {choice.rows} rows of logits")
    for row in rows:
        if row >= bits.shape[0]:
            raise ValueError(f"mask_rows: {row}, of {bits.shape[0]} masks")
    if bits.shape[0]:
        choice.masks, choice.mask_rows = &bits[0, 0], &rows[0]
    return 0

cdef inline list read_step(
    Step *step, const Shape *shape, const int32_t[::1] ids, const int32_t[::1] places, slot_mapping,
    const int32_t[::1] starts, const int32_t[::1] lengths, const int32_t[::1] rows, block_tables,
    const int32_t[::1] samples, float[:, ::1] out,
):
    # Return the buffers of the groups, which must stay alive while `step` is used, as those of the caller.
    cdef const int32_t[::1] mapping
    cdef const int32_t[:, ::1] table
    cdef int group
    buffers = []
    if len(places) != len(ids):
        raise ValueError(f"positions: {len(places)} for {len(ids)} tokens")
    if len(starts) != len(lengths) + 1 or len(rows) != len(lengths):
        raise ValueError(f"query_starts, sequence_lengths, slots: {len(starts)}, {len(lengths)}, {len(rows)} numbers")
    if len(slot_mapping) != shape.groups or len(block_tables) != shape.groups:
        raise ValueError(f"slot_mapping, block_tables: one is needed for each of {shape.groups} groups")
    if len(ids) == 0 or len(lengths) == 0:
        raise ValueError("input_ids: there are no tokens")
    if len(samples) and (out.shape[0] < len(samples) or out.shape[1] != shape.vocabulary):
        raise ValueError(f"logits: [{out.shape[0]}, {out.shape[1]}], expected [{len(samples)}, {shape.vocabulary}]")
    step.tokens, step.rows, step.samples = <int> len(ids), <int> len(lengths), <int> len(samples)
    step.input_ids, step.positions, step.query_starts = &ids[0], &places[0], &starts[0]
    step.sequence_lengths, step.slots = &lengths[0], &rows[0]
    step.sample_tokens = &samples[0] if len(samples) else NULL
    step.logits = &out[0, 0] if len(samples) else NULL
    step.logits_stride = shape.vocabulary
    for group in range(shape.groups):
        mapping, table = slot_mapping[group], block_tables[group]
        buffers.append((mapping, table))
        if len(mapping) != len(ids):
            raise ValueError(f"slot_mapping of group {group}: {len(mapping)} for {len(ids)} tokens")
        if table.shape[0] == 0 or table.shape[1] == 0:
            raise ValueError(f"block table of group {group}: it is empty")
        step.slot_mapping[group], step.tables[group] = &mapping[0], &table[0, 0]
        step.table_rows[group], step.table_width[group] = <int> table.shape[0], <int> table.shape[1]
    return buffers
