/* Block tables: which blocks a slot has in each KV cache group, and which of them were not sent to the device. */
#include "inputbatch/batch.h"

#include <string.h>

static int32_t *blocks_of(const Batch *batch, int32_t group, int32_t slot)
{
    return batch->tables[group].blocks + (int64_t)slot * batch->columns;
}

void update_room(Batch *batch, int32_t slot)
{
    int32_t fewest = INT32_MAX;
    for (int32_t group = 0; group < batch->groups; group++) {
        int32_t count = batch->tables[group].rows[slot].count;
        if (count < fewest) fewest = count;
    }
    batch->by_slot[slot].room = fewest * batch->block_size;
}

int32_t hidden_blocks(const Batch *batch, int32_t group, int32_t committed)
{
    int32_t window = batch->tables[group].window;
    return window == 0 || committed < window ? 0 : (committed - window + 1) / batch->block_size;
}

int32_t slide_window(Batch *batch, int32_t slot, int32_t group, int32_t *freed)
{
    TableRow *row = &batch->tables[group].rows[slot];
    int32_t *blocks = blocks_of(batch, group, slot);
    int32_t hidden = hidden_blocks(batch, group, batch->by_slot[slot].sequence->committed), count = 0;
    for (; row->slid < hidden; row->slid++) {
        if (blocks[row->slid] != NONE) freed[count++] = blocks[row->slid];
        blocks[row->slid] = NONE;
    }
    return count;
}

int32_t cut_blocks(Batch *batch, int32_t slot, int32_t group, int32_t columns, int32_t *freed)
{
    TableRow *row = &batch->tables[group].rows[slot];
    int32_t count = row->count > columns ? row->count - columns : 0;
    memcpy(freed, blocks_of(batch, group, slot) + columns, count * sizeof *freed);
    row->count -= count;
    if (row->unsent > row->count) row->unsent = row->count;
    return count;
}

int32_t send_changes(Batch *batch, int32_t *words, int32_t *writes)
{
    int32_t *end = words;
    *writes = 0;
    for (int32_t group = 0; group < batch->groups; group++)
        for (int32_t slot = 0; slot < batch->slots_end; slot++) {
            TableRow *row = &batch->tables[group].rows[slot];
            if (row->unsent >= row->count || batch->by_slot[slot].sequence == NULL) continue;
            const int32_t *blocks = blocks_of(batch, group, slot);
            int32_t first = row->unsent, count;
            while (first < row->count && blocks[first] == NONE) first++; /* those stay as they are on the device */
            row->unsent = row->count;
            if ((count = row->count - first) == 0) continue;
            const int32_t head[4] = {group, slot, first, count};
            memcpy(end, head, sizeof head);
            memcpy(end + 4, blocks + first, count * sizeof *blocks);
            end += 4 + count;
            ++*writes;
        }
    return (int32_t)(end - words);
}

void resend_tables(Batch *batch)
{
    for (int32_t group = 0; group < batch->groups; group++)
        for (int32_t slot = 0; slot < batch->slots_end; slot++) batch->tables[group].rows[slot].unsent = 0;
}
