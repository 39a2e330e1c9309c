# A prepared step: views into its arena.

Offsets = namedtuple(
    "Offsets",
    "input_ids positions slot_mapping query_starts sequence_lengths slots sample_tokens sample_slots block_writes",
    module=__name__,
)
Offsets.__doc__ = "The beginnings of a step's sections, in int32 words from the beginning of its arena."


@cython.final
@cython.no_gc  # it refers to views only
@cython.freelist(4)
cdef class Step:
    """One prepared step: T tokens of B rows, with S samples. Its sections are int32 views into its arena.

    Valid until the arena is used again, in turn with the others. The first `decodes` rows have one token,
    which samples. Another row samples after none of its tokens, after its last one, or with drafts after
    its last known token and each draft.
    """

    cdef StepPlan plan
    cdef object words       # the whole arena
    cdef readonly int64_t number
    cdef readonly int32_t arena_index, tokens, rows, decodes, samples, drafts
    cdef readonly bint processes_logits     # whether logits that it samples from are processed on the host

    def __dealloc__(self):
        free(self.plan.members)

    cdef object section(self, int32_t section, int32_t length):
        cdef int32_t start = self.plan.starts[section]
        return self.words[start : start + length]

    @property
    def offsets(self):
        return Offsets(*[self.plan.starts[i] for i in range(SECTIONS)])

    @property
    def arena(self) -> memoryview:
        """The whole step, header first: the words that one copy takes to a device."""
        return self.words[: self.plan.end]

    @property
    def input_ids(self) -> memoryview:
        """[T]; an id not known yet is −1 − (its index among the samples of the previous step)."""
        return self.section(INPUT_IDS, self.tokens)

    @property
    def positions(self) -> memoryview:
        """[T]"""
        return self.section(POSITIONS, self.tokens)

    @property
    def slot_mapping(self) -> tuple[memoryview, ...]:
        """[T] by group: where a token's keys and values are written, block · block_size + offset."""
        tokens = self.tokens
        mapping = self.section(SLOT_MAPPING, self.plan.groups * tokens)
        return tuple([mapping[group * tokens : (group + 1) * tokens] for group in range(self.plan.groups)])

    @property
    def query_starts(self) -> memoryview:
        """[B + 1]"""
        return self.section(QUERY_STARTS, self.rows + 1)

    @property
    def sequence_lengths(self) -> memoryview:
        """[B]: tokens in the cache after this step."""
        return self.section(SEQUENCE_LENGTHS, self.rows)

    @property
    def slots(self) -> memoryview:
        """[B]"""
        return self.section(SLOTS, self.rows)

    @property
    def sample_tokens(self) -> memoryview:
        """[S], ascending: the indices of the tokens after which a token is sampled."""
        return self.section(SAMPLE_TOKENS, self.samples)

    @property
    def sample_slots(self) -> memoryview:
        """[S]"""
        return self.section(SAMPLE_SLOTS, self.samples)

    @property
    def block_writes(self) -> memoryview:
        """The block table changes since the previous step: (group, slot, first column, count, ids …)*."""
        return self.section(BLOCK_WRITES, self.plan.end - self.plan.starts[BLOCK_WRITES])
