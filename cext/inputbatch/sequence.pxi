# A sequence and its tokens.

@cython.final
@cython.no_gc
cdef class TokenBuffer:
    """The memory of one sequence's token ids. A larger one replaces it when full; views keep this one."""

    cdef int32_t *memory
    cdef int32_t *ids       # preceded by RING unused ids
    cdef Py_ssize_t capacity

    def __dealloc__(self):
        PyMem_Free(self.memory)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.ids, self.capacity * sizeof(int32_t), True, flags)


cdef TokenBuffer new_token_buffer(Py_ssize_t capacity):
    cdef TokenBuffer buffer = TokenBuffer.__new__(TokenBuffer)
    buffer.memory = <int32_t *>PyMem_Malloc((RING + capacity) * sizeof(int32_t))
    if buffer.memory == NULL:
        raise MemoryError
    memset(buffer.memory, 0, RING * sizeof(int32_t))
    buffer.ids = buffer.memory + RING
    buffer.capacity = capacity
    return buffer


@cython.final
cdef class SequenceState:
    """A sequence, in a batch or not: its token ids, counts and sampling parameters.

    `prompt`: int32 ids, at least one, not negative; they are copied. `seed` is taken modulo 2⁶⁴. `logprobs`:
    None for none. `sampling` is the caller's own object. ValueError for a number out of its range, TypeError
    for anything that is not a number.
    """

    cdef Stay *stay         # NULL: in no batch; only then `length` … `slot_outside` below are current
    cdef Riders *riders     # of the batch
    cdef int32_t length
    cdef int32_t computed_outside
    cdef int32_t committed_outside
    cdef int32_t slot_outside
    cdef readonly int64_t key
    cdef readonly int32_t prompt_length
    cdef readonly int32_t max_tokens
    cdef readonly int32_t min_tokens
    cdef int32_t stop_count
    cdef int32_t *ids       # in the buffer
    cdef int32_t capacity
    cdef int32_t largest    # of the prompt's ids
    cdef int32_t top_k
    cdef int32_t logprobs
    cdef float temperature
    cdef float top_p
    cdef float min_p
    cdef float presence_penalty
    cdef float frequency_penalty
    cdef float repetition_penalty
    cdef uint64_t seed
    cdef bint ignore_eos
    cdef bint biased
    # A batch that adds the sequence reads only the fields above.
    cdef TokenBuffer buffer
    cdef int32_t *stops
    cdef readonly object sampling

    def __cinit__(
        self,
        int64_t key,
        prompt,
        *,
        int64_t max_tokens,
        int64_t min_tokens=0,
        double temperature=1.0,
        double top_p=1.0,
        int64_t top_k=0,
        double min_p=0.0,
        double presence_penalty=0.0,
        double frequency_penalty=0.0,
        double repetition_penalty=1.0,
        seed=0,
        logprobs=None,
        bint ignore_eos=False,
        stop_token_ids=(),
        bint biased=False,
        sampling=None,
    ):
        cdef int64_t logprobs_number = NONE
        if logprobs is not None:
            logprobs_number = logprobs
            if not 0 <= logprobs_number <= INT32_MAX:
                raise ValueError(f"logprobs must be None or in 0...{INT32_MAX}, not {logprobs}")
        if not 1 <= max_tokens <= INT32_MAX:
            raise ValueError(f"max_tokens must be in 1...{INT32_MAX}, not {max_tokens}")
        if not 0 <= min_tokens <= INT32_MAX:
            raise ValueError(f"min_tokens must be in 0...{INT32_MAX}, not {min_tokens}")
        if not 0 <= top_k <= INT32_MAX:
            raise ValueError(f"top_k must be in 0...{INT32_MAX}, not {top_k}")
        if not temperature >= 0.0:
            raise ValueError(f"temperature must be at least 0, not {temperature}")
        if not 0.0 <= top_p <= 1.0:
            raise ValueError(f"top_p must be in 0...1, not {top_p}")
        if not 0.0 <= min_p <= 1.0:
            raise ValueError(f"min_p must be in 0...1, not {min_p}")
        if not PyLong_Check(seed):
            raise TypeError(f"seed must be an int, not {type(seed).__name__}")
        self.key = key
        self.sampling = sampling
        self.max_tokens, self.min_tokens = max_tokens, min_tokens
        self.temperature, self.top_p, self.min_p, self.top_k = temperature, top_p, min_p, top_k
        self.presence_penalty, self.frequency_penalty = presence_penalty, frequency_penalty
        self.repetition_penalty = repetition_penalty
        self.seed = PyLong_AsUnsignedLongLongMask(seed)
        self.logprobs = logprobs_number
        self.ignore_eos, self.biased = ignore_eos, biased
        self.slot_outside = NONE
        self.take_stops(stop_token_ids)
        self.take_prompt(prompt)

    def __dealloc__(self):
        PyMem_Free(self.stops)

    cdef int take_stops(self, ids) except -1:
        cdef Py_ssize_t count
        if type(ids) is tuple and PyTuple_GET_SIZE(ids) == 0:
            return 0
        ids = tuple(ids)
        count = PyTuple_GET_SIZE(ids)
        if count > INT32_MAX:
            raise ValueError("too many stop_token_ids")
        self.stops = <int32_t *>PyMem_Malloc(count * sizeof(int32_t))
        if self.stops == NULL:
            raise MemoryError
        self.stop_count = read_ids(ids, self.stops, count, INT32_MIN, INT32_MAX, "stop token ids")
        return 0

    cdef int take_prompt(self, prompt) except -1:
        cdef Py_ssize_t length, i
        cdef int32_t largest = 0
        if not isinstance(prompt, (list, tuple)):
            prompt = memoryview(prompt) if PyObject_CheckBuffer(prompt) else tuple(prompt)
        length = len(prompt)
        if not 1 <= length <= WORDS_AT_MOST:
            raise ValueError(f"a prompt must have 1...{WORDS_AT_MOST} tokens, not {length}")
        self.buffer = new_token_buffer(length + min(<int64_t>self.max_tokens, OUTPUT_ROOM_AT_FIRST))
        self.ids = self.buffer.ids
        self.capacity = self.buffer.capacity
        self.prompt_length = self.length = read_ids(prompt, self.ids, length, 0, INT32_MAX, "token ids")
        if self.length != length:
            raise ValueError("the prompt was changed meanwhile")
        for i in range(length):
            largest = max(largest, self.ids[i])
        self.largest = largest
        return 0

    cdef int grow(self) except -1:
        # Make room for more output. Only called in a batch.
        cdef Stay *stay = self.stay
        cdef Py_ssize_t capacity = min(<int64_t>2 * stay.capacity, <int64_t>INT32_MAX)
        cdef TokenBuffer larger = new_token_buffer(capacity)
        memcpy(larger.ids, stay.tokens, stay.length * sizeof(int32_t))
        self.buffer = larger
        stay.tokens = self.ids = larger.ids
        stay.capacity = self.capacity = capacity
        return 0

    cdef Stay *stay_now(self) noexcept:
        if self.stay != NULL:
            bring_up_to_date(self.riders, self.stay)
        return self.stay

    cdef int32_t length_now(self) noexcept:
        return self.length if self.stay == NULL else self.stay_now().length

    cdef int32_t written_length(self) noexcept:
        # Copy all tokens to the buffer, and return the number of committed ones.
        if self.stay != NULL and rides(self.riders, self.stay):
            write_tokens(self.riders, self.stay.row)
        return self.length_now()

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return tuple([self.stops[i] for i in range(self.stop_count)])

    @property
    def slot(self) -> int:
        """The slot in the batch, or −1 in no batch."""
        return NONE if self.stay == NULL else self.slot_outside

    @property
    def num_tokens(self) -> int:
        """The number of tokens of prompt and output, placeholders included."""
        return self.length if self.stay == NULL else self.stay_now().length + self.stay.pending

    @property
    def output_length(self) -> int:
        """The number of committed tokens of output."""
        return self.length_now() - self.prompt_length

    @property
    def computed(self) -> int:
        """The number of tokens in the KV cache when all prepared steps are done."""
        return self.computed_outside if self.stay == NULL else self.stay_now().computed

    @property
    def committed(self) -> int:
        """The number of tokens in the KV cache, of committed steps."""
        return self.committed_outside if self.stay == NULL else self.stay_now().committed

    def token_ids(self, int64_t start=0):
        """Return a copy of the committed tokens from `start` on, an array of int32."""
        cdef int32_t length = self.written_length()
        if not 0 <= start <= length:
            raise ValueError(f"there are tokens 0...{length - 1}, none from {start} on")
        cdef c_array ids = clone(INT32S, length - start, False)
        memcpy(ids.data.as_voidptr, self.buffer.ids + start, (length - start) * sizeof(int32_t))
        return ids

    def tokens_view(self) -> memoryview:
        """Return a read-only view of the committed tokens, int32. Later tokens may go to another buffer."""
        return memoryview(self.buffer).cast("i")[: self.written_length()]

    def rewind(self, int64_t computed) -> None:
        """Set how many tokens are in the KV cache: 0 after a preemption, or the length of a cached prefix.

        ValueError in a batch, or unless at least one token is left to compute.
        """
        if self.stay != NULL:
            raise ValueError("a sequence in a batch cannot be rewound")
        if not 0 <= computed < self.length:
            raise ValueError(f"of {self.length} tokens, {computed} cannot be computed already")
        self.computed_outside = self.committed_outside = computed

    def __sizeof__(self) -> int:
        memory = (RING + self.buffer.capacity) * sizeof(int32_t) + self.stop_count * sizeof(int32_t)
        return object.__sizeof__(self) + memory


cdef uint8_t needs_of(SequenceState state, int32_t vocab_size) noexcept:
    cdef uint8_t needs = 0
    if state.temperature > 0.0:
        needs |= SAMPLED
        if state.top_p < 1.0:
            needs |= TOP_P
        if 0 < state.top_k < vocab_size:
            needs |= TOP_K
        if state.min_p > 0.0:
            needs |= MIN_P
    if state.presence_penalty != 0.0 or state.frequency_penalty != 0.0 or state.repetition_penalty != 1.0:
        needs |= PENALTIES
    if state.biased:
        needs |= BIASED
    if state.length - state.prompt_length < state.min_tokens:
        needs |= MIN_TOKENS
    if state.logprobs >= 0:
        needs |= LOGPROBS
    return needs
