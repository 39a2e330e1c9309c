# The state of sequences in the batch: by slot, and for steady decodes by row. A round is the number of a
# step, counted since `all_alight` last reset it.

cdef struct Stay:
    # The state of a slot while one sequence is in it: all that a step reads of the slot, in one cache line.
    int32_t *tokens         # of the sequence's own buffer
    int64_t serial          # number of the admission, from 1; 0: the slot is empty
    int64_t last_scheduled  # number of its last step, or at first of the latest step before it was added
    int32_t length          # committed tokens, prompt and output
    int32_t computed        # tokens in the cache when all prepared steps are done
    int32_t committed       # tokens in the cache now
    int32_t limit           # length at which the sequence ends
    int32_t min_end         # length from which an end-of-sequence or stop id ends it
    int32_t room            # tokens that the blocks of every group hold
    int32_t row
    int32_t sample          # index of its newest placeholder among its step's samples
    int32_t capacity        # tokens that the buffer holds
    uint8_t pending         # number of placeholders
    uint8_t over            # whether it has finished, failed or been cancelled
    uint8_t ignore_eos
    uint8_t stops           # whether the sequence has stop ids of its own


cdef struct Held:
    # A slot's row in one group's block table.
    int32_t count           # blocks
    int32_t slid            # columns that have slid out
    int32_t unseen          # the first column not yet on the device, if the slot's bit in `staged` is set


cdef struct Columns:
    int32_t *num_scheduled
    int32_t *num_tokens             # this and the next two are written when they are read
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


cdef struct Run:
    # Consecutive rows of steady decodes, which are also consecutive in a step, from `place` on.
    int32_t row
    int32_t place
    int32_t count


cdef struct Riders:
    # The steady decodes, by row. Their fields are relative to the round, so that a step writes nothing for
    # them. The counts in their `Stay` are out of date meanwhile.
    int32_t prepared        # rounds
    int32_t committed       # rounds; `prepared` less the number of steps under way
    int64_t latest          # number of the latest step
    int64_t changes         # counts changes of the rows of steady decodes
    uint64_t *riding        # bits: which rows are steady decodes
    uint64_t *phases        # bits: [phase_count, words], by the round, modulo phase_count, that begins blocks
    int32_t words
    int32_t phase_count     # a divisor of the block size, usually the block size itself
    int32_t soonest         # a lower bound of the rounds in `late`
    int32_t closest         # a lower bound of the rounds in `closer`
    int32_t *origin         # tokens in the cache in round 0
    int32_t *room           # first round whose token does not fit in the row's blocks
    int32_t *late           # first round in which the row is checked before a step; INT32_MAX: not steady
    int32_t *closer         # first round in which the row's token is checked; INT32_MAX: not steady
    int32_t *next_id        # while a step is under way: the input id of the next, as in `Step.input_ids`,
    Run *unplaced           # except for rows in these runs of the latest step; NULL: none
    int32_t unplaced_count
    int32_t *lift[GROUPS_AT_MOST]   # the slot mapping of its token, less the round
    int64_t *keys
    int32_t **ends          # the address in its buffer where the token of round 0 would be
    int32_t *ring           # the latest tokens: [RING, ring_width], by round and row
    int32_t ring_width
    int32_t *since          # first round whose token is in the ring
    uint64_t *fresh         # bits: rows whose `since` may be later than the last `empty_ring` of the row


cdef struct Record:
    # The rows of a step under way.
    int32_t *slots          # by the step's rows; NONE: removed
    int32_t *counts         # tokens computed, by the step's rows; unset for decodes; negative: no sample
    Run *runs
    int32_t run_count
    int64_t changes         # the runs are valid while this equals `Riders.changes`


cdef struct Results:
    # The results of a commit, by sample, and the lengths of its lists.
    int64_t *keys
    int32_t *tokens
    int32_t *losses         # samples without a recipient, ascending
    int32_t lost
    int32_t filled
    int32_t boarders
    int32_t ended


cdef struct Ending:
    int32_t slot
    int32_t reason
    int32_t place           # index among the results, or among the samples if it failed


