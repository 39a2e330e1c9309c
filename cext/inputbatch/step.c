/* One step: checking and writing its inputs, committing its samples, or cancelling it. */
#include "inputbatch/batch.h"

#include <string.h>

StepStatus plan_step(const Batch *batch, StepPlan *step, int32_t *slot)
{
    const int32_t *counts = batch->num_scheduled;
    int64_t tokens = 0;
    for (int32_t row = 0; row < batch->rows_end; row++) {
        *slot = batch->rows[row];
        if (*slot == NONE || counts[*slot] == 0) continue;
        const Slot *here = &batch->by_slot[*slot];
        const Sequence *sequence = here->sequence;
        int32_t count = counts[*slot], left = tokens_left(sequence);
        if (count < 0 || count > left) return BAD_COUNT;
        if (!can_continue(here)) return CANNOT_CONTINUE;
        if (count > here->room - sequence->computed) return NO_BLOCKS;
        tokens += count;
        step->rows++;
        if (count == left) {
            step->samples++;
            step->decodes += count == 1;
            step->processes_logits |= sequence->processes_logits;
        }
    }
    if (tokens > batch->max_batched_tokens) return TOO_MANY_TOKENS;
    step->groups = batch->groups;
    step->tokens = (int32_t)tokens;
    return STEP_OK;
}

static void place_sections(StepPlan *step)
{
    bool all_sample = step->samples == step->rows; /* then `slots` and `sample_slots` are the same words */
    const int32_t sizes[SECTIONS] = {
        [INPUT_IDS] = step->tokens,
        [POSITIONS] = step->tokens,
        [SLOT_MAPPING] = step->tokens * step->groups,
        [QUERY_STARTS] = step->rows + 1,
        [SEQUENCE_LENGTHS] = step->rows,
        [SLOTS] = step->rows,
        [SAMPLE_ROWS] = step->samples,
        [SAMPLE_SLOTS] = all_sample ? 0 : step->samples,
    };
    int32_t start = HEADER;
    for (int32_t section = 0; section < SECTIONS; section++) {
        step->starts[section] = start;
        start += sizes[section];
    }
    if (all_sample) step->starts[SAMPLE_SLOTS] = step->starts[SLOTS];
}

/* Where each of `count` tokens from `position` on is written in a group's cache: block · block_size + offset. */
static void map_tokens(const Batch *batch, int32_t group, int32_t slot, int32_t position, int32_t count,
                       int32_t *mapping)
{
    const int32_t *blocks = batch->tables[group].blocks + (int64_t)slot * batch->columns;
    int32_t size = batch->block_size, column = position / size, offset = position % size;
    for (int32_t i = 0; i < count; i++) {
        mapping[i] = blocks[column] * size + offset;
        if (++offset == size) {
            offset = 0;
            column++;
        }
    }
}

typedef struct {
    StepPlan *step;
    int32_t *words;
    int32_t row, token, sample; /* the next ones */
} Writer;

static void write_row(Batch *batch, Writer *at, int32_t slot, int32_t count)
{
    StepPlan *step = at->step;
    int32_t *words = at->words, *ids = words + step->starts[INPUT_IDS] + at->token;
    int32_t *positions = words + step->starts[POSITIONS] + at->token;
    Slot *here = &batch->by_slot[slot];
    Sequence *sequence = here->sequence;
    int32_t start = sequence->computed;
    for (int32_t i = 0; i < count; i++) {
        ids[i] = start + i < sequence->length ? sequence->ids[start + i] : -1 - here->sample;
        positions[i] = start + i;
    }
    for (int32_t group = 0; group < batch->groups; group++)
        map_tokens(batch, group, slot, start, count,
                   words + step->starts[SLOT_MAPPING] + group * step->tokens + at->token);
    sequence->computed = start + count;
    here->last_scheduled = step->number;
    words[step->starts[QUERY_STARTS] + at->row] = at->token;
    words[step->starts[SEQUENCE_LENGTHS] + at->row] = start + count;
    words[step->starts[SLOTS] + at->row] = slot;
    bool samples = tokens_left(sequence) == 0;
    step->members[at->row] = (Member){here->version, slot, count, samples};
    if (samples) {
        words[step->starts[SAMPLE_ROWS] + at->sample] = at->row;
        words[step->starts[SAMPLE_SLOTS] + at->sample] = slot;
        sequence->pending++;
        here->sample = at->sample++;
    }
    at->token += count;
    at->row++;
}

