/* The order of the rows: adding, removing, condensing, and choosing which rows take part in a step. */
#include "inputbatch/batch.h"

#include <stdlib.h>

static int32_t lowest_hole(Batch *batch)
{
    while (batch->first_hole < batch->rows_end && batch->rows[batch->first_hole] != NONE) batch->first_hole++;
    return batch->first_hole;
}

int32_t add_sequence(Batch *batch, int32_t slot, Sequence *sequence)
{
    int32_t row = lowest_hole(batch);
    int64_t limit = (int64_t)sequence->prompt_length + sequence->max_tokens;
    batch->by_slot[slot] = (Slot){
        .sequence = sequence,
        .version = ++batch->version,
        .last_scheduled = batch->steps, /* so that newcomers do not overtake */
        .row = row,
        .limit = limit < batch->max_model_len ? (int32_t)limit : batch->max_model_len,
    };
    sequence->slot = slot;
    batch->num_scheduled[slot] = 0;
    batch->num_drafts[slot] = 0;
    batch->rows[row] = slot;
    if (row == batch->rows_end) batch->rows_end++;
    batch->sequences++;
    if (slot >= batch->slots_end) batch->slots_end = slot + 1;
    update_room(batch, slot);
    return row;
}

void remove_sequence(Batch *batch, int32_t slot)
{
    Slot *left = &batch->by_slot[slot];
    Sequence *sequence = left->sequence;
    sequence->slot = NONE;
    sequence->pending = 0;
    sequence->computed = sequence->committed;
    left->sequence = NULL;
    left->version = ++batch->version;
    batch->num_scheduled[slot] = 0;
    batch->num_drafts[slot] = 0;
    batch->rows[left->row] = NONE;
    if (left->row < batch->first_hole) batch->first_hole = left->row;
    batch->sequences--;
}

bool move_last_row(Batch *batch, int32_t *source, int32_t *target)
{
    while (batch->rows_end > 0 && batch->rows[batch->rows_end - 1] == NONE) batch->rows_end--;
    if (batch->first_hole > batch->rows_end) batch->first_hole = batch->rows_end;
    *target = lowest_hole(batch);
    if (*target == batch->rows_end) return false;
    *source = --batch->rows_end;
    int32_t slot = batch->rows[*source];
    batch->rows[*target] = slot;
    batch->by_slot[slot].row = *target;
    return true;
}

static int compare_turns(const void *one, const void *other)
{
    const Turn *a = one, *b = other;
    if (a->last_scheduled != b->last_scheduled) return a->last_scheduled < b->last_scheduled ? -1 : 1;
    return a->place < b->place ? -1 : a->place > b->place;
}

/* Leave out all but `max_rows` rows: those scheduled least recently take part, equals in order of admission
 * beginning after the sequence that was chosen last. */
static void leave_out_rows(Batch *batch, int32_t max_rows)
{
    int32_t able = 0;
    for (int32_t row = 0; row < batch->rows_end; row++) {
        if (batch->rows[row] == NONE) continue;
        Slot *slot = &batch->by_slot[batch->rows[row]];
        slot->left_out = false;
        if (!can_continue(slot)) continue;
        int64_t later = slot->version > batch->last_served ? 0 : INT64_MAX / 2;
        batch->turns[able++] = (Turn){slot->last_scheduled, slot->version + later, batch->rows[row]};
    }
    if (able <= max_rows) return;
    qsort(batch->turns, able, sizeof(Turn), compare_turns);
    for (int32_t i = max_rows; i < able; i++) batch->by_slot[batch->turns[i].slot].left_out = true;
    if (max_rows > 0) batch->last_chosen = batch->by_slot[batch->turns[max_rows - 1].slot].version;
}

int32_t survey_rows(Batch *batch, int32_t max_rows, int32_t *prefills, int32_t *prefill_count, int32_t *full,
                    int32_t *full_count)
{
    bool all = batch->sequences <= max_rows;
    int32_t decodes = 0, prefilling = 0;
    *full_count = 0;
    batch->last_chosen = 0;
    if (!all) leave_out_rows(batch, max_rows);
    for (int32_t row = 0; row < batch->rows_end; row++) {
        int32_t slot = batch->rows[row];
        if (slot == NONE) continue;
        const Slot *here = &batch->by_slot[slot];
        batch->num_scheduled[slot] = 0;
        batch->num_drafts[slot] = 0;
        if (!can_continue(here) || (!all && here->left_out)) continue;
        if (tokens_left(here->sequence) > 1) {
            batch->turns[prefilling++] = (Turn){0, here->version, slot};
            continue;
        }
        batch->num_scheduled[slot] = 1;
        decodes++;
        if (here->sequence->computed >= here->room) full[(*full_count)++] = slot;
    }
    qsort(batch->turns, prefilling, sizeof(Turn), compare_turns);
    for (int32_t i = 0; i < prefilling; i++) prefills[i] = batch->turns[i].slot;
    *prefill_count = prefilling;
    return decodes;
}

int32_t list_changes(const Batch *batch, int64_t since, int32_t *removed, int32_t *removed_count, int32_t *added)
{
    int32_t count = *removed_count = 0;
    if (since >= batch->version) return 0;
    for (int32_t slot = 0; slot < batch->slots_end; slot++) {
        const Slot *here = &batch->by_slot[slot];
        if (here->version <= since) continue;
        if (here->sequence)
            added[count++] = slot;
        else
            removed[(*removed_count)++] = slot;
    }
    return count;
}
