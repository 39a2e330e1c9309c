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
  writes, groups, then the nine `Offsets`, in words from the arena's beginning.
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
- Memory is touched when it is used: tables and arenas cost address space until then.
"""

import mmap
from array import array
from operator import index
from typing import NamedTuple

from cpython.array cimport array as c_array, clone, resize
from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_ND, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release,
    PyObject_CheckBuffer, PyObject_GetBuffer,
)
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE, PyList_New, PyList_SET_ITEM
from cpython.long cimport PyLong_AsLongAndOverflow, PyLong_AsUnsignedLongLongMask, PyLong_Check
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF, Py_XDECREF
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t, int64_t, uint8_t, uint64_t
from libc.string cimport memcpy
cimport cython


class Counters(NamedTuple):
    """How many sequences in the batch need each: kept up to date, never counted.

    `sampled`: a temperature above 0; `top_p`, `top_k`, `min_p`: that and a bound that bounds; `penalties`:
    any; `min_tokens`: still fewer tokens of output, committed ones, than that.
    """

    sampled: int
    top_p: int
    top_k: int
    min_p: int
    penalties: int
    biased: int
    min_tokens: int
    logprobs: int


class Survey(NamedTuple):
    """What could be scheduled: how many slots were given their one token; the slots with more to compute, in
    order of admission; of the former, the slots whose blocks do not hold that token, by row."""

    decodes: int
    prefills: list[int]
    short: list[int]


class Offsets(NamedTuple):
    """Where a step's sections begin, in int32 words from the beginning of its arena."""

    input_ids: int
    positions: int
    slot_mapping: int
    query_starts: int
    sequence_lengths: int
    slots: int
    sample_rows: int
    sample_slots: int
    block_writes: int


class Committed(NamedTuple):
    """What a step's results did.

    `keys` (int64), `tokens` and `samples` (int32) [n]: who got which token, and which of the step's samples
    that was, ascending. `finished`: (slot, reason, index among the n); reason 1: an end-of-sequence or stop
    id, 2: max_tokens or max_model_len. `failed`: (slot, index among the samples): the id was no token.
    `filled`: slots in whose committed tokens a further block became full, in no particular order. They name
    only who is still there, and leave it there.
    """

    keys: memoryview
    tokens: memoryview
    samples: memoryview
    finished: list[tuple[int, int, int]]
    failed: list[tuple[int, int]]
    filled: list[int]


cdef enum:
    NONE = -1               # a row without a slot, a block that has slid out, a sequence without a slot
    HEADER = 16             # words before the first section
    SECTIONS = 9
    STEPS_AT_ONCE = 2
    GROUPS_AT_MOST = 16
    SLOT_BITS = 20
    SLOTS_AT_MOST = 1 << SLOT_BITS
    WORDS_AT_MOST = 1 << 30  # of an arena or a table, so that an offset is an int32 and sums do not overflow
    OUTPUT_ROOM_AT_FIRST = 256
    NEEDS = 8
    FAILED = 0
    STOP = 1
    LENGTH = 2
    CACHE_LINE = 64
    AHEAD = 4               # newcomers whose memory is on its way
    MARKS_MORE = 64         # bytes that `list_marks` may look at beyond the last
    ROUNDS_AT_MOST = 1 << 29

cdef enum:
    NOT_RIDING = -0x7FFFFFFF - 1

cdef enum Need:
    SAMPLED = 1
    TOP_P = 2
    TOP_K = 4
    MIN_P = 8
    PENALTIES = 16
    BIASED = 32
    MIN_TOKENS = 64
    LOGPROBS = 128


include "inputbatch/loops.pxi"
include "inputbatch/memory.pxi"
include "inputbatch/turns.pxi"
include "inputbatch/riders.pxi"
include "inputbatch/sequence.pxi"
include "inputbatch/step.pxi"


