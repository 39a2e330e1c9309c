/* Validation of a step: every number that becomes an address is checked here, once. */
#include "cpustep.h"

#include <stdarg.h>
#include <stdio.h>

static int refuse(char *reason, size_t room, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    vsnprintf(reason, room, format, values);
    va_end(values);
    return 1;
}

static int check_row(const Model *model, const Step *step, int row, char *reason, size_t room)
{
    const Shape *shape = &model->shape;
    int first = step->query_starts[row], last = step->query_starts[row + 1];
    int count = last - first, length = step->sequence_lengths[row], slot = step->slots[row];
    if (first < 0 || count < 1 || last > step->tokens)
        return refuse(reason, room, "query_starts[%d…]: %d to %d is no range of the %d tokens", row, first, last,
                      step->tokens);
    if (length < count)
        return refuse(reason, room, "sequence_lengths[%d]: %d is less than the row's %d tokens", row, length, count);
    for (int t = first; t < last; t++)
        if (step->positions[t] != length - last + t)
            return refuse(reason, room, "positions[%d]: %d, but the row's length requires %d", t, step->positions[t],
                          length - last + t);
    for (int g = 0; g < shape->groups; g++) {
        if (slot < 0 || slot >= step->table_rows[g])
            return refuse(reason, room, "slots[%d]: %d is not in the block table of %d rows", row, slot,
                          step->table_rows[g]);
        if ((length - 1) / BLOCK >= step->table_width[g])
            return refuse(reason, room, "sequence_lengths[%d]: %d does not fit into a block table of %d columns", row,
                          length, step->table_width[g]);
        const int32_t *table = step->tables[g] + (long)slot * step->table_width[g];
        int window = shape->windows[g], start = length - count;
        int low = window && start >= window ? start - window + 1 : 0;
        for (int block = low / BLOCK; block <= (length - 1) / BLOCK; block++)
            if (table[block] < 0 || table[block] >= model->blocks[g])
                return refuse(reason, room, "block table of group %d, slot %d, column %d: %d is not one of %d blocks",
                              g, slot, block, table[block], model->blocks[g]);
        for (int t = first; t < last; t++) {
            int position = length - last + t, expected = table[position / BLOCK] * BLOCK + position % BLOCK;
            if (step->slot_mapping[g][t] != expected)
                return refuse(reason, room, "slot_mapping of group %d, token %d: %d, but the block table has %d", g, t,
                              step->slot_mapping[g][t], expected);
        }
    }
    return 0;
}

int check_step(const Model *model, const Step *step, char *reason, size_t room)
{
    const Shape *shape = &model->shape;
    if (step->tokens < 1 || step->tokens > shape->tokens_at_most)
        return refuse(reason, room, "input_ids: %d tokens, from 1 to %d can be run", step->tokens,
                      shape->tokens_at_most);
    for (int t = 0; t < step->tokens; t++)
        if (step->input_ids[t] < 0 || step->input_ids[t] >= shape->vocabulary)
            return refuse(reason, room, "input_ids[%d]: %d is not from 0 to %d", t, step->input_ids[t],
                          shape->vocabulary - 1);
    if (step->rows < 1 || step->query_starts[0] != 0 || step->query_starts[step->rows] != step->tokens)
        return refuse(reason, room, "query_starts: must lead from 0 to the %d tokens", step->tokens);
    for (int row = 0; row < step->rows; row++)
        if (check_row(model, step, row, reason, room)) return 1;
    for (int s = 0; s < step->samples; s++)
        if (step->sample_tokens[s] < 0 || step->sample_tokens[s] >= step->tokens ||
            (s > 0 && step->sample_tokens[s] <= step->sample_tokens[s - 1]))
            return refuse(reason, room, "sample_tokens[%d]: %d; tokens from 0 to %d must ascend", s,
                          step->sample_tokens[s], step->tokens - 1);
    return 0;
}
