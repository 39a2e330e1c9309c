# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: annotation_typing=False, auto_pickle=False, autotestdict=False
"""The persistent batch: the step inputs of the sequences that hold KV cache, updated only where they change.

Owns, by slot: token counts, the block tables of every KV cache group, the sampling columns; the order of the
slots in use; and the arenas in which steps go to the device. A sequence keeps its slot while it is in the
batch, so its columns never move: `condense` compacts an order of 4 bytes a row. The batch has no notion of
block pools, scheduling policies or devices. It reads token ids through a pointer to the sequence's buffer.

Promises:

- A method that raises has changed nothing, except memory that is not visible. A Python call is atomic under
  the GIL; no code of the caller runs between its checks and its changes.
- Nothing is cleared when a sequence leaves: stale data is not read.
- After `condense`, rows 0 … num_reqs − 1 hold one slot each; rows and slots map to each other both ways.
- A step's rows: first the decodes (one token, which samples), then the others; both in the order of rows.
- A step is one range of int32 words in one arena, views included, so that one copy takes it to a device. It
  begins with a header of 16 words: tokens, rows, decodes, samples, words of block writes, number of block
  writes, groups, then the nine `Offsets`, in words from the arena's beginning. If all rows sample, `slots`
  and `sample_slots` are the same words.
- Block table changes are staged and sent with the next step, at most one write for each (group, slot). A
  device that replays them has every entry that a token can still attend to. A cancelled step may not have
  arrived, so after it all rows are staged again.
- Two steps may be under way. A token that is not known yet is a placeholder: it counts, and its id in the
  next step is −1 − (its index among the samples of the previous step). Results go to the sequence that the
  step was prepared for, never to a later one in the same slot.
- A sequence that has ended (finished, failed, cancelled) takes no part in later steps and gets no late
  results. The caller must remove it.
- A step writes only what changed. A steady decode is a row that is in every step as a decode: its counts
  follow from the number of steps, and are written only when they are read or when it stops being one.
- The latest few tokens of a steady decode may be only in a ring that all rows share. They are copied to its
  own buffer when they are read, or when it stops being one.
- The arrays that a commit returns do not change while anything refers to them; then their memory is reused.
- Memory is touched when it is used: long tables and arenas cost only address space until then. Memory that
  every step touches is on large pages, where the system has them.
"""

import contextlib
import mmap
from array import array
from operator import index
from typing import NamedTuple

from cpython.array cimport array as c_array, clone, resize_smart
from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_ND, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release,
    PyObject_CheckBuffer, PyObject_GetBuffer,
)
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.long cimport PyLong_AsLongAndOverflow, PyLong_AsUnsignedLongLongMask, PyLong_Check
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.object cimport PyObject, PyObject_Size, Py_SIZE
from cpython.ref cimport Py_DECREF, Py_INCREF
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.stddef cimport ptrdiff_t
from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t, int64_t, uint8_t, uint64_t
from libc.string cimport memcpy, memset
cimport cython


include "inputbatch/answers.pxi"
include "inputbatch/loops.pxi"
include "inputbatch/memory.pxi"
include "inputbatch/turns.pxi"
include "inputbatch/riders.pxi"
include "inputbatch/sequence.pxi"
include "inputbatch/step.pxi"