void write_step(Batch *batch, StepPlan *step, int32_t *words)
{
    const int32_t *counts = batch->num_scheduled;
    Writer at = {step, words, 0, 0, 0};
    int32_t others = 0, writes;
    step->number = ++batch->steps;
    if (batch->last_chosen) batch->last_served = batch->last_chosen;
    place_sections(step);
    for (int32_t row = 0; row < batch->rows_end; row++) {
        int32_t slot = batch->rows[row], count = counts[slot];
        if (count == 1 && tokens_left(batch->by_slot[slot].sequence) == 1)
            write_row(batch, &at, slot, 1);
        else if (count)
            batch->scratch[others++] = slot;
    }
    for (int32_t i = 0; i < others; i++) write_row(batch, &at, batch->scratch[i], counts[batch->scratch[i]]);
    words[step->starts[QUERY_STARTS] + step->rows] = step->tokens;
    int32_t changes = send_changes(batch, words + step->starts[BLOCK_WRITES], &writes);
    step->end = step->starts[BLOCK_WRITES] + changes;
    const int32_t header[HEADER - SECTIONS] = {step->tokens, step->rows, step->decodes, step->samples,
                                               changes,      writes,     step->groups};
    memcpy(words, header, sizeof header);
    memcpy(words + HEADER - SECTIONS, step->starts, sizeof step->starts);
}

/* The slot that a row was prepared for, unless its sequence has ended or left since. */
static Slot *present(Batch *batch, const Member *member)
{
    Slot *slot = &batch->by_slot[member->slot];
    return slot->version == member->version && !slot->ended ? slot : NULL;
}

static bool contains(const int32_t *ids, int32_t count, int32_t id)
{
    for (int32_t i = 0; i < count; i++)
        if (ids[i] == id) return true;
    return false;
}

static bool ends_with(const Batch *batch, const Sequence *sequence, int32_t token)
{
    if (sequence->length - sequence->prompt_length < sequence->min_tokens) return false;
    if (!sequence->ignore_eos && contains(batch->eos, batch->eos_count, token)) return true;
    return contains(sequence->stops, sequence->stop_count, token);
}

static void end_sequence(Slot *slot, int32_t reason, int32_t index, Results *results, int32_t number)
{
    slot->ended = true;
    slot->sequence->pending = 0;
    int32_t *ended = results->ended[results->ended_count++];
    ended[0] = number;
    ended[1] = reason;
    ended[2] = index;
}

void commit_step(Batch *batch, const StepPlan *step, const int32_t *sampled, Results *results)
{
    for (int32_t row = 0, next_sample = 0; row < step->rows; row++) {
        const Member *member = &step->members[row];
        int32_t sample = next_sample;
        next_sample += member->samples;
        Slot *slot = present(batch, member);
        if (!slot) continue;
        Sequence *sequence = slot->sequence;
        int32_t before = sequence->committed;
        sequence->committed += member->count;
        if (sequence->committed / batch->block_size != before / batch->block_size)
            results->filled[results->filled_count++] = member->slot;
        if (!member->samples) continue;
        int32_t token = sampled[sample], index = results->count;
        if (token < 0 || token >= batch->vocab_size) {
            end_sequence(slot, FAILED, sample, results, member->slot);
            continue;
        }
        sequence->ids[sequence->length++] = token;
        sequence->pending--;
        results->keys[index] = sequence->key;
        results->tokens[index] = token;
        results->samples[index] = sample;
        results->count++;
        if (ends_with(batch, sequence, token))
            end_sequence(slot, STOP, index, results, member->slot);
        else if (sequence->length >= slot->limit)
            end_sequence(slot, LENGTH, index, results, member->slot);
    }
}

int32_t cancel_step(Batch *batch, const StepPlan *step, int32_t *slots)
{
    int32_t count = 0;
    for (int32_t row = 0; row < step->rows; row++) {
        Slot *slot = present(batch, &step->members[row]);
        if (!slot) continue;
        slot->ended = true;
        slot->sequence->pending = 0;
        slots[count++] = step->members[row].slot;
    }
    resend_tables(batch); /* the writes of this step may not have reached the device */
    return count;
}
