# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: annotation_typing=False, auto_pickle=False, autotestdict=False
"""The persistent batch: the step inputs of the sequences that hold KV cache.

Owns, by slot: token counts and the block tables of every KV cache group; the order of the slots in use; and
the arenas in which steps go to the device. This file checks what callers pass and owns the memory;
`inputbatch/batch.h` declares the structures and the C functions that do the work. The batch has no notion
of block pools, scheduling policies, sampling parameters or devices.

Promises:

- A method that raises has changed nothing, except memory that is not visible. A Python call is atomic under
  the GIL; no code of the caller runs between its checks and its changes.
- Nothing is cleared when a sequence leaves: stale data is not read.
- After `condense`, rows 0 … num_reqs − 1 hold one slot each; rows and slots map to each other both ways.
- A step's rows: first the decodes (one token, which samples), then the others; both in the order of rows.
- A row may have drafts: tokens after its last known one that may turn out right. It samples after that one and
  after each draft, and gets the samples up to the first that differs from its draft. Then the tokens in its KV
  cache are those it has got, as if it had taken a step for each. With `one_sample_a_row`, it is written as the
  row of its known tokens and a row for each draft, all of the same slot.
- A step is one range of int32 words in one arena, views included, so that one copy takes it to a device. It
  begins with a header of 16 words: tokens, rows, decodes, samples, words of block writes, number of block
  writes, groups, then the nine `Offsets`, in words from the arena's beginning. If all rows sample, `slots`
  and `sample_slots` are the same words.
- Block table changes are sent with the next step, at most one write for each (group, slot). A device that
  replays them has every entry that a token can still attend to. A cancelled step may not have arrived, so
  after it all rows are sent again.
- Two steps may be under way. A sequence takes no part in another while drafts of it are under way. A token that is not known yet is a placeholder: it counts, and its id in the
  next step is −1 − (its index among the samples of the previous step). Results go to the sequence that the
  step was prepared for, never to a later one in the same slot.
- A sequence that has ended (finished, failed, cancelled) takes no part in later steps and gets no late
  results. The caller must remove it.
- Memory is touched when it is used: long tables and arenas cost only address space until then.
"""

import mmap
from array import array
from collections import namedtuple
from typing import NamedTuple

from cpython.array cimport array as c_array, clone, resize_smart
from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_WRITABLE, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer
from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy
cimport cython

from inputbatch.arguments cimport check_lists, check_range, int32_buffer, read_ids
from inputbatch.batch cimport *


cdef enum:
    STEPS_AT_ONCE = 2
    SLOTS_AT_MOST = 1 << 20
    WORDS_AT_MOST = 1 << 30  # of an arena or a table, so that an offset is an int32 and sums do not overflow
    OUTPUT_ROOM_AT_FIRST = 256
    DRAFTS_AT_MOST = 64  # of a row

cdef enum CountedTokens: ALL, PROMPT, COMPUTED, OUTPUT

cdef dict REFUSALS = {
    BAD_COUNT: "a count must not be negative, nor more than are left to compute",
    CANNOT_CONTINUE: "the sequence has ended, or will with the steps under way",
    BAD_DRAFTS: "drafts must be ids after the last known token, which leave one below the sequence's limit",
    NO_BLOCKS: "its blocks do not hold them",
    TOO_MANY_TOKENS: "a step cannot have that many in all",
}


class Survey(NamedTuple):
    """The sequences that can be scheduled.

    `decodes`: how many slots were given their one token. `prefills` (int32): slots with more to compute, in
    the order of admission. `short` (int32): slots of decodes with no space for that token in their blocks, by row.
    """

    decodes: int
    prefills: array
    short: array


class SlotChanges(NamedTuple):
    """The slots with a sequence added or removed after a version of the batch, up to `version`.

    A slot is in `added` if a sequence is in it now, also if another one was removed from it before.
    """

    version: int
    removed: list[int]
    added: list[int]


class Committed(NamedTuple):
    """The results of a committed step.

    Only sequences still in the batch are named; they stay in it. N of them got n tokens.

    keys: their keys, int64 [N].
    counts: how many tokens each got, uint8 [N].
    tokens: the tokens of the first one, then those of the next, int32 [n].
    samples: the tokens' indices among the step's samples, int32 [n], ascending.
    finished: (slot, reason, index among the N); reason 1: an end-of-sequence or stop id, 2: max_tokens or
        max_model_len.
    failed: (slot, index among the samples): the id was not a token.
    filled: slots in which the commit filled another block, by row of the step.
    rewound: slots with drafts that were not accepted, by row of the step.
    """

    keys: memoryview
    counts: memoryview
    tokens: memoryview
    samples: memoryview
    finished: list[tuple[int, int, int]]
    failed: list[tuple[int, int]]
    filled: array
    rewound: array


