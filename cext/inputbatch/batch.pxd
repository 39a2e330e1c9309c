"""The structures and functions of `batch.h`."""

from libc.stdint cimport int32_t, int64_t, uint8_t


cdef extern from "inputbatch/batch.h":
    enum: NONE, HEADER, SECTIONS, GROUPS_AT_MOST, FAILED
    enum: INPUT_IDS, POSITIONS, SLOT_MAPPING, QUERY_STARTS, SEQUENCE_LENGTHS, SLOTS, SAMPLE_TOKENS, SAMPLE_SLOTS
    enum: BLOCK_WRITES
    enum: STEP_OK, BAD_COUNT, CANNOT_CONTINUE, BAD_DRAFTS, NO_BLOCKS, TOO_MANY_TOKENS

    ctypedef struct Sequence:
        int64_t key
        int32_t *ids
        int32_t capacity, prompt_length, length, pending, computed, committed, max_tokens, min_tokens, slot, largest
        int32_t *stops
        int32_t stop_count
        bint ignore_eos, processes_logits

    ctypedef struct Slot:
        Sequence *sequence
        int64_t version
        int32_t row, room

    ctypedef struct TableRow:
        int32_t count, slid, unsent

    ctypedef struct Table:
        int32_t *blocks
        int32_t window
        TableRow *rows

    ctypedef struct Turn: pass
    ctypedef struct Member: pass

    ctypedef struct Batch:
        int32_t slots, groups, columns, block_size, vocab_size, largest_block, max_batched_tokens, max_model_len
        Slot *by_slot
        int32_t *num_scheduled
        int32_t most_drafts
        int32_t *num_drafts
        int32_t *drafts
        bint one_sample_a_row
        Table tables[GROUPS_AT_MOST]
        int32_t *eos
        int32_t eos_count
        int32_t *rows
        int32_t rows_end, sequences, slots_end
        int64_t version
        Turn *turns
        int32_t *scratch

    ctypedef struct StepPlan:
        int64_t number
        int32_t groups, members_count, tokens, rows, decodes, samples, drafts, end
        bint processes_logits
        int32_t starts[SECTIONS]
        Member *members

    ctypedef struct Results:
        int64_t *keys
        uint8_t *counts
        int32_t count
        int32_t *tokens
        int32_t *samples
        int32_t tokens_count
        int32_t *filled
        int32_t filled_count
        int32_t *rewound
        int32_t rewound_count
        int32_t (*ended)[3]
        int32_t ended_count

    int32_t num_tokens(const Sequence *sequence)
    int32_t tokens_left(const Sequence *sequence)
    int32_t add_sequence(Batch *batch, int32_t slot, Sequence *sequence)
    void remove_sequence(Batch *batch, int32_t slot)
    bint move_last_row(Batch *batch, int32_t *source, int32_t *target)
    int32_t survey_rows(Batch *batch, int32_t max_rows, int32_t *prefills, int32_t *prefill_count,
                        int32_t *full, int32_t *full_count)
    int32_t list_changes(const Batch *batch, int64_t since, int32_t *removed, int32_t *removed_count,
                         int32_t *added)
    void update_room(Batch *batch, int32_t slot)
    int32_t hidden_blocks(const Batch *batch, int32_t group, int32_t committed)
    int32_t slide_window(Batch *batch, int32_t slot, int32_t group, int32_t *freed)
    int32_t cut_blocks(Batch *batch, int32_t slot, int32_t group, int32_t columns, int32_t *freed)
    int32_t look_up_drafts(Batch *batch, int32_t ngram, int32_t budget, int32_t *full, int32_t *full_count)
    int plan_step(const Batch *batch, StepPlan *step, int32_t *slot)
    void write_step(Batch *batch, StepPlan *step, int32_t *words)
    void commit_step(Batch *batch, const StepPlan *step, const int32_t *words, const int32_t *sampled,
                     Results *results)
    int32_t cancel_step(Batch *batch, const StepPlan *step, int32_t *slots)
