# Loops over rows, one element each and in order, so that the compiler can do many at once: what a step that is like
# the one before it consists of. Where the loader can choose, they exist for wider registers too.

cdef extern from *:
    """
    #if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GLIBC__) && !defined(__clang__)
    #define WIDE __attribute__((target_clones("avx2", "default")))
    #else
    #define WIDE
    #endif

    /* Rows that do not simply go along: due, or not asked for exactly one token. A hole is always due. */
    WIDE static void mark_odd(uint8_t *restrict marks, const int32_t *restrict due, int32_t now,
                              const int32_t *restrict rows, const int32_t *restrict counts, int32_t n) {
        for (int32_t i = 0; i < n; i++) {
            int32_t slot = rows[i] < 0 ? 0 : rows[i];
            marks[i] = (due[i] <= now) | (counts[slot] != 1);
        }
    }

    WIDE static void mark_due(uint8_t *restrict marks, const int32_t *restrict due, int32_t now, int32_t n) {
        for (int32_t i = 0; i < n; i++) marks[i] = due[i] <= now;
    }

    WIDE static void mark_equal(uint8_t *restrict marks, const int32_t *restrict numbers, int32_t number,
                                int32_t n) {
        for (int32_t i = 0; i < n; i++) marks[i] = numbers[i] == number;
    }

    /* Tokens that are none, or may end a sequence, and rows whose count is up. */
    WIDE static void mark_hits(uint8_t *restrict marks, const int32_t *restrict tokens, int32_t vocabulary,
                               const int32_t *restrict closer, int32_t round,
                               const int32_t *restrict eos, int32_t eos_count, int32_t n) {
        for (int32_t i = 0; i < n; i++)
            marks[i] = ((uint32_t)tokens[i] >= (uint32_t)vocabulary) | (closer[i] <= round);
        for (int32_t k = 0; k < eos_count; k++) {
            int32_t end = eos[k];
            for (int32_t i = 0; i < n; i++) marks[i] |= tokens[i] == end;
        }
    }

    /* The places of the marks, in order; how many. The marks have room for 63 more. */
    static int32_t list_marks(uint8_t *marks, int32_t n, int32_t *places) {
        int32_t found = 0;
        memset(marks + n, 0, 63);
        for (int32_t i = 0; i < n; i += 64) {
            uint64_t bits = 0;
            for (int32_t j = 0; j < 8; j++) {
                uint64_t bytes;
                memcpy(&bytes, marks + i + 8 * j, 8);
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
                bytes = __builtin_bswap64(bytes);
    #endif
                bits |= bytes * 0x0102040810204080 >> 56 << 8 * j;  /* the first byte is the lowest bit */
            }
            for (; bits; bits &= bits - 1) places[found++] = i + __builtin_ctzll(bits);
        }
        return found;
    }

    WIDE static void add_to_all(int32_t *restrict target, const int32_t *restrict source, int32_t amount,
                                int32_t n) {
        for (int32_t i = 0; i < n; i++) target[i] = source[i] + amount;
    }

    WIDE static void count_from(int32_t *restrict target, int32_t first, int32_t n) {
        for (int32_t i = 0; i < n; i++) target[i] = first + i;
    }

    /* What a run of riders has in a step; the mapping of one group. Each will begin the next step with a
       placeholder. */
    WIDE static void write_along(int32_t *restrict ids, int32_t *restrict positions, int32_t *restrict lengths,
                                 int32_t *restrict slots, int32_t *restrict mapping,
                                 int32_t *restrict next_id, const int32_t *restrict origin,
                                 const int32_t *restrict lift, const int32_t *restrict rows,
                                 int32_t round, int32_t place, int32_t n) {
        for (int32_t i = 0; i < n; i++) {
            ids[i] = next_id[i];
            next_id[i] = -1 - place - i;
            positions[i] = origin[i] + round;
            lengths[i] = origin[i] + round + 1;
            mapping[i] = lift[i] + round;
            slots[i] = rows[i];
        }
    }

    /* Whether of a step's tokens one is none or may end a sequence, or of its rows one's count is up. */
    WIDE static int32_t any_hit(const int32_t *restrict tokens, int32_t n, int32_t vocabulary,
                                const int32_t *restrict closer, int32_t rows, int32_t round,
                                const int32_t *restrict eos, int32_t eos_count) {
        uint32_t hit = 0;
        for (int32_t i = 0; i < n; i++) hit |= (uint32_t)tokens[i] >= (uint32_t)vocabulary;
        for (int32_t i = 0; i < rows; i++) hit |= closer[i] <= round;
        for (int32_t k = 0; k < eos_count; k++) {
            int32_t end = eos[k];
            for (int32_t i = 0; i < n; i++) hit |= tokens[i] == end;
        }
        return hit;
    }

    /* Each rider's token to the end of its buffer. */
    static void append_along(int32_t *const *restrict ends, int32_t round, const int32_t *restrict tokens,
                             int32_t n) {
        int32_t i = 0;
        for (; i < n - 32; i++) {
            __builtin_prefetch(ends[i + 32] + round, 1);  /* each is in a line of its own */
            ends[i][round] = tokens[i];
        }
        for (; i < n; i++) ends[i][round] = tokens[i];
    }

    static void set_ones(int32_t *restrict counts, const int32_t *restrict rows, int32_t n) {
        for (int32_t i = 0; i < n; i++) if (rows[i] >= 0) counts[rows[i]] = 1;
    }
    """
    int lowest_bit "__builtin_ctzll" (uint64_t word) noexcept
    void prefetch "__builtin_prefetch" (const void *address) noexcept
    void mark_odd(
        uint8_t *marks, int32_t *due, int32_t now, int32_t *rows, int32_t *counts, int32_t n
    ) noexcept
    void mark_due(uint8_t *marks, int32_t *due, int32_t now, int32_t n) noexcept
    void mark_equal(uint8_t *marks, int32_t *numbers, int32_t number, int32_t n) noexcept
    void mark_hits(
        uint8_t *marks, int32_t *tokens, int32_t vocabulary, int32_t *closer, int32_t round, int32_t *eos,
        int32_t eos_count, int32_t n,
    ) noexcept
    int32_t list_marks(uint8_t *marks, int32_t n, int32_t *places) noexcept
    void add_to_all(int32_t *target, int32_t *source, int32_t amount, int32_t n) noexcept
    void count_from(int32_t *target, int32_t first, int32_t n) noexcept
    void write_along(
        int32_t *ids, int32_t *positions, int32_t *lengths, int32_t *slots, int32_t *mapping, int32_t *next_id,
        int32_t *origin, int32_t *lift, int32_t *rows, int32_t round, int32_t place, int32_t n,
    ) noexcept
    int32_t any_hit(
        int32_t *tokens, int32_t n, int32_t vocabulary, int32_t *closer, int32_t rows, int32_t round,
        int32_t *eos, int32_t eos_count,
    ) noexcept
    void append_along(int32_t **ends, int32_t round, int32_t *tokens, int32_t n) noexcept
    void set_ones(int32_t *counts, int32_t *rows, int32_t n) noexcept