@cython.final
@cython.no_gc  # it is in no reference cycle, and must not be cleared before `__dealloc__` releases all states
cdef class InputBatch:
    """A batch of at most `slots` sequences of at most `max_model_len` tokens, in blocks of `block_size`.

    `windows`: by KV cache group, None for full attention, else how many tokens a token attends to, itself
    included. `eos_token_ids` end every sequence that does not ignore them. `arenas`: writable buffers of at
    least `arena_size(...)` bytes each, or their number; with only one, only one step can be under way.
    """

    cdef Stay *stays
    cdef PyObject **states          # by slot; each holds a reference
    cdef Columns columns
    cdef int32_t *occupied          # by slot: 1, or 0 if it is empty
    cdef int32_t *rows              # slot by row
    cdef uint64_t *holes            # bits by row
    cdef int32_t rows_end           # rows in use, holes included
    cdef int32_t hole_count
    cdef int32_t hole_hint          # words before this one have no hole
    cdef int32_t need_counts[NEEDS]
    # Block tables
    cdef int32_t groups
    cdef int32_t *tables[GROUPS_AT_MOST]    # [slots, table_columns]
    cdef int32_t windows[GROUPS_AT_MOST]    # 0: full attention
    cdef Held *held                         # [groups, slots]
    cdef uint64_t *staged                   # bits by slot: [groups, bit_words]
    cdef int32_t bit_words
    cdef int32_t table_columns
    cdef int32_t largest_block
    # Sizes
    cdef readonly int32_t slots
    cdef readonly int32_t num_reqs
    cdef int32_t slots_end                  # above all slots that were ever in use
    cdef int32_t max_batched_tokens
    cdef int32_t max_model_len
    cdef int32_t block_size
    cdef int32_t block_shift                # NONE: block_size is no power of two
    cdef int32_t vocab_size
    cdef int32_t *eos
    cdef int32_t eos_count
    # Steps
    cdef int64_t serials
    cdef int64_t steps
    cdef list arenas
    cdef int32_t *arena_words[64]
    cdef int32_t arena_last
    cdef int32_t steps_at_once
    cdef Step oldest
    cdef Step newest                        # the other one under way
    cdef c_array keys_lent                  # of the latest commit's result; the caller may still refer to it
    cdef c_array tokens_lent                # the same
    cdef object all_samples                 # 0, 1, 2 …: one for each sample of the latest committed step
    cdef Record records[STEPS_AT_ONCE]
    cdef Riders riders
    # Round robin for steps that cannot have all rows
    cdef int64_t last_served                # serial of the last sequence chosen
    cdef int64_t last_chosen                # the next `last_served`, if a step is prepared; 0: all chosen
    # Scratch
    cdef Turn *turns                        # [slots]
    cdef int64_t *admissions                # [slots]
    cdef int32_t *scratch                   # [groups + 1, slots]
    cdef uint8_t *named                     # by slot, clear between calls
    cdef uint64_t *unlike                   # bits by row, clear between calls
    cdef uint64_t *due                      # bits by row
    cdef uint8_t *marks                     # [slots + MARKS_MORE]
    cdef int32_t *odd                       # rows; [slots], as all of these
    cdef int32_t *found                     # rows, or indices in a run
    cdef int32_t *filled                    # slots
    cdef int32_t *boarders                  # slots
    cdef Ending *endings
    # Memory and its views
    cdef list memory
    cdef tuple table_views
    cdef readonly object num_scheduled
    cdef object num_tokens_view
    cdef readonly object num_prompt_tokens
    cdef object num_computed_tokens_view
    cdef object output_tokens_view
    cdef readonly object max_tokens
    cdef readonly object min_tokens
    cdef readonly object top_k
    cdef readonly object logprobs
    cdef readonly object temperature
    cdef readonly object top_p
    cdef readonly object min_p
    cdef readonly object presence_penalty
    cdef readonly object frequency_penalty
    cdef readonly object repetition_penalty
    cdef readonly object seed

    def __cinit__(
        self,
        *,
        int64_t slots,
        int64_t max_batched_tokens,
        int64_t max_model_len,
        int64_t block_size,
        int64_t vocab_size,
        windows=(None,),
        eos_token_ids=(),
        arenas=2,
    ):
        cdef int32_t group
        windows = tuple(windows)
        size = self.arena_size(
            slots=slots,
            max_batched_tokens=max_batched_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
            groups=len(windows),
        )
        check_range("vocab_size", vocab_size, 1, INT32_MAX)
        self.groups = len(windows)
        for group in range(self.groups):
            if windows[group] is not None:
                check_range("a window", windows[group], 1, INT32_MAX)
                self.windows[group] = windows[group]
        self.slots = slots
        self.max_batched_tokens = max_batched_tokens
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.block_shift = NONE
        if block_size & (block_size - 1) == 0:
            self.block_shift = lowest_bit(block_size)
        self.vocab_size = vocab_size
        self.table_columns = columns_for(max_model_len, block_size)
        self.largest_block = (<int64_t>INT32_MAX + 1) // block_size - 1
        self.bit_words = (slots + 63) // 64
        begin_memory(self)
        begin_views(self)
        begin_arenas(self, arenas, size)
        ids = tuple(eos_token_ids)
        self.eos = <int32_t *>PyMem_Malloc(len(ids) * sizeof(int32_t))
        if self.eos == NULL:
            raise MemoryError
        self.eos_count = read_ids(ids, self.eos, len(ids), INT32_MIN, INT32_MAX, "eos_token_ids")

    def __dealloc__(self):
        cdef int32_t slot
        if self.states != NULL:
            for slot in range(self.slots_end):
                if self.states[slot] != NULL:
                    let_go(self, slot)
        PyMem_Free(self.eos)

    @staticmethod
    def arena_size(
        *,
        int64_t slots,
        int64_t max_batched_tokens,
        int64_t max_model_len,
        int64_t block_size,
        int64_t groups=1,
    ) -> int:
        """Return the bytes of the largest step: all tokens of the budget, and all blocks of all rows."""
        check_range("slots", slots, 1, SLOTS_AT_MOST)
        check_range("max_batched_tokens", max_batched_tokens, 1, WORDS_AT_MOST)
        check_range("max_model_len", max_model_len, 2, WORDS_AT_MOST)
        check_range("block_size", block_size, 1, SLOTS_AT_MOST)
        check_range("the number of groups", groups, 1, GROUPS_AT_MOST)
        rows = min(slots, max_batched_tokens)
        writes = int(groups) * slots * (4 + columns_for(max_model_len, block_size))
        words = HEADER + (2 + groups) * max_batched_tokens + 5 * rows + 1 + writes
        if words > WORDS_AT_MOST:
            raise ValueError(f"a step of {words} words would be too large: lower slots or max_model_len")
        return 4 * words

    @property
    def steps_under_way(self) -> int:
        return under_way(self)

    @property
    def num_tokens(self) -> memoryview:
        """By slot, current: tokens of prompt and output, placeholders included."""
        write_counts(self)
        return self.num_tokens_view

    @property
    def num_computed_tokens(self) -> memoryview:
        """By slot, current: tokens in the KV cache when all prepared steps are done."""
        write_counts(self)
        return self.num_computed_tokens_view

    @property
    def output_tokens(self) -> memoryview:
        """By slot, current: committed tokens of output."""
        write_counts(self)
        return self.output_tokens_view

    @property
    def counters(self):
        return Counters(*[self.need_counts[i] for i in range(NEEDS)])

    # Membership

    def add_request(self, int64_t slot, SequenceState state not None, tuple block_ids not None) -> int:
        """Put a sequence into an empty slot and return its row: the lowest hole, else the end.

        `block_ids`: by group, one list or buffer of int32; they hold all tokens that are computed already. In
        a group with a window, blocks that no token attends to any more may be −1. ValueError for a slot that
        is occupied or does not exist, a sequence in a batch or unable to go on, or too many or few blocks.
        """
        return add_state(self, slot, state, block_ids)

    def add_requests(self, slots, states, block_ids) -> None:
        """Call `add_request` for each of `slots` (a list or a buffer of int32), `states` and `block_ids`.

        All have the same length. Add all, or none if it raises.
        """
        add_all(self, slots, states, block_ids)

    def remove_request(self, int64_t slot) -> None:
        """Remove a sequence from its slot; its row becomes a hole.

        Its results of steps under way are dropped, and so are its placeholders. ValueError for an empty slot.
        """
        stay_of(self, slot)
        leave(self, slot)

    def remove_requests(self, slots) -> None:
        """Remove the sequences of all `slots` (a list or a buffer of int32), or none if it raises."""
        remove_all(self, slots)

    def condense(self) -> list[tuple[int, int]]:
        """Fill the holes below `num_reqs` with the last rows; return the moves (source, target) in order."""
        cdef list moves = []
        compact(self, moves)
        return moves

    def order(self) -> list[int]:
        """Return the slots by row; −1: a hole."""
        return [self.rows[row] for row in range(self.rows_end)]

    def row_of(self, int64_t slot) -> int:
        return stay_of(self, slot).row

    def state(self, int64_t slot):
        stay_of(self, slot)
        return <object>self.states[slot]

    # Block tables

    def append_block_ids(self, int64_t slot, tuple block_ids not None) -> None:
        """Append blocks to a slot's row in each group's table: by group, one list or buffer of int32."""
        append_blocks(self, slot, block_ids)

    def append_one_each(self, slots, tuple block_ids not None) -> None:
        """Append one block to each slot's row in each group: lists or buffers of int32, as long as `slots`.

        Append all, or none if it raises.
        """
        append_one_block_each(self, slots, block_ids)

    def block_ids(self, int64_t slot) -> tuple[list[int], ...]:
        """Return the block ids by group; those that have slid out of the window are −1."""
        cdef int32_t group, column
        cdef int32_t *row
        stay_of(self, slot)
        lists = []
        for group in range(self.groups):
            row = self.tables[group] + slot * self.table_columns
            lists.append(
                [row[column] for column in range(self.held[<int64_t>group * self.slots + slot].count)]
            )
        return tuple(lists)

    def block_counts(self, int64_t slot) -> tuple[int, ...]:
        stay_of(self, slot)
        return tuple(
            [self.held[<int64_t>group * self.slots + slot].count for group in range(self.groups)]
        )

    def slide(self, int64_t slot, int64_t group) -> list[int]:
        """Replace the blocks that no later token attends to by −1 in a slot's row, and return their ids."""
        return slide_out(self, slot, group)

    def block_table(self, int64_t group) -> memoryview:
        """Return a group's table, int32 [slots, blocks a row]; of a row, `block_counts` entries are valid."""
        check_group(self, group)
        return self.table_views[group]

    # A step

    def survey(self, max_rows):
        """Set `num_scheduled` to 1 for slots with one token to compute, to 0 for others; return a `Survey`.

        At most `max_rows` take part, prefills included: those scheduled least recently. A newcomer counts as
        scheduled in the latest step. Ties are broken round robin in the order of admission, after the
        sequence chosen last when not all could be. A sequence whose last token is under way takes no part.
        """
        if max_rows < 0:
            raise ValueError(f"max_rows must not be negative, not {max_rows}")
        self.last_chosen = 0
        if self.num_reqs > max_rows:
            return survey_some(self, min(max_rows, self.slots))
        return survey_all(self)

    def schedule(self, slots, counts) -> None:
        """Set `num_scheduled` of these slots: lists or buffers of int32, of the same length."""
        set_counts(self, slots, counts)

    def prepare_inputs(self, num_scheduled=None):
        """Begin a step of `num_scheduled` tokens (int32 [slots]; None: the batch's own); None if all are 0.

        Condenses first. Scheduled tokens count as computed from now on. A row that reaches its last token
        samples, and has a placeholder until the commit. ValueError for a count that is negative or more than
        is left, a row that takes no part, blocks that do not hold the tokens, or more than
        `max_batched_tokens`; RuntimeError if two steps (one, with one arena) are under way already.
        """
        cdef Py_buffer buffer
        if num_scheduled is None:
            return prepare_step(self, self.columns.num_scheduled)
        int32_buffer(num_scheduled, &buffer, "num_scheduled")
        try:
            if buffer.shape[0] != self.slots:
                raise ValueError(f"num_scheduled must have {self.slots} entries, not {buffer.shape[0]}")
            return prepare_step(self, <int32_t *>buffer.buf)
        finally:
            PyBuffer_Release(&buffer)

    def commit_tokens(self, Step step not None, sampled):
        """End the oldest step under way with its samples, int32 [S]; an id that is no token means failure.

        Replace each placeholder by its token, and report which sequences have ended. ValueError for another
        step, or a wrong number of samples.
        """
        cdef Py_buffer buffer
        if step is not self.oldest:
            raise ValueError("only the oldest step under way can be committed")
        int32_buffer(sampled, &buffer, "sampled")
        try:
            if buffer.shape[0] != step.samples:
                raise ValueError(f"the step has {step.samples} samples, not {buffer.shape[0]}")
            return commit_step(self, step, <int32_t *>buffer.buf)
        finally:
            PyBuffer_Release(&buffer)

    def cancel_step(self, Step step not None) -> list[int]:
        """End a failed step under way, the oldest or not; return the slots of its rows still present.

        These take no part from now on. ValueError for a step that is not under way.
        """
        return cancel(self, step)


include "inputbatch/places.pxi"
include "inputbatch/membership.pxi"
include "inputbatch/tables.pxi"
include "inputbatch/survey.pxi"
include "inputbatch/prepare.pxi"
include "inputbatch/commit.pxi"
