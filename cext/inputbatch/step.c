/* One step: checking and writing its inputs, committing its samples, or cancelling it. */
#include "inputbatch/batch.h"

#include <string.h>

static int32_t drafts_of(const Batch *batch, int32_t slot)
{
    return batch->most_drafts ? batch->num_drafts[slot] : 0;
}

/* Drafts follow the last token, which must be known, and leave the sequence a token below its limit. */
static bool may_have_drafts(const Batch *batch, int32_t slot)
{
    const Slot *here = &batch->by_slot[slot];
    const Sequence *sequence = here->sequence;
    int32_t drafts = batch->num_drafts[slot];
    if (drafts < 0 || drafts > batch->most_drafts || sequence->pending) return false;
    if (batch->num_scheduled[slot] != tokens_left(sequence) || sequence->length + drafts >= here->limit) return false;
    for (int32_t i = 0; i < drafts; i++) {
        int32_t draft = batch->drafts[(int64_t)slot * batch->most_drafts + i];
        if (draft < 0 || draft >= batch->vocab_size) return false;
    }
    return true;
}

StepStatus plan_step(const Batch *batch, StepPlan *step, int32_t *slot)
{
    const int32_t *counts = batch->num_scheduled;
    int64_t tokens = 0;
    step->one_sample_each = true;
    for (int32_t row = 0; row < batch->rows_end; row++) {
        *slot = batch->rows[row];
        if (*slot == NONE || counts[*slot] == 0) continue;
        const Slot *here = &batch->by_slot[*slot];
        const Sequence *sequence = here->sequence;
        int32_t count = counts[*slot], left = tokens_left(sequence), drafts = drafts_of(batch, *slot);
        if (count < 0 || count > left) return BAD_COUNT;
        if (!can_continue(here)) return CANNOT_CONTINUE;
        if (drafts && !may_have_drafts(batch, *slot)) return BAD_DRAFTS;
        if (count + drafts > here->room - sequence->computed) return NO_BLOCKS;
        int32_t rows = batch->one_sample_a_row ? 1 + drafts : 1;
        tokens += count + drafts;
        step->members_count++;
        step->rows += rows;
        if (count == left) {
            step->samples += 1 + drafts;
            step->drafts += drafts;
            step->decodes += count == 1 && (rows > 1 || !drafts) ? rows : 0;
            step->processes_logits |= sequence->processes_logits;
            if (rows == 1 && drafts) step->one_sample_each = false;
        } else {
            step->one_sample_each = false;
        }
    }
    if (tokens > batch->max_batched_tokens) return TOO_MANY_TOKENS;
    step->groups = batch->groups;
    step->tokens = (int32_t)tokens;
    return STEP_OK;
}

static void place_sections(StepPlan *step)
{
    const int32_t sizes[SECTIONS] = {
        [INPUT_IDS] = step->tokens,
        [POSITIONS] = step->tokens,
        [SLOT_MAPPING] = step->tokens * step->groups,
        [QUERY_STARTS] = step->rows + 1,
        [SEQUENCE_LENGTHS] = step->rows,
        [SLOTS] = step->rows,
        [SAMPLE_TOKENS] = step->samples,
        [SAMPLE_SLOTS] = step->one_sample_each ? 0 : step->samples, /* else these are the words of `slots` */
    };
    int32_t start = HEADER;
    for (int32_t section = 0; section < SECTIONS; section++) {
        step->starts[section] = start;
        start += sizes[section];
    }
    if (step->one_sample_each) step->starts[SAMPLE_SLOTS] = step->starts[SLOTS];
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
    int32_t member, row, token, sample; /* the next ones */
} Writer;

/* End the row that began at token `first` and has `length` tokens in the cache after the step. */
static void end_row(Writer *at, int32_t slot, int32_t first, int32_t length)
{
    StepPlan *step = at->step;
    at->words[step->starts[QUERY_STARTS] + at->row] = first;
    at->words[step->starts[SEQUENCE_LENGTHS] + at->row] = length;
    at->words[step->starts[SLOTS] + at->row] = slot;
    at->row++;
}

/* Sample after token `token`. */
static void add_sample(Writer *at, int32_t slot, int32_t token)
{
    at->words[at->step->starts[SAMPLE_TOKENS] + at->sample] = token;
    at->words[at->step->starts[SAMPLE_SLOTS] + at->sample] = slot;
    at->sample++;
}

/* Write `count` tokens of a sequence, and its drafts after them, as one row; or, where a row samples once, as the row
 * of these tokens and a row for each draft. */
static void write_member(Batch *batch, Writer *at, int32_t slot, int32_t count)
{
    StepPlan *step = at->step;
    int32_t *ids = at->words + step->starts[INPUT_IDS] + at->token;
    int32_t *positions = at->words + step->starts[POSITIONS] + at->token;
    Slot *here = &batch->by_slot[slot];
    Sequence *sequence = here->sequence;
    int32_t start = sequence->computed, first = at->token, drafts = drafts_of(batch, slot), all = count + drafts;
    for (int32_t i = 0; i < count; i++)
        ids[i] = start + i < sequence->length ? sequence->ids[start + i] : -1 - here->sample;
    if (drafts) memcpy(ids + count, batch->drafts + (int64_t)slot * batch->most_drafts, drafts * sizeof *ids);
    for (int32_t i = 0; i < all; i++) positions[i] = start + i;
    for (int32_t group = 0; group < batch->groups; group++)
        map_tokens(batch, group, slot, start, all,
                   at->words + step->starts[SLOT_MAPPING] + group * step->tokens + first);
    sequence->computed = start + count; /* of what is known; the drafts are added below */
    here->last_scheduled = step->number;
    bool samples = tokens_left(sequence) == 0;
    step->members[at->member++] = (Member){here->version, slot, count, drafts, first + count, samples};
    if (!drafts || batch->one_sample_a_row) end_row(at, slot, first, start + count);
    if (samples) {
        sequence->pending++;
        here->sample = at->sample;
        add_sample(at, slot, first + count - 1);
    }
    for (int32_t i = 0; i < drafts; i++) {
        if (batch->one_sample_a_row) end_row(at, slot, first + count + i, start + count + i + 1);
        add_sample(at, slot, first + count + i);
    }
    if (drafts && !batch->one_sample_a_row) end_row(at, slot, first, start + all);
    sequence->computed += drafts;
    here->drafts = drafts > 0;
    at->token += all;
}

