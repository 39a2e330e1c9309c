/* Drafts by prompt lookup: what followed a sequence's last tokens when they occurred before. */
#include "inputbatch/batch.h"

#include <string.h>

/* Write at most `most` drafts of a sequence; return how many. The latest earlier occurrence of its last `ngram` tokens
 * decides. Where fewer tokens follow it, the drafts go on with themselves, as in a text that repeats a short piece. */
static int32_t look_up(const Sequence *sequence, int32_t ngram, int32_t most, int32_t *drafts)
{
    const int32_t *ids = sequence->ids, length = sequence->length, last = ids[length - 1];
    if (length <= ngram) return 0;
    for (int32_t end = length - 1; end >= ngram; end--) {
        if (ids[end - 1] != last) continue;
        if (memcmp(ids + end - ngram, ids + length - ngram, ngram * sizeof *ids)) continue;
        for (int32_t i = 0; i < most; i++)
            drafts[i] = end + i < length ? ids[end + i] : drafts[end + i - length];
        return most;
    }
    return 0;
}

int32_t look_up_drafts(Batch *batch, int32_t ngram, int32_t budget, int32_t *full, int32_t *full_count)
{
    int32_t all = 0;
    *full_count = 0;
    for (int32_t row = 0; row < batch->rows_end && all < budget; row++) {
        int32_t slot = batch->rows[row];
        if (slot == NONE || batch->num_scheduled[slot] != 1) continue;
        const Slot *here = &batch->by_slot[slot];
        const Sequence *sequence = here->sequence;
        if (tokens_left(sequence) != 1 || sequence->pending) continue;
        int32_t most = batch->most_drafts;
        if (most > budget - all) most = budget - all;
        if (most > here->limit - sequence->length - 1) most = here->limit - sequence->length - 1;
        int32_t count = look_up(sequence, ngram, most, batch->drafts + (int64_t)slot * batch->most_drafts);
        batch->num_drafts[slot] = count;
        all += count;
        if (count + 1 > here->room - sequence->computed) full[(*full_count)++] = slot;
    }
    return all;
}
