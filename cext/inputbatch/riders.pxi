# What is known of who is in the batch: by slot, and of those who ride along, by row.

cdef struct Stay:
    # All that a step asks of one slot, in one cache line.
    int32_t *tokens         # of the sequence's own buffer
    int64_t serial          # of this stay, from 1; 0: the slot is empty
    int64_t last_scheduled  # number of the step, or of the latest when it came
    int32_t length          # committed tokens, prompt and output
    int32_t computed        # tokens in the cache when all prepared steps are done
    int32_t committed       # tokens in the cache now
    int32_t limit           # length at which it ends
    int32_t min_end         # length from which an end-of-sequence id is obeyed
    int32_t room            # tokens that the blocks of every group hold
    int32_t row
    int32_t sample          # of its newest placeholder, among its step's samples
    int32_t capacity        # tokens that the buffer holds
    uint8_t pending         # placeholders
    uint8_t over
    uint8_t ignore_eos
    uint8_t stops           # whether the sequence has stop ids of its own


cdef struct Held:
    # Of one slot, in one group's block table.
    int32_t count           # blocks
    int32_t slid            # columns that have slid out
    int32_t unseen          # the first column that the device has not seen, where the bit of the slot is set


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


cdef struct Run:
    # Of rows that ride: they are beside each other in a step, too.
    int32_t row
    int32_t place
    int32_t count


cdef struct Riders:
    # By row, what a row that is in every step as a decode advances by: nothing of it is written in a step, because
    # it is kept relative to how many steps there were. While a row rides, its stay's counts are out of date.
    int32_t prepared        # rounds
    int32_t committed       # rounds; as many fewer as steps are under way
    int64_t latest          # number of the latest step
    int64_t changes         # of who rides where
    uint64_t *riding        # bits
    uint64_t *phases        # bits of those who ride: [phase_count, words], by when their blocks begin
    int32_t words
    int32_t phase_count     # a divisor of the block size, mostly that itself
    int32_t soonest         # no round in `late` is before this,
    int32_t closest         # none in `closer` before this
    int32_t *origin         # its tokens in the cache in round 0
    int32_t *room           # round from which on its blocks do not hold its token
    int32_t *late           # round from which on it must be looked at before a step; INT32_MAX: it does not ride
    int32_t *closer         # round from which on its token must be looked at; INT32_MAX: it does not ride
    int32_t *next_id        # while a step is under way: what the next begins with, as `Step.input_ids`,
    Run *unplaced           # but for who is in these runs of the latest step; NULL: nobody is
    int32_t unplaced_count
    int32_t *lift[GROUPS_AT_MOST]   # where in the cache its tokens go, less the round
    int64_t *keys
    int32_t **ends          # where in its buffer the token of round 0 would have gone
    int32_t *ring           # the latest tokens: [RING, ring_width], by round and row
    int32_t ring_width
    int32_t *since          # round from which on its tokens are in the ring,
    uint64_t *fresh         # bits: which may be after the ring was emptied last


cdef struct Record:
    # Who is in a step under way.
    int32_t *slots          # by the step's rows; NONE: it has left
    int32_t *counts         # tokens computed, by the step's rows; nothing for decodes; negative: it does not sample
    Run *runs
    int32_t run_count
    int64_t changes         # the runs are right as long as nothing changed


cdef struct Results:
    # What a commit answers, by sample, and how many it has listed.
    int64_t *keys
    int32_t *tokens
    int32_t *losses         # samples that nobody got, ascending
    int32_t lost
    int32_t filled
    int32_t boarders
    int32_t ended


cdef struct Ending:
    int32_t slot
    int32_t reason
    int32_t place           # among the results, or among the samples when it failed


cdef inline bint rides(Riders *riders, Stay *stay) noexcept:
    return has_bit(riders.riding, stay.row)


cdef inline int32_t phase_of(Riders *riders, int32_t origin) noexcept:
    # Of the rounds, counted modulo as many as there are phases, the one in which its blocks can begin.
    cdef int32_t phase = origin % riders.phase_count
    return -phase if phase <= 0 else riders.phase_count - phase


cdef inline uint64_t *in_phase(Riders *riders, int32_t round) noexcept:
    return riders.phases + <int64_t>(round % riders.phase_count) * riders.words


cdef void write_places(Riders *riders) noexcept:
    # Only when they are asked for: mostly, a step is committed first, and then they never are.
    cdef int32_t i
    cdef Run *run
    if riders.unplaced != NULL:
        for i in range(riders.unplaced_count):
            run = &riders.unplaced[i]
            count_down_from(riders.next_id + run.row, -1 - run.place, run.count)
        riders.unplaced = NULL


cdef inline int32_t *latest_tokens(Riders *riders) noexcept:
    # By row; of who has just got on as well.
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
    # What else there is of the row is written already.
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
    # Where tokens will go: each round of other rows, of all of them in as many rounds as a cache line has tokens. A
    # quarter of it at a time: more than so much at once would have to wait.
    cdef int32_t round = riders.prepared
    cdef uint64_t part = <uint64_t>0x0001000100010001 << (round & 15)
    cdef int32_t word
    for word in range(quarter, riders.words, 4):
        fetch_ahead(riders.ends, riders.riding[word] & part, 64 * word, round + FETCHED_AHEAD)


cdef inline void write_tokens(Riders *riders, int32_t row) noexcept:
    # Those that are in the ring only: since it was emptied, as `empty_ring` does it, or the row got on.
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
    # In which it has so many in the cache before its token.
    return min(<int64_t>tokens - origin, <int64_t>INT32_MAX - 1)


cdef inline void take_out(Stay *stay) noexcept:
    stay.over = True
    stay.pending = 0


cdef inline bint takes_part(Stay *stay) noexcept:
    return not stay.over and stay.length + stay.pending < stay.limit