/* Whether a sequence is written before the sequences that do not decode. */
static bool is_decode(const Batch *batch, int32_t slot)
{
    return batch->num_scheduled[slot] == 1 && tokens_left(batch->by_slot[slot].sequence) == 1 &&
           (batch->one_sample_a_row || drafts_of(batch, slot) == 0);
}

void write_step(Batch *batch, StepPlan *step, int32_t *words)
{
    const int32_t *counts = batch->num_scheduled;
    Writer at = {step, words, 0, 0, 0, 0};
    int32_t others = 0, writes;
    step->number = ++batch->steps;
    if (batch->last_chosen) batch->last_served = batch->last_chosen;
    place_sections(step);
    for (int32_t row = 0; row < batch->rows_end; row++) {
        int32_t slot = batch->rows[row];
        if (is_decode(batch, slot))
            write_member(batch, &at, slot, 1);
        else if (counts[slot])
            batch->scratch[others++] = slot;
    }
    for (int32_t i = 0; i < others; i++) write_member(batch, &at, batch->scratch[i], counts[batch->scratch[i]]);
    words[step->starts[QUERY_STARTS] + step->rows] = step->tokens;
    int32_t changes = send_changes(batch, words + step->starts[BLOCK_WRITES], &writes);
    step->end = step->starts[BLOCK_WRITES] + changes;
    const int32_t header[HEADER - SECTIONS] = {step->tokens, step->rows, step->decodes, step->samples,
                                               changes,      writes,     step->groups};
    memcpy(words, header, sizeof header);
    memcpy(words + HEADER - SECTIONS, step->starts, sizeof step->starts);
}

/* The slot that a part of a step was prepared for, unless its sequence has ended or left since. */
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

/* Give a sequence the samples of its row as far as its drafts are right; return how many. An id that is no token
 * fails the sequence if it is the first; else it is sampled again in the next step, where it is the first. */
static int32_t accept(Batch *batch, const Member *member, const int32_t *drafts, const int32_t *sampled, int32_t first,
                      Results *results)
{
    Slot *slot = &batch->by_slot[member->slot];
    Sequence *sequence = slot->sequence;
    int32_t taken = 0;
    for (; taken <= member->drafts && !slot->ended; taken++) {
        if (taken && sampled[first + taken - 1] != drafts[taken - 1]) break;
        int32_t token = sampled[first + taken];
        if (token < 0 || token >= batch->vocab_size) {
            if (!taken) end_sequence(slot, FAILED, first, results, member->slot);
            break;
        }
        sequence->ids[sequence->length++] = token;
        results->tokens[results->tokens_count] = token;
        results->samples[results->tokens_count++] = first + taken;
        if (ends_with(batch, sequence, token))
            end_sequence(slot, STOP, results->count, results, member->slot);
        else if (sequence->length >= slot->limit)
            end_sequence(slot, LENGTH, results->count, results, member->slot);
    }
    return taken;
}

void commit_step(Batch *batch, const StepPlan *step, const int32_t *words, const int32_t *sampled, Results *results)
{
    const int32_t *ids = words + step->starts[INPUT_IDS];
    for (int32_t i = 0, next_sample = 0; i < step->members_count; i++) {
        const Member *member = &step->members[i];
        int32_t sample = next_sample, taken = 0;
        if (member->samples) next_sample += 1 + member->drafts;
        Slot *slot = present(batch, member);
        if (!slot) continue;
        Sequence *sequence = slot->sequence;
        int32_t before = sequence->committed;
        sequence->committed += member->count;
        if (member->samples) {
            taken = accept(batch, member, ids + member->drafts_from, sampled, sample, results);
            if (!slot->ended) sequence->pending--;
        }
        if (taken) {
            results->keys[results->count] = sequence->key;
            results->counts[results->count++] = (uint8_t)taken;
        }
        if (member->drafts) {
            int32_t right = taken ? taken - 1 : 0;
            sequence->committed += right;
            sequence->computed -= member->drafts - right;
            slot->drafts = false;
            if (right < member->drafts) results->rewound[results->rewound_count++] = member->slot;
        }
        if (sequence->committed / batch->block_size != before / batch->block_size)
            results->filled[results->filled_count++] = member->slot;
    }
}

int32_t cancel_step(Batch *batch, const StepPlan *step, int32_t *slots)
{
    int32_t count = 0;
    for (int32_t i = 0; i < step->members_count; i++) {
        Slot *slot = present(batch, &step->members[i]);
        if (!slot) continue;
        slot->ended = true;
        slot->sequence->pending = 0;
        slots[count++] = step->members[i].slot;
    }
    resend_tables(batch); /* the writes of this step may not have reached the device */
    return count;
}