cdef inline bint rides(Riders *riders, Stay *stay) noexcept:
    return has_bit(riders.riding, stay.row)


cdef inline int32_t phase_of(Riders *riders, int32_t origin) noexcept:
    # Return the round, modulo phase_count, in which the row's blocks can begin.
    cdef int32_t phase = origin % riders.phase_count
    return -phase if phase <= 0 else riders.phase_count - phase


cdef inline uint64_t *in_phase(Riders *riders, int32_t round) noexcept:
    return riders.phases + <int64_t>(round % riders.phase_count) * riders.words


cdef void write_places(Riders *riders) noexcept:
    # Write the placeholders of the latest step. Deferred, because usually a commit makes them unnecessary.
    cdef int32_t i
    cdef Run *run
    if riders.unplaced != NULL:
        for i in range(riders.unplaced_count):
            run = &riders.unplaced[i]
            count_down_from(riders.next_id + run.row, -1 - run.place, run.count)
        riders.unplaced = NULL


cdef inline int32_t *latest_tokens(Riders *riders) noexcept:
    # By row, including rows that have just joined.
    return riders.ring + ((riders.committed - 1) & (RING - 1)) * riders.ring_width


cdef inline void bring_up_to_date(Riders *riders, Stay *stay) noexcept:
    cdef int32_t origin
    if rides(riders, stay):
        origin = riders.origin[stay.row]
        stay.computed = origin + riders.prepared
        stay.committed = origin + riders.committed
        stay.length = stay.committed + 1
        stay.pending = riders.prepared - riders.committed
        stay.last_scheduled = riders.latest
        if stay.pending:
            write_places(riders)
            stay.sample = -1 - riders.next_id[stay.row]


cdef inline void get_on(Riders *riders, int32_t row) noexcept:
    # Make a row a steady decode. Its other fields are written already.
    riders.since[row] = riders.committed
    set_bit(riders.fresh, row)
    set_bit(riders.riding, row)
    set_bit(in_phase(riders, phase_of(riders, riders.origin[row])), row)
    riders.soonest = min(riders.soonest, riders.late[row])
    riders.closest = min(riders.closest, riders.closer[row])
    riders.changes += 1


cdef inline void get_off(Riders *riders, int32_t row) noexcept:
    clear_bit(riders.riding, row)
    clear_bit(in_phase(riders, phase_of(riders, riders.origin[row])), row)
    riders.late[row] = riders.closer[row] = INT32_MAX
    riders.changes += 1


cdef void fetch_quarter(Riders *riders, int32_t quarter) noexcept:
    # Prefetch the memory for later tokens: in each round for other rows, and for all rows within as many
    # rounds as a cache line has tokens. A quarter at a time, because more prefetches at once would stall.
    cdef int32_t round = riders.prepared
    cdef uint64_t part = <uint64_t>0x0001000100010001 << (round & 15)
    cdef int32_t word
    for word in range(quarter, riders.words, 4):
        fetch_ahead(riders.ends, riders.riding[word] & part, 64 * word, round + FETCHED_AHEAD)


cdef inline void write_tokens(Riders *riders, int32_t row) noexcept:
    # Copy the tokens that are only in the ring: those since `empty_ring` last copied them, or the row joined.
    cdef int32_t emptied = riders.committed - 1 - ((riders.committed - 1 - (row >> 6)) & (RING - 1))
    write_row(
        riders.ring, riders.ring_width, riders.ends[row], row, max(emptied, riders.since[row]), riders.committed
    )


cdef inline void alight(Riders *riders, Stay *stay) noexcept:
    if rides(riders, stay):
        bring_up_to_date(riders, stay)
        write_tokens(riders, stay.row)
        get_off(riders, stay.row)


cdef inline int32_t round_of(int32_t tokens, int32_t origin) noexcept:
    # Return the round in which the row has `tokens` tokens in the cache before its own token.
    return min(<int64_t>tokens - origin, <int64_t>INT32_MAX - 1)


cdef inline void take_out(Stay *stay) noexcept:
    stay.over = True
    stay.pending = 0


cdef inline bint takes_part(Stay *stay) noexcept:
    return not stay.over and stay.length + stay.pending < stay.limit