cdef struct Columns:
    int32_t *num_scheduled
    int32_t *num_tokens             # this and the next two: when they are asked for
    int32_t *num_computed_tokens
    int32_t *output_tokens
    int32_t *num_prompt_tokens
    int32_t *max_tokens
    int32_t *min_tokens
    int32_t *top_k
    int32_t *logprobs
    float *temperature
    float *top_p
    float *min_p
    float *presence_penalty
    float *frequency_penalty
    float *repetition_penalty
    uint64_t *seed
    int64_t *keys
    uint8_t *needs


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
    cdef PyObject **numbers         # by slot, from its first use on: its number, as Python has it
    cdef Columns columns
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
    cdef int32_t *block_counts_by_slot      # [groups, slots], as the next three
    cdef int32_t *slid                      # columns that have slid out
    cdef int32_t *staged_first              # the first column that the device has not seen,
    cdef uint64_t *staged                   # where the bit of the slot is set: [groups, bit_words]
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
    cdef Record records[STEPS_AT_ONCE]
    cdef Riders riders
    # Whose turn it is, when not all can have it
    cdef int64_t last_served                # serial of the last one chosen
    cdef int64_t last_chosen                # as that, when a step is made of the survey; 0: all are
    # Scratch
    cdef Turn *turns                        # [slots]
    cdef int64_t *admissions                # [slots]
    cdef int32_t *scratch                   # [groups + 1, slots]
    cdef uint64_t *named                    # bits by slot, clear between calls
    cdef uint8_t *marks                     # [slots] and some
    cdef int32_t *odd                       # rows; [slots], as all of these
    cdef int32_t *found                     # rows, or places in a run
    cdef int32_t *filled                    # slots
    cdef int32_t *boarders                  # slots
    cdef Ending *endings
    # Memory and its views
    cdef object memory
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
        self.begin_memory()
        self.begin_views()
        self.begin_arenas(arenas, size)
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
                    self.let_go(slot)
                Py_XDECREF(self.numbers[slot])
        PyMem_Free(self.eos)

    cdef int begin_memory(self) except -1:
        # One region for all that has a size by slot. Its first cache line is the page's, so each stay has its own.
        cdef int64_t slots = self.slots
        cdef int64_t by_group = self.groups * slots
        cdef int64_t words = self.bit_words
        sizes = [
            slots * <int64_t>sizeof(Stay),
            slots * <int64_t>sizeof(void *),
            slots * <int64_t>sizeof(void *),
            slots * <int64_t>sizeof(Turn),
            8 * slots,
            4 * slots,
            8 * words,
            8 * words,
            8 * words * self.groups,
            4 * by_group,
            4 * by_group,
            4 * by_group,
            4 * (by_group + slots),
            slots + MARKS_MORE,
            slots * <int64_t>sizeof(Ending),
        ]
        sizes += [4 * slots] * 4
        sizes += [4 * slots] * (6 + self.groups) + [8 * slots] * 2
        sizes += [4 * slots, 4 * slots, slots * <int64_t>sizeof(Run)] * STEPS_AT_ONCE
        cdef int64_t end = 0
        places = []
        for size in sizes:
            places.append(end)
            end = aligned(end + <int64_t>size)
        self.memory = [zeroed(end)]
        cdef char *start = <char *>address_of(self.memory[0])
        self.stays = <Stay *>(start + <int64_t>places[0])
        self.states = <PyObject **>(start + <int64_t>places[1])
        self.numbers = <PyObject **>(start + <int64_t>places[2])
        self.turns = <Turn *>(start + <int64_t>places[3])
        self.admissions = <int64_t *>(start + <int64_t>places[4])
        self.rows = <int32_t *>(start + <int64_t>places[5])
        self.holes = <uint64_t *>(start + <int64_t>places[6])
        self.named = <uint64_t *>(start + <int64_t>places[7])
        self.staged = <uint64_t *>(start + <int64_t>places[8])
        self.staged_first = <int32_t *>(start + <int64_t>places[9])
        self.block_counts_by_slot = <int32_t *>(start + <int64_t>places[10])
        self.slid = <int32_t *>(start + <int64_t>places[11])
        self.scratch = <int32_t *>(start + <int64_t>places[12])
        self.marks = <uint8_t *>(start + <int64_t>places[13])
        self.endings = <Ending *>(start + <int64_t>places[14])
        self.odd = <int32_t *>(start + <int64_t>places[15])
        self.found = <int32_t *>(start + <int64_t>places[16])
        self.filled = <int32_t *>(start + <int64_t>places[17])
        self.boarders = <int32_t *>(start + <int64_t>places[18])
        self.begin_riders(start, places[19:])
        return 0

    cdef int begin_riders(self, char *start, list places) except -1:
        cdef Riders *riders = &self.riders
        cdef int32_t group, i
        riders.origin = <int32_t *>(start + <int64_t>places[0])
        riders.due = <int32_t *>(start + <int64_t>places[1])
        riders.closer = <int32_t *>(start + <int64_t>places[2])
        riders.edge = <int32_t *>(start + <int64_t>places[3])
        riders.full = <int32_t *>(start + <int64_t>places[4])
        riders.next_id = <int32_t *>(start + <int64_t>places[5])
        for group in range(self.groups):
            riders.lift[group] = <int32_t *>(start + <int64_t>places[6 + group])
        places = places[6 + self.groups :]
        riders.keys = <int64_t *>(start + <int64_t>places[0])
        riders.ends = <int32_t **>(start + <int64_t>places[1])
        for i in range(STEPS_AT_ONCE):
            self.records[i].slots = <int32_t *>(start + <int64_t>places[3 * i + 2])
            self.records[i].counts = <int32_t *>(start + <int64_t>places[3 * i + 3])
            self.records[i].runs = <Run *>(start + <int64_t>places[3 * i + 4])
        return 0

    cdef int begin_views(self) except -1:
        cdef Columns *columns = &self.columns
        cdef int32_t group
        self.num_scheduled, columns.num_scheduled = self.column("i"), <int32_t *>self.latest()
        self.num_tokens_view, columns.num_tokens = self.column("i"), <int32_t *>self.latest()
        self.num_prompt_tokens, columns.num_prompt_tokens = self.column("i"), <int32_t *>self.latest()
        self.num_computed_tokens_view, columns.num_computed_tokens = self.column("i"), <int32_t *>self.latest()
        self.output_tokens_view, columns.output_tokens = self.column("i"), <int32_t *>self.latest()
        self.max_tokens, columns.max_tokens = self.column("i"), <int32_t *>self.latest()
        self.min_tokens, columns.min_tokens = self.column("i"), <int32_t *>self.latest()
        self.top_k, columns.top_k = self.column("i"), <int32_t *>self.latest()
        self.logprobs, columns.logprobs = self.column("i"), <int32_t *>self.latest()
        self.temperature, columns.temperature = self.column("f"), <float *>self.latest()
        self.top_p, columns.top_p = self.column("f"), <float *>self.latest()
        self.min_p, columns.min_p = self.column("f"), <float *>self.latest()
        self.presence_penalty, columns.presence_penalty = self.column("f"), <float *>self.latest()
        self.frequency_penalty, columns.frequency_penalty = self.column("f"), <float *>self.latest()
        self.repetition_penalty, columns.repetition_penalty = self.column("f"), <float *>self.latest()
        self.seed, columns.seed = self.column("Q"), <uint64_t *>self.latest()
        self.column("q")
        columns.keys = <int64_t *>self.latest()
        self.column("B")
        columns.needs = <uint8_t *>self.latest()
        views = []
        for group in range(self.groups):
            region = zeroed(4 * <int64_t>self.slots * self.table_columns)
            self.memory.append(region)
            self.tables[group] = <int32_t *>address_of(region)
            views.append(region.cast("i", (self.slots, self.table_columns)))
        self.table_views = tuple(views)
        return 0

    cdef object column(self, str kind):
        region = zeroed(self.slots * memoryview(array(kind)).itemsize).cast(kind)
        self.memory.append(region)
        return region

    cdef void *latest(self) except NULL:
        return address_of(self.memory[len(self.memory) - 1])

    cdef int begin_arenas(self, arenas, int64_t size) except -1:
        if isinstance(arenas, int):
            check_range("arenas", arenas, 1, 64)
            arenas = [zeroed(size) for _ in range(arenas)]
        self.arenas = []
        for arena in arenas:
            view = memoryview(arena)
            if view.readonly or not view.c_contiguous:
                raise ValueError("an arena must be writable and contiguous")
            if view.nbytes < size:
                raise ValueError(f"an arena must have at least {size} bytes, not {view.nbytes}")
            view = view.cast("B")[:size].cast("i")
            if <uint64_t>address_of(view) % sizeof(int32_t):
                raise ValueError("an arena must be aligned to 4 bytes")
            if len(self.arenas) == 64:
                raise ValueError("there may be 64 arenas at most")
            self.arena_words[len(self.arenas)] = <int32_t *>address_of(view)
            self.arenas.append(view)
        if not self.arenas:
            raise ValueError("there must be an arena")
        self.arena_last = len(self.arenas) - 1
        self.steps_at_once = min(STEPS_AT_ONCE, <int32_t>len(self.arenas))
        return 0

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
        return self.under_way()

    cdef int32_t under_way(self) noexcept:
        return (self.oldest is not None) + (self.newest is not None)

    @property
    def num_tokens(self) -> memoryview:
        """By slot, as of now: prompt and output, placeholders included."""
        self.write_counts()
        return self.num_tokens_view

    @property
    def num_computed_tokens(self) -> memoryview:
        """By slot, as of now: tokens in the KV cache when all prepared steps are done."""
        self.write_counts()
        return self.num_computed_tokens_view

    @property
    def output_tokens(self) -> memoryview:
        """By slot, as of now: committed tokens of output."""
        self.write_counts()
        return self.output_tokens_view

    cdef void write_counts(self) noexcept:
        cdef Columns *columns = &self.columns
        cdef Riders *riders = &self.riders
        cdef int32_t row, slot, computed, tokens, length
        cdef Stay *stay
        for row in range(self.rows_end):
            slot = self.rows[row]
            if slot == NONE:
                continue
            if riders.due[row] != NOT_RIDING:
                computed = riders.origin[row] + riders.prepared
                length = riders.origin[row] + riders.committed + 1
                tokens = computed + 1
            else:
                stay = &self.stays[slot]
                computed, length, tokens = stay.computed, stay.length, stay.length + stay.pending
            columns.num_computed_tokens[slot] = computed
            columns.num_tokens[slot] = tokens
            columns.output_tokens[slot] = length - columns.num_prompt_tokens[slot]

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
        return self.add(slot, state, block_ids)

    def add_requests(self, slots, states, block_ids) -> None:
        """As `add_request` for each of them: a list, or a buffer of int32, of slots, and as many of the others.

        For all or, when it raises, none.
        """
        cdef int32_t rows_end = self.rows_end
        cdef int32_t count = read_ids(slots, self.scratch, self.slots, INT32_MIN, INT32_MAX, "slots")
        cdef int32_t done = 0, i
        cdef tuple new_states = tuple(states), lists = tuple(block_ids)
        if PyTuple_GET_SIZE(new_states) != count or PyTuple_GET_SIZE(lists) != count:
            raise ValueError(f"there must be a state and block ids for each of the {count} slots")
        for i in range(min(count, AHEAD)):
            prefetch_object(PyTuple_GET_ITEM(new_states, i))
        try:
            while done < count:
                if done + AHEAD < count:
                    prefetch_object(PyTuple_GET_ITEM(new_states, done + AHEAD))
                self.add(
                    self.scratch[done],
                    <SequenceState?>PyTuple_GET_ITEM(new_states, done),
                    <tuple?>PyTuple_GET_ITEM(lists, done),
                )
                done += 1
        finally:
            if done < count:
                for i in range(done):
                    self.leave(self.stay_of(self.scratch[i]) - self.stays)
                self.give_back_rows(rows_end)

    cdef void give_back_rows(self, int32_t rows_end) noexcept:
        while self.rows_end > rows_end:
            self.rows_end -= 1
            clear_bit(self.holes, self.rows_end)
            self.hole_count -= 1
        if self.hole_count == 0:
            self.hole_hint = 0

    cdef int32_t add(self, int64_t slot, SequenceState state, tuple block_ids) except -1:
        self.check_slot(slot)
        if self.stays[slot].serial != 0:
            raise ValueError(f"slot {slot} is occupied")
        self.check_groups(block_ids)
        cdef int32_t counts[GROUPS_AT_MOST]
        cdef int32_t group
        cdef object number
        for group in range(self.groups):
            ids = <object>PyTuple_GET_ITEM(block_ids, group)
            counts[group] = self.read_blocks(slot, group, 0, state.committed_outside, ids)
        if self.stays[slot].serial != 0:
            raise ValueError(f"slot {slot} is occupied")  # by the code that a buffer's maker ran
        if state.stay != NULL:
            raise ValueError("the sequence is in a batch already")
        for group in range(self.groups):
            if <int64_t>counts[group] * self.block_size < state.computed_outside:
                raise ValueError(f"{counts[group]} blocks do not hold {state.computed_outside} computed tokens")
        if state.length >= self.max_model_len:
            raise ValueError(f"{state.length} tokens leave no room for one more below {self.max_model_len}")
        if state.computed_outside >= state.length:
            raise ValueError("no token of the sequence is left to compute: rewind it first")
        if state.length - state.prompt_length >= state.max_tokens:
            raise ValueError(f"the sequence has its {state.max_tokens} tokens of output")
        if state.largest >= self.vocab_size:
            raise ValueError(f"token id {state.largest} is outside 0...{self.vocab_size - 1}")
        if self.numbers[slot] == NULL:
            number = slot
            Py_INCREF(number)
            self.numbers[slot] = <PyObject *>number
            self.slots_end = max(self.slots_end, <int32_t>slot + 1)
        return self.enter(slot, state, counts)

    cdef int32_t read_blocks(self, int64_t slot, int32_t group, int32_t start, int32_t committed, ids) except -1:
        # To the table's row from a column on, where nobody reads yet.
        cdef int32_t *row = self.tables[group] + slot * self.table_columns
        cdef int32_t hidden = self.hidden(group, committed)
        cdef int32_t least = NONE if hidden > start else 0
        cdef int32_t room = self.table_columns - start
        cdef int32_t count = read_ids(ids, row + start, room, least, self.largest_block, "block ids")
        cdef int32_t column
        if least == NONE:
            for column in range(hidden, start + count):
                if row[column] < 0:
                    raise ValueError(f"block {column} of group {group} is still seen and must not be -1")
        return count

    cdef int32_t enter(self, int64_t slot, SequenceState state, int32_t *counts) noexcept:
        cdef Stay *stay = &self.stays[slot]
        cdef Columns *columns = &self.columns
        cdef int64_t place
        cdef int32_t group, fewest = INT32_MAX, bit
        cdef uint8_t needs
        prefetch(state.ids + state.computed_outside)  # for the step that it comes for
        prefetch(state.ids + state.length)
        self.serials += 1
        stay.tokens = state.ids
        stay.serial = self.serials
        stay.last_scheduled = self.steps  # as if it were in the latest: newcomers do not overtake
        stay.length = state.length
        stay.computed = state.computed_outside
        stay.committed = state.committed_outside
        stay.limit = min(<int64_t>state.prompt_length + state.max_tokens, <int64_t>self.max_model_len)
        stay.min_end = min(<int64_t>state.prompt_length + state.min_tokens, <int64_t>INT32_MAX)
        stay.sample = 0
        stay.capacity = state.capacity
        stay.pending = 0
        stay.over = False
        stay.ignore_eos = state.ignore_eos
        stay.stops = state.stop_count > 0
        for group in range(self.groups):
            place = <int64_t>group * self.slots + slot
            self.block_counts_by_slot[place] = counts[group]
            self.slid[place] = 0
            self.staged_first[place] = 0
            set_bit(self.staged + group * self.bit_words, slot)
            fewest = min(fewest, counts[group])
        stay.room = fewest * self.block_size
        columns.num_scheduled[slot] = 0
        columns.num_prompt_tokens[slot] = state.prompt_length
        columns.max_tokens[slot] = state.max_tokens
        columns.min_tokens[slot] = state.min_tokens
        columns.top_k[slot] = state.top_k
        columns.logprobs[slot] = state.logprobs
        columns.temperature[slot] = state.temperature
        columns.top_p[slot] = state.top_p
        columns.min_p[slot] = state.min_p
        columns.presence_penalty[slot] = state.presence_penalty
        columns.frequency_penalty[slot] = state.frequency_penalty
        columns.repetition_penalty[slot] = state.repetition_penalty
        columns.seed[slot] = state.seed
        columns.keys[slot] = state.key
        needs = needs_of(state, self.vocab_size)
        columns.needs[slot] = needs
        for bit in range(NEEDS):
            self.need_counts[bit] += (needs >> bit) & 1
        stay.row = self.take_row()
        self.rows[stay.row] = slot
        get_off(&self.riders, stay.row)
        state.stay = stay
        state.riders = &self.riders
        state.slot_outside = slot
        Py_INCREF(state)
        self.states[slot] = <PyObject *>state
        self.num_reqs += 1
        return stay.row

    cdef int32_t take_row(self) noexcept:
        cdef int32_t word, row
        if self.hole_count == 0:
            row = self.rows_end
            self.rows_end += 1
            return row
        row = self.lowest_hole()
        clear_bit(self.holes, row)
        self.hole_count -= 1
        return row

    cdef int32_t lowest_hole(self) noexcept:
        cdef int32_t word = self.hole_hint
        while self.holes[word] == 0:
            word += 1
        self.hole_hint = word
        return 64 * word + lowest_bit(self.holes[word])

    def remove_request(self, int64_t slot) -> None:
        """Takes a sequence out of its slot; its row becomes a hole.

        Steps under way compute for nothing: their tokens are dropped, its placeholders go. ValueError for a slot
        without one.
        """
        self.stay_of(slot)
        self.leave(slot)

    def remove_requests(self, slots) -> None:
        """As `remove_request` for each of them (a list, or a buffer of int32); for all or, when it raises, none."""
        cdef int32_t count = self.read_slots(slots)
        cdef int32_t i
        cdef int32_t *leaving = self.scratch
        for i in range(count):
            prefetch(self.states[leaving[i]])
        for i in range(count):
            self.leave(leaving[i])

    cdef int32_t read_slots(self, slots) except -1:
        # Into the scratch: occupied ones, none twice.
        cdef int32_t count = read_ids(slots, self.scratch, self.slots, INT32_MIN, INT32_MAX, "slots")
        cdef int32_t i, marked = 0
        cdef int32_t slot
        try:
            for i in range(count):
                slot = self.scratch[i]
                self.check_slot(slot)
                if self.states[slot] == NULL:
                    raise ValueError(f"slot {slot} is empty")
                if has_bit(self.named, slot):
                    raise ValueError(f"slot {slot} is named twice")
                set_bit(self.named, slot)
                marked += 1
        finally:
            for i in range(marked):
                clear_bit(self.named, self.scratch[i])
        return count

    cdef void leave(self, int64_t slot) noexcept:
        cdef int32_t row = self.stays[slot].row
        cdef uint8_t needs = self.columns.needs[slot]
        cdef int32_t bit
        alight(&self.riders, &self.stays[slot])
        self.strike_out(self.oldest, slot)
        self.strike_out(self.newest, slot)
        for bit in range(NEEDS):
            self.need_counts[bit] -= (needs >> bit) & 1
        self.rows[row] = NONE
        set_bit(self.holes, row)
        self.hole_count += 1
        self.hole_hint = min(self.hole_hint, row >> 6)
        self.num_reqs -= 1
        self.let_go(slot)

    cdef void strike_out(self, Step step, int32_t slot) noexcept:
        cdef int32_t *slots
        cdef int32_t row
        if step is not None:
            slots = self.records[step.record].slots
            for row in range(step.rows):
                if slots[row] == slot:
                    slots[row] = NONE
                    break

    cdef void let_go(self, int64_t slot) noexcept:
        cdef Stay *stay = &self.stays[slot]
        cdef SequenceState state = <SequenceState>self.states[slot]
        alight(&self.riders, stay)
        self.columns.num_scheduled[slot] = 0
        state.length = stay.length
        state.computed_outside = state.committed_outside = stay.committed
        state.stay = NULL
        stay.serial = 0
        self.states[slot] = NULL
        Py_DECREF(state)

    def condense(self) -> list[tuple[int, int]]:
        """Fills the holes below `num_reqs` from the end of the order: (source row, target row), in the order done."""
        cdef int32_t source, target, slot
        moves = []
        if self.hole_count == 0:
            return moves
        while True:
            source = self.drop_last_holes()
            if self.hole_count == 0:
                return moves
            target = self.lowest_hole()
            moves.append((source, target))
            self.move(source, target)

    cdef void compact(self) noexcept:
        # As `condense`; nobody asks for the moves.
        cdef int32_t source
        while self.hole_count > 0:
            source = self.drop_last_holes()
            if self.hole_count > 0:
                self.move(source, self.lowest_hole())

    cdef int32_t drop_last_holes(self) noexcept:
        # The last row, after this.
        while self.rows_end > 0 and self.rows[self.rows_end - 1] == NONE:
            self.rows_end -= 1
            clear_bit(self.holes, self.rows_end)
            self.hole_count -= 1
        if self.hole_count == 0:
            self.hole_hint = 0
        return self.rows_end - 1

    cdef void move(self, int32_t source, int32_t target) noexcept:
        cdef int32_t slot = self.rows[source]
        cdef Riders *riders = &self.riders
        cdef int32_t group
        self.rows[target] = slot
        self.stays[slot].row = target
        riders.due[target] = riders.due[source]
        riders.origin[target] = riders.origin[source]
        riders.closer[target] = riders.closer[source]
        riders.edge[target] = riders.edge[source]
        riders.full[target] = riders.full[source]
        riders.next_id[target] = riders.next_id[source]
        riders.keys[target] = riders.keys[source]
        riders.ends[target] = riders.ends[source]
        for group in range(self.groups):
            riders.lift[group][target] = riders.lift[group][source]
        get_off(riders, source)
        clear_bit(self.holes, target)
        self.hole_count -= 1
        self.rows_end -= 1

    def order(self) -> list[int]:
        """Slots by row; −1: a hole."""
        return [self.rows[row] for row in range(self.rows_end)]

    def row_of(self, int64_t slot) -> int:
        return self.stay_of(slot).row

    def state(self, int64_t slot):
        self.stay_of(slot)
        return <object>self.states[slot]

    # Block tables

    def append_block_ids(self, int64_t slot, tuple block_ids not None) -> None:
        """Adds blocks to the end of a slot's row in each group's table: one list, or buffer of int32, a group."""
        cdef Stay *stay = self.stay_of(slot)
        cdef int64_t serial = stay.serial
        cdef int32_t room = stay.room
        cdef int32_t counts[GROUPS_AT_MOST]
        cdef int32_t group, count
        cdef int64_t place
        self.check_groups(block_ids)
        for group in range(self.groups):
            count = self.block_counts_by_slot[<int64_t>group * self.slots + slot]
            ids = <object>PyTuple_GET_ITEM(block_ids, group)
            counts[group] = self.read_blocks(slot, group, count, stay.committed, ids)
        if stay.serial != serial or stay.room != room:
            raise ValueError(f"slot {slot} was changed meanwhile")  # by the code that a buffer's maker ran
        for group in range(self.groups):
            if counts[group] > 0:
                place = <int64_t>group * self.slots + slot
                self.stage(group, slot, self.block_counts_by_slot[place])
                self.block_counts_by_slot[place] += counts[group]
        self.count_room(slot)

    def append_one_each(self, slots, tuple block_ids not None) -> None:
        """Adds one block to each slot's row in each group: lists, or buffers of int32, as long as `slots`.

        For all or, when it raises, none.
        """
        cdef int32_t counts[GROUPS_AT_MOST]
        cdef int32_t group, i, count
        cdef int32_t *table
        cdef int32_t *ids
        cdef int32_t *held
        cdef int64_t slot
        self.check_groups(block_ids)
        for group in range(self.groups):
            counts[group] = read_ids(
                <object>PyTuple_GET_ITEM(block_ids, group),
                self.scratch + <int64_t>(group + 1) * self.slots,
                self.slots,
                0,
                self.largest_block,
                "block ids",
            )
        count = self.read_slots(slots)
        for group in range(self.groups):
            if counts[group] != count:
                raise ValueError(f"there must be {count} block ids in group {group}, not {counts[group]}")
        for i in range(count):
            for group in range(self.groups):
                if self.block_counts_by_slot[<int64_t>group * self.slots + self.scratch[i]] == self.table_columns:
                    raise ValueError(f"slot {self.scratch[i]} has its {self.table_columns} blocks")
        for group in range(self.groups):
            table = self.tables[group]
            ids = self.scratch + <int64_t>(group + 1) * self.slots
            held = self.block_counts_by_slot + <int64_t>group * self.slots
            for i in range(count):
                slot = self.scratch[i]
                self.stage(group, slot, held[slot])
                table[slot * self.table_columns + held[slot]] = ids[i]
                held[slot] += 1
        for i in range(count):
            self.count_room(self.scratch[i])

    cdef void stage(self, int32_t group, int64_t slot, int32_t first) noexcept:
        cdef uint64_t *staged = self.staged + group * self.bit_words
        if not has_bit(staged, slot):
            set_bit(staged, slot)
            self.staged_first[<int64_t>group * self.slots + slot] = first

    cdef void count_room(self, int64_t slot) noexcept:
        cdef Stay *stay = &self.stays[slot]
        cdef int32_t fewest = INT32_MAX
        cdef int32_t group
        for group in range(self.groups):
            fewest = min(fewest, self.block_counts_by_slot[<int64_t>group * self.slots + slot])
        stay.room = fewest * self.block_size
        if rides(&self.riders, stay):
            self.riders.due[stay.row] = due_of(stay, self.riders.origin[stay.row])

    def block_ids(self, int64_t slot) -> tuple[list[int], ...]:
        """By group; what has slid out is −1."""
        cdef int32_t group, column
        cdef int32_t *row
        self.stay_of(slot)
        lists = []
        for group in range(self.groups):
            row = self.tables[group] + slot * self.table_columns
            lists.append(
                [row[column] for column in range(self.block_counts_by_slot[<int64_t>group * self.slots + slot])]
            )
        return tuple(lists)

    def block_counts(self, int64_t slot) -> tuple[int, ...]:
        self.stay_of(slot)
        return tuple(
            [self.block_counts_by_slot[<int64_t>group * self.slots + slot] for group in range(self.groups)]
        )

    def slide(self, int64_t slot, int64_t group) -> list[int]:
        """Takes the blocks that no later token can see out of a slot's row: their ids, which are −1 from now on."""
        cdef Stay *stay = self.stay_of(slot)
        cdef int32_t column, hidden
        cdef int32_t *row
        cdef int64_t place
        self.check_group(group)
        freed = []
        hidden = self.hidden(group, stay.committed)
        place = group * self.slots + slot
        if hidden <= self.slid[place]:
            return freed
        row = self.tables[group] + slot * self.table_columns
        for column in range(self.slid[place], hidden):
            if row[column] != NONE:
                freed.append(row[column])
        for column in range(self.slid[place], hidden):
            row[column] = NONE
        self.slid[place] = hidden
        return freed

    cdef int32_t hidden(self, int32_t group, int32_t committed) noexcept:
        # How many blocks no token from `committed` on sees.
        cdef int32_t window = self.windows[group]
        if window == 0 or committed < window:
            return 0
        return self.block_of(committed - window + 1)

    def block_table(self, int64_t group) -> memoryview:
        """The host's table of a group, int32 [slots, blocks a row]: of a row, only `block_counts` entries mean anything."""
        self.check_group(group)
        return self.table_views[group]

    # A step

    def survey(self, max_rows):
        """Sets `num_scheduled`: 1 for who has one token to compute, 0 for all others; says who has more.

        Of more than `max_rows` that could take part, those scheduled longest ago are chosen; a newcomer counts as
        scheduled in the latest step, and prefills count. Of several scheduled equally long ago, those whose turn is
        next: in the order of admission, round and round, after the one who was chosen last for a step that not
        all could be in. Who has its last token under way takes no part.
        """
        cdef int32_t odd_count
        if max_rows < 0:
            raise ValueError(f"max_rows must not be negative, not {max_rows}")
        self.last_chosen = 0
        if self.num_reqs > max_rows:
            return self.survey_some(min(max_rows, self.slots))
        mark_due(self.marks, self.riders.due, self.riders.prepared, self.rows_end)
        odd_count = list_marks(self.marks, self.rows_end, self.odd)
        set_ones(self.columns.num_scheduled, self.rows, self.rows_end)
        return self.survey_rows(odd_count, self.rows_end - odd_count, NULL)

    cdef object survey_some(self, int32_t max_rows):
        cdef Turn last
        cdef int32_t able = 0
        cdef int32_t row, slot
        for row in range(self.rows_end):
            slot = self.rows[row]
            if slot != NONE:
                bring_up_to_date(&self.riders, &self.stays[slot])
                if takes_part(&self.stays[slot]):
                    self.turns[able] = self.turn_of(slot)
                    able += 1
        count_from(self.odd, 0, self.rows_end)
        if able <= max_rows:
            return self.survey_rows(self.rows_end, 0, NULL)
        last.last_scheduled = -1
        if max_rows > 0:
            last = nth_turn(self.turns, able, max_rows - 1)
            self.last_chosen = self.stays[last.slot].serial
        return self.survey_rows(self.rows_end, 0, &last)

    cdef inline Turn turn_of(self, int32_t slot) noexcept:
        cdef Turn turn
        cdef int64_t serial = self.stays[slot].serial
        turn.last_scheduled = self.stays[slot].last_scheduled
        turn.place = serial if serial > self.last_served else serial + (<int64_t>1 << 62)
        turn.slot = slot
        return turn

    cdef object survey_rows(self, int32_t odd_count, int32_t decodes, Turn *last):
        # The rows listed in `odd`; `decodes` others have their 1 already.
        cdef Stay *stays = self.stays
        cdef int32_t *num_scheduled = self.columns.num_scheduled
        cdef int64_t *prefills = self.admissions
        cdef int32_t *short = self.filled
        cdef int32_t prefill_count = 0, short_count = 0
        cdef int32_t i, slot, count
        cdef Stay *stay
        cdef Turn turn
        for i in range(odd_count):
            slot = self.rows[self.odd[i]]
            if slot == NONE:
                continue
            stay = &stays[slot]
            bring_up_to_date(&self.riders, stay)
            count = 0
            if takes_part(stay):
                if last != NULL:
                    turn = self.turn_of(slot)
                if last != NULL and precedes(last, &turn):
                    pass
                elif stay.length + stay.pending - stay.computed == 1:
                    count = 1
                    decodes += 1
                    if stay.computed >= stay.room:
                        short[short_count] = slot
                        short_count += 1
                else:
                    prefills[prefill_count] = (stay.serial << SLOT_BITS) | slot
                    prefill_count += 1
            num_scheduled[slot] = count
        sort(prefills, prefill_count)
        for i in range(prefill_count):
            self.boarders[i] = prefills[i] & (SLOTS_AT_MOST - 1)
        return tuple.__new__(
            Survey, (decodes, self.numbers_of(self.boarders, prefill_count), self.numbers_of(short, short_count))
        )

    cdef list numbers_of(self, int32_t *slots, int32_t count):
        cdef list numbers = PyList_New(count)
        cdef int32_t i
        for i in range(count):
            Py_INCREF(<object>self.numbers[slots[i]])
            PyList_SET_ITEM(numbers, i, <object>self.numbers[slots[i]])
        return numbers

    def schedule(self, slots, counts) -> None:
        """Sets `num_scheduled` of these slots: lists, or buffers of int32, of the same length."""
        cdef int32_t *amounts = self.scratch + self.slots
        cdef int32_t amount_count = read_ids(counts, amounts, self.slots, 0, INT32_MAX, "counts")
        cdef int32_t count = self.read_slots(slots)
        cdef int32_t i
        if amount_count != count:
            raise ValueError(f"there must be {count} counts, not {amount_count}")
        for i in range(count):
            self.columns.num_scheduled[self.scratch[i]] = amounts[i]

    def prepare_inputs(self, num_scheduled=None):
        """Begins a step of so many tokens a slot (int32 [slots]; None: the batch's own column); None if all are 0.

        Condenses first. What is scheduled counts as computed from now on; a row that reaches its last token
        samples, and has a placeholder until the commit. ValueError for a count that is negative or more than is
        left, a row that takes no part, blocks that do not hold the tokens, more than `max_batched_tokens`;
        RuntimeError when two steps are under way already.
        """
        cdef Py_buffer buffer
        if num_scheduled is None:
            return self.prepare(self.columns.num_scheduled)
        int32_buffer(num_scheduled, &buffer, "num_scheduled")
        try:
            if buffer.shape[0] != self.slots:
                raise ValueError(f"num_scheduled must have {self.slots} entries, not {buffer.shape[0]}")
            return self.prepare(<int32_t *>buffer.buf)
        finally:
            PyBuffer_Release(&buffer)

    cdef Step prepare(self, int32_t *num_scheduled):
        cdef Step step
        cdef int32_t odd_count
        if self.newest is not None or (self.oldest is not None and self.steps_at_once == 1):
            raise RuntimeError(f"{self.steps_at_once} steps are under way already")
        if self.riders.prepared >= ROUNDS_AT_MOST:
            self.all_alight()
        odd_count = self.list_odd(num_scheduled)
        step = self.checked_step(num_scheduled, odd_count)
        if step is None:
            return None
        if self.hole_count > 0:
            self.compact()
            odd_count = self.list_odd(num_scheduled)
        self.steps += 1
        step.number = self.riders.latest = self.steps
        if self.last_chosen != 0:
            self.last_served = self.last_chosen
        self.choose_places(step)
        self.write(step, num_scheduled, odd_count)
        self.riders.prepared += 1
        if self.oldest is None:
            self.oldest = step
        else:
            self.newest = step
        return step

    cdef int32_t list_odd(self, int32_t *num_scheduled) noexcept:
        mark_odd(self.marks, self.riders.due, self.riders.prepared, self.rows, num_scheduled, self.rows_end)
        return list_marks(self.marks, self.rows_end, self.odd)

    cdef Step checked_step(self, int32_t *num_scheduled, int32_t odd_count):
        # Counts the step, so that what is written has its place at once; makes room for what it will sample, and
        # has on its way to the cache what will be read. Of the odd rows, none rides after this.
        cdef Step step
        cdef int32_t *table = self.tables[0]
        cdef int32_t rows = self.rows_end - odd_count, decodes = rows, samples = rows
        cdef int64_t tokens = rows
        cdef int32_t i, slot, count, length, computed
        cdef Stay *stay
        for i in range(odd_count):
            slot = self.rows[self.odd[i]]
            if slot == NONE:
                continue
            stay = &self.stays[slot]
            alight(&self.riders, stay)
            count = num_scheduled[slot]
            if count == 0:
                continue
            computed = stay.computed
            length = stay.length + stay.pending
            prefetch(stay.tokens + computed)
            if count > 1:
                prefetch(stay.tokens + computed + CACHE_LINE // 4 - 1)
            prefetch(table + <int64_t>slot * self.table_columns + self.block_of(computed))
            if (
                count < 0 or count > length - computed or computed + count > stay.room
                or stay.over or length >= stay.limit
            ):
                self.refuse(slot, count)
            rows += 1
            tokens += count
            if computed + count == length:
                samples += 1
                decodes += count == 1
                if length >= stay.capacity:
                    (<SequenceState>self.states[slot]).grow()
        if tokens > self.max_batched_tokens:
            raise ValueError(f"{tokens} tokens are more than a step's {self.max_batched_tokens}")
        if rows == 0:
            return None
        step = <Step>Step.__new__(Step)
        step.groups = self.groups
        step.tokens, step.rows, step.decodes, step.samples = tokens, rows, decodes, samples
        return step

    cdef int refuse(self, int32_t slot, int32_t count) except -1:
        cdef Stay *stay = &self.stays[slot]
        left = stay.length + stay.pending - stay.computed
        if not 0 <= count <= left:
            raise ValueError(f"slot {slot} has {left} tokens to compute, not {count}")
        if not takes_part(stay):
            raise ValueError(f"slot {slot} has ended, or will with the steps under way")
        raise ValueError(f"the blocks of slot {slot} hold {stay.room} tokens, not {stay.computed + count}")

    cdef void choose_places(self, Step step) noexcept:
        # In turn, but never where a step under way is.
        cdef Step other = self.oldest
        cdef int32_t arenas = PyList_GET_SIZE(self.arenas)
        self.arena_last = (self.arena_last + 1) % arenas
        step.record = 0
        if other is not None:
            if other.arena_index == self.arena_last:
                self.arena_last = (self.arena_last + 1) % arenas
            step.record = 1 - other.record
        step.arena_index = self.arena_last
        step.words = <object>PyList_GET_ITEM(self.arenas, self.arena_last)
        cdef int32_t sizes[SECTIONS]
        sizes[:] = [
            step.tokens, step.tokens, step.tokens * self.groups, step.rows + 1, step.rows, step.rows,
            step.samples, step.samples, 0,
        ]
        cdef int32_t start = HEADER
        cdef int32_t section
        for section in range(SECTIONS):
            step.starts[section] = start
            start += sizes[section]

    cdef void write(self, Step step, int32_t *num_scheduled, int32_t odd_count) noexcept:
        # In the order of rows: runs of those that ride, and between them the odd ones.
        cdef Record *record = &self.records[step.record]
        cdef int32_t *words = self.arena_words[step.arena_index]
        cdef int32_t *others = self.scratch
        cdef int32_t row = 0, place = 0, other_count = 0
        cdef int32_t i, odd, slot
        cdef Stay *stay
        record.run_count = 0
        self.enter_blocks()
        for i in range(odd_count + 1):
            odd = self.odd[i] if i < odd_count else self.rows_end
            if odd > row:
                self.write_run(step, words, row, place, odd - row)
                place += odd - row
            row = odd + 1
            if i == odd_count:
                break
            slot = self.rows[odd]
            if num_scheduled[slot] == 0:
                continue
            stay = &self.stays[slot]
            if stay.computed + 1 == stay.length + stay.pending:
                self.write_decode(step, words, slot, place)
                place += 1
            else:
                others[other_count] = slot
                other_count += 1
        # Rows, tokens and samples of decodes are numbered alike.
        count_from(words + step.starts[3], 0, place + 1)
        count_from(words + step.starts[6], 0, place)
        memcpy(words + step.starts[7], words + step.starts[5], place * sizeof(int32_t))
        self.write_others(step, words, others, other_count, num_scheduled)
        memcpy(record.slots, words + step.starts[5], step.rows * sizeof(int32_t))
        record.changes = self.riders.changes
        self.write_header(step, words)

    cdef void enter_blocks(self) noexcept:
        # Who rides into its next block in this round.
        cdef Riders *riders = &self.riders
        cdef int32_t *entering = self.found
        cdef int32_t i, row, position, column, group, count
        cdef int64_t entry
        mark_equal(self.marks, riders.edge, riders.prepared, self.rows_end)
        count = list_marks(self.marks, self.rows_end, entering)
        for i in range(count):
            row = entering[i]
            if riders.due[row] == NOT_RIDING:
                continue
            position = riders.origin[row] + riders.prepared
            column = self.block_of(position)
            riders.edge[row] += (column + 1) * self.block_size - position
            entry = <int64_t>self.rows[row] * self.table_columns + column
            for group in range(self.groups):
                riders.lift[group][row] = (
                    (self.tables[group][entry] - column) * self.block_size + riders.origin[row]
                )

    cdef void write_run(self, Step step, int32_t *words, int32_t row, int32_t place, int32_t count) noexcept:
        cdef Riders *riders = &self.riders
        cdef Record *record = &self.records[step.record]
        cdef int32_t *slot_mapping = words + step.starts[2] + place
        cdef int32_t group
        record.runs[record.run_count] = Run(row, place, count)
        record.run_count += 1
        write_along(
            words + step.starts[0] + place, words + step.starts[1] + place, words + step.starts[4] + place,
            words + step.starts[5] + place, slot_mapping, riders.next_id + row, riders.origin + row,
            riders.lift[0] + row, self.rows + row, riders.prepared, place, count,
        )
        for group in range(1, self.groups):
            slot_mapping += step.tokens
            add_to_all(slot_mapping, riders.lift[group] + row, riders.prepared, count)

    cdef void write_decode(self, Step step, int32_t *words, int32_t slot, int32_t place) noexcept:
        cdef Stay *stay = &self.stays[slot]
        cdef int32_t position = stay.computed
        words[step.starts[0] + place] = -1 - stay.sample if stay.pending else stay.tokens[position]
        words[step.starts[1] + place] = position
        words[step.starts[4] + place] = position + 1
        words[step.starts[5] + place] = slot
        self.map_tokens(words + step.starts[2] + place, step.tokens, slot, position, 1)
        stay.computed = position + 1
        stay.last_scheduled = step.number
        stay.sample = place
        stay.pending += 1

    cdef void write_others(
        self, Step step, int32_t *words, int32_t *others, int32_t count, int32_t *num_scheduled
    ) noexcept:
        # Of more than one token to compute, none is a placeholder.
        cdef int32_t *input_ids = words + step.starts[0]
        cdef int32_t *positions = words + step.starts[1]
        cdef int32_t *query_starts = words + step.starts[3]
        cdef int32_t *sample_rows = words + step.starts[6]
        cdef int32_t *sample_slots = words + step.starts[7]
        cdef int32_t row = step.decodes, token = step.decodes, sample = step.decodes
        cdef int32_t i, j, slot, position, tokens
        cdef Stay *stay
        for i in range(count):
            slot = others[i]
            tokens = num_scheduled[slot]
            stay = &self.stays[slot]
            position = stay.computed
            memcpy(input_ids + token, stay.tokens + position, tokens * sizeof(int32_t))
            for j in range(tokens):
                positions[token + j] = position + j
            self.map_tokens(words + step.starts[2] + token, step.tokens, slot, position, tokens)
            token += tokens
            query_starts[row + 1] = token
            words[step.starts[4] + row] = position + tokens
            words[step.starts[5] + row] = slot
            self.records[step.record].counts[row] = -tokens
            stay.computed = position + tokens
            stay.last_scheduled = step.number
            if stay.computed == stay.length:
                self.records[step.record].counts[row] = tokens
                sample_rows[sample] = row
                sample_slots[sample] = slot
                stay.sample = sample
                stay.pending = 1
                sample += 1
            row += 1

    cdef void map_tokens(
        self, int32_t *slot_mapping, int32_t tokens, int64_t slot, int32_t position, int32_t count
    ) noexcept:
        # Block by block.
        cdef int32_t group, column, first, last, start, i
        cdef int32_t end = position + count
        cdef int32_t *target
        for group in range(self.groups):
            target = slot_mapping + <int64_t>group * tokens - position
            column = self.block_of(position)
            first = position
            while first < end:
                last = min(<int64_t>(column + 1) * self.block_size, <int64_t>end)
                start = (
                    self.tables[group][slot * self.table_columns + column] - column
                ) * <int64_t>self.block_size
                for i in range(first, last):
                    target[i] = start + i
                first = last
                column += 1

    cdef void write_header(self, Step step, int32_t *words) noexcept:
        cdef int32_t start = step.starts[SECTIONS - 1]
        cdef int32_t writes = 0
        step.end = start + self.take_staged(words + start, &writes)
        words[0] = step.tokens
        words[1] = step.rows
        words[2] = step.decodes
        words[3] = step.samples
        words[4] = step.end - start
        words[5] = writes
        words[6] = self.groups
        memcpy(words + HEADER - SECTIONS, step.starts, SECTIONS * sizeof(int32_t))

    cdef int32_t take_staged(self, int32_t *target, int32_t *writes) noexcept:
        # Of a row, only what is still seen: what has slid out stays on the device as it is.
        cdef int32_t *begin = target
        cdef int32_t *row
        cdef int32_t group, word, first, count
        cdef int64_t slot, place
        cdef uint64_t bits
        for group in range(self.groups):
            for word in range(self.bit_words):
                bits = self.staged[group * self.bit_words + word]
                self.staged[group * self.bit_words + word] = 0
                while bits != 0:
                    slot = 64 * word + lowest_bit(bits)
                    bits &= bits - 1
                    if self.states[slot] == NULL:
                        continue
                    place = <int64_t>group * self.slots + slot
                    row = self.tables[group] + slot * self.table_columns
                    count = self.block_counts_by_slot[place]
                    first = self.staged_first[place]
                    while first < count and row[first] == NONE:
                        first += 1
                    if first == count:
                        continue
                    target[0] = group
                    target[1] = slot
                    target[2] = first
                    target[3] = count - first
                    target[4] = row[first]  # mostly all
                    if count - first > 1:
                        memcpy(target + 5, row + first + 1, (count - first - 1) * sizeof(int32_t))
                    target += 4 + count - first
                    writes[0] += 1
        return target - begin

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
            return self.commit(step, <int32_t *>buffer.buf)
        finally:
            PyBuffer_Release(&buffer)

    cdef object commit(self, Step step, int32_t *sampled):
        # In the order of the step's rows: runs of those that ride, and between them the others.
        cdef c_array keys = clone(INT64S, step.samples, False)
        cdef c_array tokens = clone(INT32S, step.samples, False)
        cdef c_array samples = clone(INT32S, step.samples, False)
        cdef Results results = Results(
            <int64_t *>keys.data.as_longlongs, <int32_t *>tokens.data.as_ints, <int32_t *>samples.data.as_ints, 0, 0, 0, 0
        )
        cdef Record *record = &self.records[step.record]
        cdef int32_t sample = step.decodes
        cdef int32_t row = 0, i, end, rows = step.rows
        cdef bint look_closer
        cdef Run *run
        cdef Ending ending
        cdef list finished = [], failed = []
        if step is not self.oldest:
            raise ValueError("only the oldest step under way can be committed")
        if record.changes != self.riders.changes:
            self.find_runs(step)
        self.oldest, self.newest = self.newest, None
        look_closer = any_hit(
            sampled, step.decodes, self.vocab_size, self.riders.closer, self.rows_end, self.riders.committed,
            self.eos, self.eos_count,
        )
        for i in range(record.run_count + 1):
            end = record.runs[i].place if i < record.run_count else rows
            while row < end:
                if row < step.decodes:
                    self.commit_row(record.slots[row], 1, row, sampled, &results)
                else:
                    self.commit_row(record.slots[row], record.counts[row], sample, sampled, &results)
                    sample += record.counts[row] > 0
                row += 1
            if i < record.run_count:
                run = &record.runs[i]
                if look_closer:
                    self.commit_run(run, sampled, &results)
                else:
                    self.commit_riders(run.row, run.place, run.count, sampled, &results)
                row += run.count
        self.list_filled(&results)
        self.riders.committed += 1
        self.board(results.boarders)
        if results.done < step.samples:
            resize(keys, results.done)
            resize(tokens, results.done)
            resize(samples, results.done)
        # Only now, with all done, are objects made that could set off the garbage collection.
        for i in range(results.ended):
            ending = self.endings[i]
            if ending.reason == FAILED:
                failed.append((ending.slot, ending.place))
            else:
                finished.append((ending.slot, ending.reason, ending.place))
        return tuple.__new__(
            Committed,
            (
                memoryview(keys),
                memoryview(tokens),
                memoryview(samples),
                finished,
                failed,
                self.numbers_of(self.filled, results.filled),
            ),
        )

    cdef void find_runs(self, Step step) noexcept:
        # Again, because some have come, gone or moved since the step was prepared.
        cdef Record *record = &self.records[step.record]
        cdef Run *run = NULL
        cdef Stay *stay
        cdef int32_t place
        record.run_count = 0
        for place in range(step.decodes):
            if record.slots[place] != NONE:
                stay = &self.stays[record.slots[place]]
                if rides(&self.riders, stay):
                    if run != NULL and run.row + run.count == stay.row and run.place + run.count == place:
                        run.count += 1
                    else:
                        run = &record.runs[record.run_count]
                        record.run_count += 1
                        run[0] = Run(stay.row, place, 1)

    cdef void commit_run(self, Run *run, int32_t *sampled, Results *results) noexcept:
        cdef Riders *riders = &self.riders
        # Of those that must be looked at, each alone.
        cdef int32_t *hits = self.odd
        cdef int32_t start = 0, i, end, count, slot
        mark_hits(
            self.marks, sampled + run.place, self.vocab_size, riders.closer + run.row, riders.committed,
            self.eos, self.eos_count, run.count,
        )
        count = list_marks(self.marks, run.count, hits)
        for i in range(count + 1):
            end = hits[i] if i < count else run.count
            self.commit_riders(run.row + start, run.place + start, end - start, sampled, results)
            if i < count:
                slot = self.rows[run.row + end]
                alight(riders, &self.stays[slot])
                self.commit_row(slot, 1, run.place + end, sampled, results)
            start = end + 1

    cdef void commit_riders(
        self, int32_t row, int32_t place, int32_t count, int32_t *sampled, Results *results
    ) noexcept:
        # None of them ends with its token.
        cdef Riders *riders = &self.riders
        memcpy(results.keys + results.done, riders.keys + row, count * sizeof(int64_t))
        memcpy(results.tokens + results.done, sampled + place, count * sizeof(int32_t))
        count_from(results.samples + results.done, place, count)
        append_along(riders.ends + row, riders.committed, sampled + place, count)
        if self.oldest is None:  # else what comes next is under way already
            memcpy(riders.next_id + row, sampled + place, count * sizeof(int32_t))
        results.done += count

    cdef void list_filled(self, Results *results) noexcept:
        cdef Riders *riders = &self.riders
        cdef int32_t i, row, count
        mark_equal(self.marks, riders.full, riders.committed, self.rows_end)
        count = list_marks(self.marks, self.rows_end, self.found)
        for i in range(count):
            row = self.found[i]
            if riders.due[row] != NOT_RIDING:
                riders.full[row] += self.block_size
                self.filled[results.filled] = self.rows[row]
                results.filled += 1

    cdef void commit_row(
        self, int32_t slot, int32_t count, int32_t sample, int32_t *sampled, Results *results
    ) noexcept:
        # Who does not ride, or not any more.
        cdef Stay *stay
        cdef int32_t token, before
        if slot == NONE or self.stays[slot].over:
            return
        stay = &self.stays[slot]
        before = stay.committed
        stay.committed = before + (count if count > 0 else -count)
        if self.block_of(stay.committed) != self.block_of(before):
            self.filled[results.filled] = slot
            results.filled += 1
        if count < 0:
            return
        token = sampled[sample]
        if token < 0 or token >= self.vocab_size:
            self.end(slot, FAILED, sample, results)
            return
        # In place of the placeholder; `checked_step` made room.
        stay.tokens[stay.length] = token
        stay.length += 1
        stay.pending -= 1
        results.keys[results.done] = self.columns.keys[slot]
        results.tokens[results.done] = token
        results.samples[results.done] = sample
        if stay.length >= stay.min_end and self.ends(slot, token, stay.length):
            self.end(slot, STOP, results.done, results)
        elif stay.length >= stay.limit:
            self.end(slot, LENGTH, results.done, results)
        else:
            self.boarders[results.boarders] = slot
            results.boarders += 1
        results.done += 1

    cdef void end(self, int32_t slot, int32_t reason, int32_t place, Results *results) noexcept:
        take_out(&self.stays[slot])
        self.endings[results.ended] = Ending(slot, reason, place)
        results.ended += 1

    cdef void board(self, int32_t count) noexcept:
        # Who is a decode in all steps under way, or has but one token to compute when there is none, goes along.
        cdef Riders *riders = &self.riders
        cdef int32_t under_way = riders.prepared - riders.committed
        cdef int32_t i, row, slot, origin
        cdef Stay *stay
        for i in range(count):
            slot = self.boarders[i]
            stay = &self.stays[slot]
            if (
                stay.pending != under_way or stay.computed - stay.committed != under_way
                or stay.last_scheduled != riders.latest
            ):
                continue
            row = stay.row
            origin = stay.computed - riders.prepared
            riders.origin[row] = origin
            riders.due[row] = due_of(stay, origin)
            riders.closer[row] = stay.limit - 2 - origin
            if stay.stops or stay.length < stay.min_end:
                riders.closer[row] = INT32_MIN
            riders.edge[row] = riders.prepared
            riders.full[row] = (self.block_of(stay.committed) + 1) * self.block_size - 1 - origin
            riders.next_id[row] = -1 - stay.sample if under_way else stay.tokens[stay.length - 1]
            riders.keys[row] = self.columns.keys[slot]
            riders.ends[row] = stay.tokens + origin + 1
            riders.changes += 1

    cdef void all_alight(self) noexcept:
        cdef int32_t row
        for row in range(self.rows_end):
            if self.rows[row] != NONE:
                alight(&self.riders, &self.stays[self.rows[row]])
        self.riders.committed = 0
        self.riders.prepared = self.under_way()

    cdef inline bint ends(self, int32_t slot, int32_t token, int32_t length) noexcept:
        # Whether a token ends a sequence that has its `min_tokens`.
        cdef Stay *stay = &self.stays[slot]
        cdef SequenceState state
        cdef int32_t i
        if length == stay.min_end and self.columns.needs[slot] & MIN_TOKENS:
            self.columns.needs[slot] &= ~<uint8_t>MIN_TOKENS
            self.need_counts[6] -= 1
        if not stay.ignore_eos:
            for i in range(self.eos_count):
                if self.eos[i] == token:
                    return True
        if stay.stops:
            state = <SequenceState>self.states[slot]
            for i in range(state.stop_count):
                if state.stops[i] == token:
                    return True
        return False

    def cancel_step(self, Step step not None) -> list[int]:
        """Ends a step under way, not always the oldest, that went wrong: the slots of its rows that are still
        there. They take no part from now on. ValueError for a step that is not under way."""
        cdef int32_t *slots = self.records[step.record].slots
        cdef int32_t row, slot, group
        if step is not self.oldest and step is not self.newest:
            raise ValueError("the step is not under way")
        self.all_alight()
        if step is self.oldest:
            self.oldest, self.newest = self.newest, None
        else:
            self.newest = None
        self.riders.prepared = self.under_way()
        present = []
        for row in range(step.rows):
            slot = slots[row]
            if slot != NONE and not self.stays[slot].over:
                present.append(slot)
                take_out(&self.stays[slot])
        for row in range(self.rows_end):
            slot = self.rows[row]
            if slot != NONE:
                for group in range(self.groups):
                    set_bit(self.staged + group * self.bit_words, slot)
                    self.staged_first[<int64_t>group * self.slots + slot] = 0
        return present

    # Checks

    cdef inline int32_t block_of(self, int32_t position) noexcept:
        if self.block_shift >= 0:
            return position >> self.block_shift
        return position // self.block_size

    cdef int check_slot(self, int64_t slot) except -1:
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot {slot} is outside 0...{self.slots - 1}")
        return 0

    cdef int check_group(self, int64_t group) except -1:
        if not 0 <= group < self.groups:
            raise ValueError(f"group {group} is outside 0...{self.groups - 1}")
        return 0

    cdef int check_groups(self, tuple block_ids) except -1:
        if PyTuple_GET_SIZE(block_ids) != self.groups:
            raise ValueError(f"there must be {self.groups} lists of block ids, one a group")
        return 0

    cdef Stay *stay_of(self, int64_t slot) except NULL:
        self.check_slot(slot)
        if self.stays[slot].serial == 0:
            raise ValueError(f"slot {slot} is empty")
        bring_up_to_date(&self.riders, &self.stays[slot])
        return &self.stays[slot]
