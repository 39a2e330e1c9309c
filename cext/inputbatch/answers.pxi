# The types of a batch's results, and its constants.

class Counters(NamedTuple):
    """The number of sequences in the batch that need each feature, updated incrementally.

    `sampled`: a temperature above 0; `top_p`, `top_k`, `min_p`: that and a bound that has an effect;
    `penalties`: any of them; `min_tokens`: fewer committed tokens of output than that.
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
    """The sequences that can be scheduled.

    `decodes`: how many slots were given their one token. `prefills` (int32): slots with more to compute, in
    the order of admission. `short` (int32): slots of decodes whose blocks do not hold that token, by row.
    """

    decodes: int
    prefills: array
    short: array


class Offsets(NamedTuple):
    """The beginnings of a step's sections, in int32 words from the beginning of its arena."""

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
    """The results of a committed step.

    `keys` (int64), `tokens` and `samples` (int32) [n]: the sequences' keys, their tokens, and the indices of
    these among the step's samples, ascending. `finished`: (slot, reason, index among the n); reason 1: an
    end-of-sequence or stop id, 2: max_tokens or max_model_len. `failed`: (slot, index among the samples): the
    id was no token. `filled` (int32): slots whose committed tokens filled another block, in no particular
    order. Only sequences still in the batch are named; they stay in it.
    """

    keys: memoryview
    tokens: memoryview
    samples: memoryview
    finished: list[tuple[int, int, int]]
    failed: list[tuple[int, int]]
    filled: array


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
    SMALL_PAGE = 4096
    LARGE_PAGE = 1 << 21
    AHEAD = 16              # newcomers that are prefetched together
    STATE_LINES = 3         # cache lines of a `SequenceState` that a batch reads
    FETCHED_AHEAD = 20      # tokens, more than a cache line
    MARKS_MORE = 64         # bytes that `list_marks` may read beyond the last
    ROUNDS_AT_MOST = 1 << 29
    PHASES_AT_MOST = 256

cdef enum Need:
    SAMPLED = 1
    TOP_P = 2
    TOP_K = 4
    MIN_P = 8
    PENALTIES = 16
    BIASED = 32
    MIN_TOKENS = 64
    LOGPROBS = 128
