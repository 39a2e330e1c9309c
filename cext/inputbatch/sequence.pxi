# A sequence's token ids and counts.

@cython.final
cdef class SequenceState:
    """A sequence, in a batch or not: its token ids and counts.

    `prompt`: int32 ids, at least one, not negative; they are copied. `largest_id`: the largest of them.
    `processes_logits`: its logits are processed on the host before it samples. `sampling` is the caller's own
    object. ValueError for a number out of its range, TypeError for anything that is not a number.
    """

    cdef Sequence sequence
    cdef object ids_view        # a read-only view of the array of ids; `reserve` replaces both
    cdef readonly object sampling
    cdef readonly int64_t key
    cdef readonly int32_t prompt_length, max_tokens, min_tokens, largest_id

    def __cinit__(
        self,
        int64_t key,
        prompt,
        *,
        int64_t max_tokens,
        int64_t min_tokens=0,
        bint ignore_eos=False,
        stop_token_ids=(),
        bint processes_logits=False,
        sampling=None,
    ):
        cdef Sequence *sequence = &self.sequence
        check_range("max_tokens", max_tokens, 1, INT32_MAX)
        check_range("min_tokens", min_tokens, 0, INT32_MAX)
        self.sampling = sampling
        self.key = sequence.key = key
        self.max_tokens = sequence.max_tokens = max_tokens
        self.min_tokens = sequence.min_tokens = min_tokens
        sequence.ignore_eos, sequence.processes_logits = ignore_eos, processes_logits
        sequence.slot = NONE
        stop_token_ids = tuple(stop_token_ids)
        count = len(stop_token_ids)
        sequence.stops = <int32_t *>malloc(max(1, count) * sizeof(int32_t))
        if sequence.stops == NULL:
            raise MemoryError
        sequence.stop_count = read_ids(
            stop_token_ids, sequence.stops, count, INT32_MIN, INT32_MAX, "stop token ids"
        )
        self.copy_prompt(prompt)

    def __dealloc__(self):
        free(self.sequence.stops)

    cdef int copy_prompt(self, prompt) except -1:
        cdef Sequence *sequence = &self.sequence
        cdef int32_t i
        if not isinstance(prompt, (list, tuple)):
            prompt = memoryview(prompt) if PyObject_CheckBuffer(prompt) else tuple(prompt)
        length = len(prompt)
        check_range("the number of prompt tokens", length, 1, WORDS_AT_MOST)
        self.reserve(length + min(sequence.max_tokens, OUTPUT_ROOM_AT_FIRST))
        sequence.length = read_ids(prompt, sequence.ids, length, 0, INT32_MAX, "token ids")
        if sequence.length != length:
            raise ValueError("the prompt was changed meanwhile")
        self.prompt_length = sequence.prompt_length = sequence.length
        for i in range(sequence.length):
            sequence.largest = max(sequence.largest, sequence.ids[i])
        self.largest_id = sequence.largest
        return 0

    cdef int reserve(self, int64_t capacity) except -1:
        # Make room for `capacity` tokens.
        cdef c_array ids = clone(INT32S, min(capacity, <int64_t>INT32_MAX), False)
        memcpy(ids.data.as_ints, self.sequence.ids, self.sequence.length * sizeof(int32_t))
        self.ids_view = memoryview(ids).toreadonly()
        self.sequence.ids = <int32_t *>ids.data.as_ints
        self.sequence.capacity = len(ids)
        return 0

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return tuple([self.sequence.stops[i] for i in range(self.sequence.stop_count)])

    @property
    def slot(self) -> int:
        """The slot in the batch, or −1 in no batch."""
        return self.sequence.slot

    @property
    def num_tokens(self) -> int:
        """The number of tokens of prompt and output, placeholders included."""
        return num_tokens(&self.sequence)

    @property
    def output_length(self) -> int:
        """The number of committed tokens of output."""
        return self.sequence.length - self.sequence.prompt_length

    @property
    def computed(self) -> int:
        """The number of tokens in the KV cache when all prepared steps are done."""
        return self.sequence.computed

    @property
    def committed(self) -> int:
        """The number of tokens in the KV cache, of committed steps."""
        return self.sequence.committed

    def token_ids(self, int64_t start=0):
        """Return a copy of the committed tokens from `start` on, an array of int32."""
        cdef int32_t length = self.sequence.length
        if not 0 <= start <= length:
            raise ValueError(f"there are tokens 0...{length - 1}, none from {start} on")
        return int32s(self.sequence.ids + start, length - start)

    def tokens_view(self) -> memoryview:
        """Return a read-only view of the committed tokens, int32. Later tokens may go to another buffer."""
        return self.ids_view[: self.sequence.length]

    def rewind(self, int64_t computed) -> None:
        """Set how many tokens are in the KV cache: 0 after a preemption, or the length of a cached prefix.

        ValueError in a batch, or if no token would be left to compute.
        """
        if self.sequence.slot != NONE:
            raise ValueError("a sequence in a batch cannot be rewound")
        if not 0 <= computed < self.sequence.length:
            raise ValueError(f"of {self.sequence.length} tokens, {computed} cannot be computed already")
        self.sequence.computed = self.sequence.committed = computed

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + (self.sequence.capacity + self.sequence.stop_count) * sizeof(int32_t)
