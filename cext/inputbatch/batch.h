/* The persistent batch: sequences by slot, their order by row, their block tables, and the steps over them.
 *
 * No function here allocates memory, calls Python or fails halfway: what can be refused is checked first.
 * Functions that the caller must check for are said to return false, or a status. */
#ifndef FAIRLEAD_BATCH_H
#define FAIRLEAD_BATCH_H

#include <stdbool.h>
#include <stdint.h>

enum {
    NONE = -1,           /* a row without a slot; a block that has slid out of its window */
    HEADER = 16,         /* words before the first section of a step */
    SECTIONS = 9,
    GROUPS_AT_MOST = 16, /* of KV caches */
};

/* The sections of a step, in the order of their offsets in the header. */
enum {
    INPUT_IDS, POSITIONS, SLOT_MAPPING, QUERY_STARTS, SEQUENCE_LENGTHS, SLOTS, SAMPLE_TOKENS, SAMPLE_SLOTS,
    BLOCK_WRITES
};

enum { FAILED, STOP, LENGTH }; /* why a sequence ended */

/* A sequence, in a batch or not. Its memory belongs to the caller. Lengths are in tokens. */
typedef struct {
    int64_t key;
    int32_t *ids;           /* prompt and output */
    int32_t capacity;       /* of `ids` */
    int32_t prompt_length;
    int32_t length;         /* committed tokens, prompt and output */
    int32_t pending;        /* placeholders: tokens that steps under way will sample */
    int32_t computed;       /* tokens in the KV cache when all prepared steps are done, drafts included */
    int32_t committed;      /* tokens in the KV cache now */
    int32_t max_tokens;
    int32_t min_tokens;
    int32_t slot;           /* NONE: in no batch */
    int32_t largest;        /* of the prompt's ids */
    int32_t *stops;         /* ids that end it besides the end-of-sequence ids */
    int32_t stop_count;
    bool ignore_eos;
    bool processes_logits;  /* whether its logits are processed on the host */
} Sequence;

typedef struct {
    Sequence *sequence;     /* NULL: the slot is empty */
    int64_t version;        /* number of the latest addition or removal; identifies the slot's sequence */
    int64_t last_scheduled; /* number of its latest step, or of the batch's latest when it was added */
    int32_t row;
    int32_t limit;          /* length at which the sequence ends */
    int32_t room;           /* tokens that the blocks of every group hold */
    int32_t sample;         /* index of its newest placeholder among its step's samples */
    bool drafts;            /* a step under way has drafts of it */
    bool ended;             /* it has finished, failed or been cancelled, and is to be removed */
    bool left_out;          /* scratch of `survey_rows` */
} Slot;

/* A slot's row in a block table. */
typedef struct {
    int32_t count;          /* blocks */
    int32_t slid;           /* columns that have slid out */
    int32_t unsent;         /* the first column that no step has sent to the device */
} TableRow;

typedef struct {
    int32_t *blocks;        /* [slots, columns] */
    int32_t window;         /* tokens that a token attends to, itself included; 0: all */
    TableRow *rows;         /* [slots] */
} Table;

typedef struct {
    int64_t last_scheduled;
    int64_t place;          /* in the order of admission, beginning with the sequence that is next in turn */
    int32_t slot;
} Turn;

typedef struct {
    int32_t slots, groups, columns, block_size, vocab_size, largest_block;
    int32_t max_batched_tokens, max_model_len;
    Slot *by_slot;
    int32_t *num_scheduled; /* [slots] */
    int32_t most_drafts;    /* of a row; 0: `num_drafts` is not read */
    int32_t *num_drafts;    /* [slots] */
    int32_t *drafts;        /* [slots, most_drafts], at least one column */
    bool one_sample_a_row;  /* what a row would sample after its first sample becomes rows of one token */
    Table tables[GROUPS_AT_MOST];
    int32_t *eos;
    int32_t eos_count;
    int32_t *rows;          /* slot by row; NONE: a hole */
    int32_t rows_end;       /* rows in use, holes included */
    int32_t sequences;
    int32_t slots_end;      /* above all slots that were ever in use */
    int32_t first_hole;     /* no row before this one is a hole */
    int64_t version;        /* number of the latest addition or removal */
    int64_t steps;          /* number of the latest step */
    int64_t last_served;    /* version of the last sequence chosen when not all rows could take part */
    int64_t last_chosen;    /* the next `last_served`, if a step is prepared; 0: all could take part */
    Turn *turns;            /* scratch, [slots] */
    int32_t *scratch;       /* [2, slots] */
} Batch;

/* A sequence in a step: how many of its tokens are computed, and the drafts after them. With `samples` it samples
 * once after its last token, and once after each draft. */
typedef struct {
    int64_t version;
    int32_t slot;
    int32_t count, drafts;
    int32_t drafts_from;    /* index of its first draft among the step's tokens */
    bool samples;
} Member;