include "inputbatch/memory.pxi"
include "inputbatch/sequence.pxi"
include "inputbatch/step.pxi"


@cython.final
@cython.no_gc  # it is in no reference cycle, and must not be cleared before `__dealloc__` releases all states
cdef class InputBatch:
    """A batch of at most `slots` sequences of at most `max_model_len` tokens, in blocks of `block_size`.

    `windows`: by KV cache group, None for full attention, else how many tokens a token attends to, itself
    included. `eos_token_ids` end every sequence that does not ignore them. `arenas`: writable buffers of at
    least `arena_size(...)` bytes each, or their number; with only one, only one step can be under way.

    A row has at most `most_drafts` drafts: those of a slot are the first `num_drafts[slot]` of `drafts[slot]`, int32
    views that the caller writes, as it does `num_scheduled`. `one_sample_a_row`: no row is to sample more than once.
    """

    cdef Batch batch
    cdef list states            # by slot: a `SequenceState` or None
    cdef list arenas
    cdef int32_t arena_last
    cdef list under_way         # steps, the oldest first
    cdef int32_t (*endings)[3]  # scratch, [slots]
    cdef tuple table_views
    cdef readonly object num_scheduled
    cdef readonly object num_drafts
    cdef readonly object drafts

    def __cinit__(
        self,
        *,
        int64_t slots, int64_t max_batched_tokens, int64_t max_model_len, int64_t block_size, int64_t vocab_size,
        windows=(None,), eos_token_ids=(), arenas=2, int64_t most_drafts=0, bint one_sample_a_row=False,
    ):
        cdef Batch *batch = &self.batch
        cdef int32_t group
        windows, eos_token_ids = tuple(windows), tuple(eos_token_ids)
        size = self.arena_size(
            slots=slots, max_batched_tokens=max_batched_tokens, max_model_len=max_model_len,
            block_size=block_size, groups=len(windows), most_drafts=most_drafts,
        )
        check_range("vocab_size", vocab_size, 1, INT32_MAX)
        batch.slots, batch.groups = slots, len(windows)
        batch.max_batched_tokens, batch.max_model_len = max_batched_tokens, max_model_len
        batch.block_size, batch.vocab_size = block_size, vocab_size
        batch.columns = columns_for(max_model_len, block_size)
        batch.largest_block = (<int64_t>INT32_MAX + 1) // block_size - 1
        batch.by_slot = <Slot *>allocated(slots, sizeof(Slot))
        batch.rows = <int32_t *>allocated(6 * slots, sizeof(int32_t))
        batch.scratch = batch.rows + slots  # [2, slots]
        self.endings = <int32_t (*)[3]>(batch.rows + 3 * slots)
        batch.turns = <Turn *>allocated(slots, sizeof(Turn))
        batch.eos = <int32_t *>allocated(len(eos_token_ids), sizeof(int32_t))
        batch.eos_count = read_ids(
            eos_token_ids, batch.eos, len(eos_token_ids), INT32_MIN, INT32_MAX, "eos_token_ids"
        )
        self.states = [None] * slots
        self.under_way = []
        self.num_scheduled = zeroed(4 * slots).cast("i")
        batch.num_scheduled = <int32_t *>address_of(self.num_scheduled)
        batch.most_drafts, batch.one_sample_a_row = most_drafts, one_sample_a_row
        self.num_drafts = zeroed(4 * slots).cast("i")
        self.drafts = zeroed(4 * slots * max(1, most_drafts)).cast("i", (slots, max(1, most_drafts)))
        batch.num_drafts = <int32_t *>address_of(self.num_drafts)
        batch.drafts = <int32_t *>address_of(self.drafts)
        views = []
        for group in range(batch.groups):
            if windows[group] is not None:
                check_range("a window", windows[group], 1, INT32_MAX)
                batch.tables[group].window = windows[group]
            batch.tables[group].rows = <TableRow *>allocated(slots, sizeof(TableRow))
            views.append(zeroed(4 * slots * batch.columns).cast("i", (slots, batch.columns)))
            batch.tables[group].blocks = <int32_t *>address_of(views[group])
        self.table_views = tuple(views)
        self.arenas = checked_arenas(arenas, size)
        self.arena_last = len(self.arenas) - 1

    def __dealloc__(self):
        cdef int32_t group
        if self.states is not None:
            for state in self.states:
                if state is not None:
                    remove_sequence(&self.batch, (<SequenceState>state).sequence.slot)
        for group in range(self.batch.groups):
            free(self.batch.tables[group].rows)
        free(self.batch.by_slot)
        free(self.batch.rows)
        free(self.batch.turns)
        free(self.batch.eos)

    @staticmethod
    def arena_size(
        *,
        int64_t slots, int64_t max_batched_tokens, int64_t max_model_len, int64_t block_size, int64_t groups=1,
        int64_t most_drafts=0,
    ) -> int:
        """Return the bytes of the largest step: all tokens of the budget, and all blocks of all rows."""
        check_range("slots", slots, 1, SLOTS_AT_MOST)
        check_range("max_batched_tokens", max_batched_tokens, 1, WORDS_AT_MOST)
        check_range("max_model_len", max_model_len, 2, WORDS_AT_MOST)
        check_range("block_size", block_size, 1, SLOTS_AT_MOST)
        check_range("the number of groups", groups, 1, GROUPS_AT_MOST)
        check_range("most_drafts", most_drafts, 0, DRAFTS_AT_MOST)
        rows = min(slots * (1 + most_drafts), max_batched_tokens)
        writes = int(groups) * slots * (4 + columns_for(max_model_len, block_size))
        words = HEADER + (2 + groups) * max_batched_tokens + 5 * rows + 1 + writes
        if words > WORDS_AT_MOST:
            raise ValueError(f"a step of {words} words would be too large: lower slots or max_model_len")
        return 4 * words

    @property
    def slots(self) -> int:
        return self.batch.slots

    @property
    def num_reqs(self) -> int:
        return self.batch.sequences

    @property
    def steps_under_way(self) -> int:
        return len(self.under_way)

    # Token counts by slot: copies of the current values; 0 for empty slots

    @property
    def num_tokens(self) -> memoryview:
        """By slot: tokens of prompt and output, placeholders included."""
        return self.counts_by_slot(ALL)

    @property
    def num_prompt_tokens(self) -> memoryview:
        return self.counts_by_slot(PROMPT)

    @property
    def num_computed_tokens(self) -> memoryview:
        """By slot: tokens in the KV cache when all prepared steps are done."""
        return self.counts_by_slot(COMPUTED)

    @property
    def output_tokens(self) -> memoryview:
        """By slot: committed tokens of output."""
        return self.counts_by_slot(OUTPUT)

    cdef object counts_by_slot(self, CountedTokens which):
        cdef c_array counts = clone(INT32S, self.batch.slots, True)
        cdef Sequence *sequence
        cdef int32_t slot
        for slot in range(self.batch.slots_end):
            sequence = self.batch.by_slot[slot].sequence
            if sequence != NULL:
                counts.data.as_ints[slot] = (
                    num_tokens(sequence) if which == ALL
                    else sequence.prompt_length if which == PROMPT
                    else sequence.computed if which == COMPUTED
                    else sequence.length - sequence.prompt_length
                )
        return memoryview(counts)

    # Membership

    def changes(self, int64_t since):
        """Return the `SlotChanges` after version `since`; 0: all since the beginning."""
        cdef int32_t *added = self.batch.scratch
        cdef int32_t *removed = self.batch.scratch + self.batch.slots
        cdef int32_t removed_count
        cdef int32_t added_count = list_changes(&self.batch, since, removed, &removed_count, added)
        return SlotChanges(
            self.batch.version,
            [removed[i] for i in range(removed_count)],
            [added[i] for i in range(added_count)],
        )

    def add_request(self, int64_t slot, SequenceState state not None, tuple block_ids not None) -> int:
        """Put a sequence into an empty slot and return its row: the lowest hole, else the end.

        `block_ids`: by group, one list or buffer of int32; they hold all tokens that are computed already. In
        a group with a window, blocks that no token attends to any more may be −1. ValueError for a slot that
        is occupied or does not exist, a sequence in a batch or unable to go on, or too many or few blocks.
        """
        cdef Batch *batch = &self.batch
        cdef Sequence *sequence = &state.sequence
        cdef int32_t counts[GROUPS_AT_MOST]
        cdef int32_t group
        check_range("slot", slot, 0, self.batch.slots - 1)
        check_lists(block_ids, batch.groups)
        for group in range(batch.groups):
            if batch.by_slot[slot].sequence != NULL:
                raise ValueError(f"slot {slot} is occupied")
            counts[group] = self.read_blocks(slot, group, 0, sequence.committed, block_ids[group])
            if <int64_t>counts[group] * batch.block_size < sequence.computed:
                raise ValueError(f"{counts[group]} blocks do not hold {sequence.computed} computed tokens")
        if batch.by_slot[slot].sequence != NULL:
            raise ValueError(f"slot {slot} is occupied")  # by code that a buffer's exporter ran
        if sequence.slot != NONE:
            raise ValueError("the sequence is in a batch already")
        if sequence.length >= batch.max_model_len:
            raise ValueError(f"{sequence.length} tokens leave no room for one more below {batch.max_model_len}")
        if sequence.computed >= sequence.length:
            raise ValueError("no token of the sequence is left to compute: rewind it first")
        if sequence.length - sequence.prompt_length >= sequence.max_tokens:
            raise ValueError(f"the sequence has its {sequence.max_tokens} tokens of output")
        if sequence.largest >= batch.vocab_size:
            raise ValueError(f"token id {sequence.largest} is outside 0...{batch.vocab_size - 1}")
        for group in range(batch.groups):
            batch.tables[group].rows[slot] = TableRow(counts[group], 0, 0)
        self.states[slot] = state
        return add_sequence(batch, slot, sequence)

    def remove_request(self, int64_t slot) -> None:
        """Remove a sequence from its slot; its row becomes a hole.

        Its results of steps under way are dropped, and so are its placeholders. ValueError for an empty slot.
        """
        self.occupied(slot)
        remove_sequence(&self.batch, slot)
        self.states[slot] = None

    def condense(self) -> list[tuple[int, int]]:
        """Fill the holes below `num_reqs` with the last rows; return the moves (source, target) in order."""
        cdef int32_t source, target
        cdef list moves = []
        while move_last_row(&self.batch, &source, &target):
            moves.append((source, target))
        return moves

    def order(self) -> list[int]:
        """Return the slots by row; −1: a hole."""
        return [self.batch.rows[row] for row in range(self.batch.rows_end)]

    def row_of(self, int64_t slot) -> int:
        return self.occupied(slot).row

    def state(self, int64_t slot):
        self.occupied(slot)
        return self.states[slot]

    # Block tables

    def append_block_ids(self, int64_t slot, tuple block_ids not None) -> None:
        """Append blocks to a slot's row in each group's table: by group, one list or buffer of int32."""
        cdef Batch *batch = &self.batch
        cdef Slot *here = self.occupied(slot)
        cdef int64_t version = here.version
        cdef int32_t room = here.room
        cdef int32_t counts[GROUPS_AT_MOST]
        cdef int32_t group
        check_lists(block_ids, batch.groups)
        for group in range(batch.groups):
            counts[group] = self.read_blocks(
                slot, group, batch.tables[group].rows[slot].count, here.sequence.committed, block_ids[group]
            )
            if here.version != version or here.room != room:  # by code that a buffer's exporter ran
                raise ValueError(f"slot {slot} was changed meanwhile")
        for group in range(batch.groups):
            batch.tables[group].rows[slot].count += counts[group]
        update_room(batch, slot)

    def block_ids(self, int64_t slot) -> tuple[array, ...]:
        """Return the block ids by group, arrays of int32; those that have slid out of the window are −1."""
        cdef int32_t group
        self.occupied(slot)
        return tuple([
            int32s(self.table_row(group, slot), self.batch.tables[group].rows[slot].count)
            for group in range(self.batch.groups)
        ])

    def block_counts(self, int64_t slot) -> tuple[int, ...]:
        self.occupied(slot)
        return tuple([self.batch.tables[group].rows[slot].count for group in range(self.batch.groups)])

    def slide(self, int64_t slot, int64_t group) -> list[int]:
        """Replace the blocks that no later token attends to by −1 in a slot's row, and return their ids."""
        self.occupied(slot)
        check_range("group", group, 0, self.batch.groups - 1)
        cdef c_array freed = clone(INT32S, self.batch.tables[group].rows[slot].count, False)
        cdef int32_t count = slide_window(&self.batch, slot, group, <int32_t *>freed.data.as_ints)
        return freed[:count].tolist()

    def take_unused_blocks(self, int64_t slot) -> tuple[list[int], ...]:
        """Take the blocks that hold none of a slot's tokens from its row in each table; return their ids by group."""
        cdef Slot *here = self.occupied(slot)
        cdef int32_t columns = columns_for(num_tokens(here.sequence), self.batch.block_size)
        cdef int32_t group, count
        cdef list taken = []
        for group in range(self.batch.groups):
            surplus = clone(INT32S, max(0, self.batch.tables[group].rows[slot].count - columns), False)
            count = cut_blocks(&self.batch, slot, group, columns, <int32_t *>(<c_array>surplus).data.as_ints)
            taken.append(surplus.tolist())
        update_room(&self.batch, slot)
        return tuple(taken)

    def block_table(self, int64_t group) -> memoryview:
        """Return a group's table, int32 [slots, blocks a row]; of a row, `block_counts` entries are valid."""
        check_range("group", group, 0, self.batch.groups - 1)
        return self.table_views[group]

    # A step

    def survey(self, max_rows):
        """Set `num_scheduled` to 1 for slots with one token to compute, to 0 for others; return a `Survey`.

        Sets `num_drafts` to 0.
        At most `max_rows` take part, prefills included: those scheduled least recently. A newcomer counts as
        scheduled in the latest step. Ties are broken round robin in the order of admission, after the
        sequence chosen last when not all could be. A sequence takes no part while its last token is under way.
        """
        cdef int32_t *prefills = self.batch.scratch
        cdef int32_t *short = self.batch.scratch + self.batch.slots
        cdef int32_t prefill_count, short_count
        if max_rows < 0:
            raise ValueError(f"max_rows must not be negative, not {max_rows}")
        max_rows = min(max_rows, self.batch.slots)
        decodes = survey_rows(&self.batch, max_rows, prefills, &prefill_count, short, &short_count)
        return Survey(decodes, int32s(prefills, prefill_count), int32s(short, short_count))

    def look_up_drafts(self, int64_t ngram, int64_t budget) -> array:
        """Set drafts of the slots that are scheduled with one token: what followed their last `ngram` tokens before.

        At most `budget` drafts in all. Returns the slots without blocks for their drafts, by row.
        """
        cdef int32_t *short = self.batch.scratch
        cdef int32_t short_count
        check_range("ngram", ngram, 1, INT32_MAX)
        look_up_drafts(&self.batch, ngram, min(max(budget, 0), WORDS_AT_MOST), short, &short_count)
        return int32s(short, short_count)

    def prepare_inputs(self):
        """Begin a step of `num_scheduled` tokens by slot; None if all are 0.

        Condenses first. Scheduled tokens count as computed from now on. A row that reaches its last token
        samples, and has a placeholder until the commit. Its drafts count as computed, too. ValueError for a
        count that is negative or more than is left, a row that takes no part, drafts that are no tokens or do not
        follow the last known one, blocks that do not hold the tokens, or more than `max_batched_tokens`; RuntimeError if two steps (one, with one arena) are under way already.
        """
        cdef Step step = Step.__new__(Step)
        cdef SequenceState state
        cdef int32_t slot = NONE, row, source, target
        cdef int status
        steps_at_once = min(STEPS_AT_ONCE, len(self.arenas))
        if len(self.under_way) == steps_at_once:
            raise RuntimeError(f"{steps_at_once} steps are under way already")
        status = plan_step(&self.batch, &step.plan, &slot)
        if status != STEP_OK:
            raise ValueError(f"slot {slot}, {self.batch.num_scheduled[slot]} tokens: {REFUSALS[status]}")
        if step.plan.rows == 0:
            return None
        step.plan.members = <Member *>allocated(step.plan.members_count, sizeof(Member))
        for row in range(self.batch.rows_end):
            slot = self.batch.rows[row]
            if slot != NONE and self.batch.num_scheduled[slot] != 0:
                state = self.states[slot]
                # The tokens that it will sample.
                if num_tokens(&state.sequence) + self.batch.most_drafts >= state.sequence.capacity:
                    state.reserve(2 * <int64_t>state.sequence.capacity)
        taken = [(<Step>other).arena_index for other in self.under_way]
        self.under_way.append(step)
        # From here on nothing can fail.
        step.arena_index = (self.arena_last + 1) % len(self.arenas)
        if step.arena_index in taken:
            step.arena_index = (step.arena_index + 1) % len(self.arenas)
        self.arena_last = step.arena_index
        step.words = self.arenas[step.arena_index]
        while move_last_row(&self.batch, &source, &target):
            pass
        write_step(&self.batch, &step.plan, <int32_t *>address_of(step.words))
        step.number, step.tokens, step.rows = step.plan.number, step.plan.tokens, step.plan.rows
        step.decodes, step.samples, step.drafts = step.plan.decodes, step.plan.samples, step.plan.drafts
        step.processes_logits = step.plan.processes_logits
        return step

    def commit_tokens(self, Step step not None, sampled):
        """End the oldest step under way with its samples, int32 [S]; an id that is not a token means failure.

        Append accepted samples to their sequences, and report which sequences have ended. A rejected draft reduces the
        computed tokens of its sequence; `take_unused_blocks` returns the blocks that it took.
        ValueError for another step, or a wrong number of samples.
        """
        cdef Py_buffer buffer
        cdef Results results
        cdef int32_t *words
        cdef int32_t i, samples = step.plan.samples, members = step.plan.members_count
        cdef c_array keys = clone(INT64S, members, False), counts = clone(UINT8S, members, False)
        cdef c_array tokens = clone(INT32S, samples, False), indices = clone(INT32S, samples, False)
        cdef c_array filled = clone(INT32S, members, False), rewound = clone(INT32S, members, False)
        int32_buffer(sampled, &buffer, "sampled")
        try:
            if not self.under_way or self.under_way[0] is not step:
                raise ValueError("only the oldest step under way can be committed")
            if buffer.shape[0] != samples:
                raise ValueError(f"the step has {samples} samples, not {buffer.shape[0]}")
            del self.under_way[0]
            results = Results(
                keys=<int64_t *>keys.data.as_longlongs, counts=counts.data.as_uchars, count=0,
                tokens=<int32_t *>tokens.data.as_ints, samples=<int32_t *>indices.data.as_ints, tokens_count=0,
                filled=<int32_t *>filled.data.as_ints, filled_count=0,
                rewound=<int32_t *>rewound.data.as_ints, rewound_count=0, ended=self.endings, ended_count=0,
            )
            words = <int32_t *>address_of(step.words)
            commit_step(&self.batch, &step.plan, words, <int32_t *>buffer.buf, &results)
        finally:
            PyBuffer_Release(&buffer)
        resize_smart(keys, results.count)
        resize_smart(counts, results.count)
        resize_smart(tokens, results.tokens_count)
        resize_smart(indices, results.tokens_count)
        resize_smart(filled, results.filled_count)
        resize_smart(rewound, results.rewound_count)
        finished, failed = [], []
        for i in range(results.ended_count):
            slot, reason, place = results.ended[i][0], results.ended[i][1], results.ended[i][2]
            if reason == FAILED:
                failed.append((slot, place))
            else:
                finished.append((slot, reason, place))
        return Committed(
            memoryview(keys), memoryview(counts), memoryview(tokens), memoryview(indices), finished, failed, filled,
            rewound,
        )

    def cancel_step(self, Step step not None) -> list[int]:
        """End a failed step under way, the oldest or not; return the slots of its rows still present.

        These take no part from now on. ValueError for a step that is not under way.
        """
        if step not in self.under_way:
            raise ValueError("the step is not under way")
        self.under_way.remove(step)
        count = cancel_step(&self.batch, &step.plan, self.batch.scratch)
        return [self.batch.scratch[i] for i in range(count)]

    # Helpers

    cdef int32_t *table_row(self, int32_t group, int64_t slot) noexcept:
        return self.batch.tables[group].blocks + slot * self.batch.columns

    cdef int32_t read_blocks(self, int64_t slot, int32_t group, int32_t start, int32_t committed, ids) except -1:
        # Read ids into the table's row from column `start` on, which is not in use yet.
        cdef int32_t *blocks = self.table_row(group, slot)
        cdef int32_t hidden = hidden_blocks(&self.batch, group, committed)
        cdef int32_t least = NONE if hidden > start else 0
        cdef int32_t room = self.batch.columns - start
        cdef int32_t count = read_ids(ids, blocks + start, room, least, self.batch.largest_block, "block ids")
        cdef int32_t column
        for column in range(max(hidden, start), start + count):
            if blocks[column] < 0:
                raise ValueError(f"block {column} of group {group} is still seen and must not be -1")
        return count

    cdef Slot *occupied(self, int64_t slot) except NULL:
        check_range("slot", slot, 0, self.batch.slots - 1)
        if self.batch.by_slot[slot].sequence == NULL:
            raise ValueError(f"slot {slot} is empty")
        return &self.batch.by_slot[slot]
