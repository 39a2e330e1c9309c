# One prepared step, as views into its arena.

@cython.final
@cython.no_gc  # it refers to views only
@cython.freelist(4)
cdef class Step:
    """One prepared step: T tokens of B rows, S of which sample. Its sections are int32 views into its arena.

    Valid until the arena is used again, in turn with the others. The first `decodes` rows have one token,
    which samples. The index of sample s among the step's tokens is query_starts[sample_rows[s] + 1] − 1.
    """

    cdef object words       # the whole arena
    cdef readonly int64_t number
    cdef readonly int32_t tokens
    cdef readonly int32_t rows
    cdef readonly int32_t decodes
    cdef readonly int32_t samples
    cdef readonly int32_t arena_index
    cdef int32_t groups
    cdef int32_t record     # which of the batch's records is this step's
    cdef int32_t end
    cdef int32_t starts[SECTIONS]

    cdef object section(self, int32_t start, int32_t length):
        return self.words[start : start + length]

    @property
    def offsets(self):
        return Offsets(*[self.starts[i] for i in range(SECTIONS)])

    @property
    def arena(self) -> memoryview:
        """The whole step, header first: the words that one copy takes to a device."""
        return self.section(0, self.end)

    @property
    def input_ids(self) -> memoryview:
        """[T]; an id not known yet is −1 − (its index among the samples of the previous step)."""
        return self.section(self.starts[0], self.tokens)

    @property
    def positions(self) -> memoryview:
        """[T]"""
        return self.section(self.starts[1], self.tokens)

    @property
    def slot_mapping(self) -> tuple[memoryview, ...]:
        """[T] by group: where a token's keys and values are written, block · block_size + offset."""
        start = self.starts[2]
        return tuple(
            [self.section(start + group * self.tokens, self.tokens) for group in range(self.groups)]
        )

    @property
    def query_starts(self) -> memoryview:
        """[B + 1]"""
        return self.section(self.starts[3], self.rows + 1)

    @property
    def sequence_lengths(self) -> memoryview:
        """[B]: tokens in the cache after this step."""
        return self.section(self.starts[4], self.rows)

    @property
    def slots(self) -> memoryview:
        """[B]"""
        return self.section(self.starts[5], self.rows)

    @property
    def sample_rows(self) -> memoryview:
        """[S], ascending."""
        return self.section(self.starts[6], self.samples)

    @property
    def sample_slots(self) -> memoryview:
        """[S]"""
        return self.section(self.starts[7], self.samples)

    @property
    def block_writes(self) -> memoryview:
        """The block table changes since the previous step: (group, slot, first column, count, ids …)*."""
        return self.section(self.starts[8], self.end - self.starts[8])
