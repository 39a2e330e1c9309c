# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: annotation_typing=False, auto_pickle=False, autotestdict=False
"""The persistent batch: what the sequences that hold KV cache need for a step, kept where only changes are written.

Owns, by slot: token counts, the block tables of every KV cache group, the sampling columns; the order of the
slots in use; and the arenas in which steps are handed to the device. A sequence keeps its slot as long as it is
in the batch, so its columns never move: `condense` compacts an order of 4 bytes a row. Knows no block pool, no
scheduler's reasons, no device; token ids it reads through a pointer to the sequence's own.

Promises:

- A method that raises has changed nothing, but for memory that nobody sees. One Python call is one step under
  the GIL; nothing here runs code of the caller's between its checks and its changes.
- Nothing is cleared when a sequence leaves: what is stale is not read.
- After `condense`, rows 0 … num_reqs − 1 hold one slot each; rows and slots map to each other both ways.
- A step's rows: first those of one token that sample (decodes), then the others; both in the order of rows.
- A step is one run of int32 words in one arena, views included, so that one copy takes it to a device. It
  begins with a header of 16 words: tokens, rows, decodes, samples, words of block writes, number of block
  writes, groups, then the nine `Offsets`, in words from the arena's beginning. Where all rows sample, their slots
  are the samples' slots, and are there once.
- Block table changes are staged and travel with the next step, at most one write a (group, slot); who replays
  them has every entry that a token can still see. A step that was cancelled may not have arrived, so after it
  all rows are staged again.
- Two steps may be under way. A token that is not known yet is a placeholder: it counts, and its id in the next
  step is −1 − (its index among the samples of the step before). Results go to the stay in the slot that the
  step was prepared for, never to the slot's next occupant.
- What has ended (finished, failed, cancelled) takes no part in any later step, nor gets late results; it is for
  the caller to remove it.
- A step writes only what changed. A row that is in every step as a decode rides along: its counts follow from
  how many steps there were, and are written down when somebody asks, or when it gets off.
- Of a rider's tokens, the latest few may be beside those of its neighbours only; they are in its own buffer as soon
  as somebody asks for them, and when it gets off.
- What a commit answers stays as it is for as long as anybody keeps it; its memory is used again after that.
- Memory is touched when it is used: long tables and arenas cost address space until then. What is touched at
  every step anyway is on large pages, where the system has them.
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
@cython.no_gc  # no cycle passes through it; and it must not be emptied before `__dealloc__` has let all states go
cdef class InputBatch:
    """At most `slots` sequences, each of at most `max_model_len` tokens, in blocks of `block_size`.

    `windows`: one a KV cache group: None for full attention, else how many tokens a token sees, itself
    included. `eos_token_ids` end every sequence that does not ignore them. `arenas`: writable buffers of at
    least `arena_size(...)` bytes each, or how many to make; with only one, only one step can be under way.
    """

    cdef Stay *stays
    cdef PyObject **states          # by slot; each holds a reference
    cdef Columns columns
    cdef int32_t *occupied          # by slot: 1, or 0 where nobody is
    cdef int32_t *rows              # slot by row
    cdef uint64_t *holes            # bits by row
    cdef int32_t rows_end           # rows in use, holes included
    cdef int32_t hole_count
    cdef int32_t hole_hint          # no hole in a word before this one
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
    cdef int32_t slots_end                  # beyond all that were ever in use
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
    cdef c_array keys_lent                  # of the latest commit's answer; others may still be looking at it
    cdef c_array tokens_lent                # also that
    cdef object all_samples                 # 0, 1, 2 …: as many as the latest step that was committed had
    cdef Record records[STEPS_AT_ONCE]
    cdef Riders riders
    # Whose turn it is, when not all can have it
    cdef int64_t last_served                # serial of the last one chosen
    cdef int64_t last_chosen                # as that, when a step is made of the survey; 0: all are
    # Scratch
    cdef Turn *turns                        # [slots]
    cdef int64_t *admissions                # [slots]
    cdef int32_t *scratch                   # [groups + 1, slots]
    cdef uint8_t *named                     # by slot, clear between calls
    cdef uint64_t *unlike                   # bits by row, clear between calls
    cdef uint64_t *due                      # bits by row
    cdef uint8_t *marks                     # [slots] and some
    cdef int32_t *odd                       # rows; [slots], as all of these
    cdef int32_t *found                     # rows, or places in a run
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
        """Bytes that the largest step can take: every token of the budget, and every row's blocks written anew."""
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
        """By slot, as of now: prompt and output, placeholders included."""
        write_counts(self)
        return self.num_tokens_view

    @property
    def num_computed_tokens(self) -> memoryview:
        """By slot, as of now: tokens in the KV cache when all prepared steps are done."""
        write_counts(self)
        return self.num_computed_tokens_view

    @property
    def output_tokens(self) -> memoryview:
        """By slot, as of now: committed tokens of output."""
        write_counts(self)
        return self.output_tokens_view

    @property
    def counters(self):
        return Counters(*[self.need_counts[i] for i in range(NEEDS)])

    # Membership

    def add_request(self, int64_t slot, SequenceState state not None, tuple block_ids not None) -> int:
        """Puts a sequence in an empty slot and returns its row: the lowest hole, else the end.

        `block_ids`: one list, or buffer of int32, a group; together they hold what is computed already. In a
        windowed group, blocks that no token will see any more may be −1. ValueError for a slot that is occupied
        or does not exist, a sequence that is in a batch or could not go on, and blocks that are too many or few.
        """
        return add_state(self, slot, state, block_ids)

    def add_requests(self, slots, states, block_ids) -> None:
        """As `add_request` for each of them: a list, or a buffer of int32, of slots, and as many of the others.

        For all or, when it raises, none.
        """
        add_all(self, slots, states, block_ids)

    def remove_request(self, int64_t slot) -> None:
        """Takes a sequence out of its slot; its row becomes a hole.

        Steps under way compute for nothing: their tokens are dropped, its placeholders go. ValueError for a slot
        without one.
        """
        stay_of(self, slot)
        leave(self, slot)

    def remove_requests(self, slots) -> None:
        """As `remove_request` for each of them (a list, or a buffer of int32); for all or, when it raises, none."""
        remove_all(self, slots)

    def condense(self) -> list[tuple[int, int]]:
        """Fills the holes below `num_reqs` from the end of the order: (source row, target row), in the order done."""
        cdef list moves = []
        compact(self, moves)
        return moves

    def order(self) -> list[int]:
        """Slots by row; −1: a hole."""
        return [self.rows[row] for row in range(self.rows_end)]

    def row_of(self, int64_t slot) -> int:
        return stay_of(self, slot).row

    def state(self, int64_t slot):
        stay_of(self, slot)
        return <object>self.states[slot]

    # Block tables

    def append_block_ids(self, int64_t slot, tuple block_ids not None) -> None:
        """Adds blocks to the end of a slot's row in each group's table: one list, or buffer of int32, a group."""
        append_blocks(self, slot, block_ids)

    def append_one_each(self, slots, tuple block_ids not None) -> None:
        """Adds one block to each slot's row in each group: lists, or buffers of int32, as long as `slots`.

        For all or, when it raises, none.
        """
        append_one_block_each(self, slots, block_ids)

    def block_ids(self, int64_t slot) -> tuple[list[int], ...]:
        """By group; what has slid out is −1."""
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
        """Takes the blocks that no later token can see out of a slot's row: their ids, which are −1 from now on."""
        return slide_out(self, slot, group)

    def block_table(self, int64_t group) -> memoryview:
        """The host's table of a group, int32 [slots, blocks a row]; of a row, `block_counts` entries mean anything."""
        check_group(self, group)
        return self.table_views[group]

    # A step

    def survey(self, max_rows):
        """Sets `num_scheduled`: 1 for who has one token to compute, 0 for all others; says who has more.

        Of more than `max_rows` that could take part, those scheduled longest ago are chosen; a newcomer counts as
        scheduled in the latest step, and prefills count. Of several scheduled equally long ago, those whose turn is
        next: in the order of admission, round and round, after the one who was chosen last for a step that not
        all could be in. Who has its last token under way takes no part.
        """
        if max_rows < 0:
            raise ValueError(f"max_rows must not be negative, not {max_rows}")
        self.last_chosen = 0
        if self.num_reqs > max_rows:
            return survey_some(self, min(max_rows, self.slots))
        return survey_all(self)

    def schedule(self, slots, counts) -> None:
        """Sets `num_scheduled` of these slots: lists, or buffers of int32, of the same length."""
        set_counts(self, slots, counts)

    def prepare_inputs(self, num_scheduled=None):
        """Begins a step of so many tokens a slot (int32 [slots]; None: the batch's own column); None if all are 0.

        Condenses first. What is scheduled counts as computed from now on; a row that reaches its last token
        samples, and has a placeholder until the commit. ValueError for a count that is negative or more than is
        left, a row that takes no part, blocks that do not hold the tokens, more than `max_batched_tokens`;
        RuntimeError when two steps are under way already.
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
        """Ends the oldest step under way by what it sampled: int32 [S], where what is no token failed.

        Appends each token in place of its placeholder and says whose last it was. ValueError for another step,
        or a wrong number of samples.
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
        """Ends a step under way, not always the oldest, that went wrong: the slots of its rows that are still
        there. They take no part from now on. ValueError for a step that is not under way."""
        return cancel(self, step)


include "inputbatch/places.pxi"
include "inputbatch/membership.pxi"
include "inputbatch/tables.pxi"
include "inputbatch/survey.pxi"
include "inputbatch/prepare.pxi"
include "inputbatch/commit.pxi"