typedef struct {
    int64_t number;
    int32_t groups, members_count, tokens, rows, decodes, samples, drafts;
    bool one_sample_each;   /* each row samples exactly once */
    bool processes_logits;  /* of a row that samples */
    int32_t starts[SECTIONS];
    int32_t end;
    Member *members;        /* [members_count], in the order of their rows; belongs to the caller */
} StepPlan;

/* The results of a commit, in arrays of the caller: an entry of `tokens` and `samples` for each token, of the others
 * for each sequence. */
typedef struct {
    int64_t *keys;
    uint8_t *counts;        /* tokens of each */
    int32_t count;
    int32_t *tokens, *samples, tokens_count;
    int32_t *filled, filled_count;
    int32_t *rewound, rewound_count;
    int32_t (*ended)[3], ended_count; /* slot, reason, index among the keys (FAILED: the samples) */
} Results;

static inline int32_t num_tokens(const Sequence *sequence) { return sequence->length + sequence->pending; }
static inline int32_t tokens_left(const Sequence *sequence) { return num_tokens(sequence) - sequence->computed; }

/* Whether it can be in another step: it has not ended, nor will with the steps under way, and no drafts of it are
 * under way: the number of accepted drafts is not known yet. */
static inline bool can_continue(const Slot *slot)
{
    return !slot->ended && !slot->drafts && num_tokens(slot->sequence) < slot->limit;
}

/* rows.c */

/* Add a sequence to an empty slot with filled table rows; return its row: the lowest hole, or the end. */
int32_t add_sequence(Batch *batch, int32_t slot, Sequence *sequence);
/* Remove a sequence. Its row becomes a hole; its results of steps under way will be dropped. */
void remove_sequence(Batch *batch, int32_t slot);
/* Move the last row to the lowest hole. Return false if no hole is left, and then none is at the end either. */
bool move_last_row(Batch *batch, int32_t *source, int32_t *target);
/* Set `num_scheduled` to 1 for slots with one token left, else to 0, and `num_drafts` to 0. Return how many; list the others that take
 * part by admission, and, by row, those of the first that have full blocks. Both lists have room for all slots. */
int32_t survey_rows(Batch *batch, int32_t max_rows, int32_t *prefills, int32_t *prefill_count, int32_t *full,
                    int32_t *full_count);
/* List the slots that lost or got a sequence after version `since`; return how many got one. */
int32_t list_changes(const Batch *batch, int64_t since, int32_t *removed, int32_t *removed_count, int32_t *added);

/* drafts.c */

/* Set the drafts of the sequences that decode, whose last token is known, by prompt lookup: what followed their last
 * `ngram` tokens before. Return the number of drafts, at most `budget`; list the slots without blocks for their drafts. */
int32_t look_up_drafts(Batch *batch, int32_t ngram, int32_t budget, int32_t *full, int32_t *full_count);

/* tables.c */

/* Update how many tokens a slot's blocks hold. */
void update_room(Batch *batch, int32_t slot);
/* Return how many blocks of a group no token from `committed` on attends to. */
int32_t hidden_blocks(const Batch *batch, int32_t group, int32_t committed);
/* Drop the blocks that have slid out of the window; return how many, with their ids in `freed`. */
int32_t slide_window(Batch *batch, int32_t slot, int32_t group, int32_t *freed);
/* Drop the blocks from column `columns` on; return how many, with their ids in `freed`. Call `update_room` then. */
int32_t cut_blocks(Batch *batch, int32_t slot, int32_t group, int32_t columns, int32_t *freed);
/* Write the changes since the last call, as in `Step.block_writes`; return the number of words. */
int32_t send_changes(Batch *batch, int32_t *words, int32_t *writes);
/* Send all table rows again. */
void resend_tables(Batch *batch);

/* step.c */

typedef enum { STEP_OK, BAD_COUNT, CANNOT_CONTINUE, BAD_DRAFTS, NO_BLOCKS, TOO_MANY_TOKENS } StepStatus;

/* Check `num_scheduled` and the drafts, and count the step's rows and tokens. If refused, `slot` is the offending one. */
StepStatus plan_step(const Batch *batch, StepPlan *step, int32_t *slot);
/* Write a planned step into `words`. There must be no holes, and room for each sample in its sequence. */
void write_step(Batch *batch, StepPlan *step, int32_t *words);
/* Give a step's samples to its sequences, and report which have ended. A sequence gets the sample after its last
 * token, and the one after each draft as long as the draft is what it got before. `words` are the step's. */
void commit_step(Batch *batch, const StepPlan *step, const int32_t *words, const int32_t *sampled, Results *results);
/* End the sequences of a step without results. Return how many were still present, with their slots. */
int32_t cancel_step(Batch *batch, const StepPlan *step, int32_t *slots);

#endif
