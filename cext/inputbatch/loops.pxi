# Loops over rows, one element each and in order, so that the compiler can vectorize them: the work of a step
# like the previous one. Where the loader can select variants, they exist for wider registers too.

cdef extern from *:
    """
    #if defined(__SSE2__)
    #include <emmintrin.h>

    /* Pack the results of comparisons into one bit each. */
    static inline uint32_t bits_of_16(__m128i a, __m128i b, __m128i c, __m128i d) {
        return _mm_movemask_epi8(_mm_packs_epi16(_mm_packs_epi32(a, b), _mm_packs_epi32(c, d)));
    }
    #endif

    #if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GLIBC__) && !defined(__clang__)
    #define WIDE __attribute__((target_clones("avx2", "default")))
    #else
    #define WIDE
    #endif

    /* Mark the slots whose count is not the usual one: 64 in a word. */
    static void find_unlike(uint64_t *restrict words, const int32_t *restrict counts,
                            const int32_t *restrict usual, int32_t n) {
        int32_t i = 0;
    #if defined(__SSE2__)
        for (; i + 64 <= n; i += 64) {
            uint64_t alike = 0;
            for (int32_t j = 0; j < 4; j++) {
                const __m128i *some = (const __m128i *)(counts + i + 16 * j);
                const __m128i *others = (const __m128i *)(usual + i + 16 * j);
                __m128i a = _mm_cmpeq_epi32(_mm_loadu_si128(some), _mm_loadu_si128(others));
                __m128i b = _mm_cmpeq_epi32(_mm_loadu_si128(some + 1), _mm_loadu_si128(others + 1));
                __m128i c = _mm_cmpeq_epi32(_mm_loadu_si128(some + 2), _mm_loadu_si128(others + 2));
                __m128i d = _mm_cmpeq_epi32(_mm_loadu_si128(some + 3), _mm_loadu_si128(others + 3));
                alike |= (uint64_t)bits_of_16(a, b, c, d) << 16 * j;
            }
            words[i >> 6] = ~alike;
        }
    #endif
        for (; i < n; i += 64) {
            words[i >> 6] = 0;
            for (int32_t j = i; j < n && j < i + 64; j++)
                words[i >> 6] |= (uint64_t)(counts[j] != usual[j]) << (j - i);
        }
    }

    /* Mark the numbers that are not above `now`, 64 in a word, for all words that begin before n. */
    static void find_due(uint64_t *restrict words, const int32_t *restrict due, int32_t now, int32_t n) {
        for (int32_t i = 0; i < n; i += 64) {
            uint64_t later = 0;
    #if defined(__SSE2__)
            __m128i limit = _mm_set1_epi32(now);
            for (int32_t j = 0; j < 4; j++) {
                const __m128i *numbers = (const __m128i *)(due + i + 16 * j);
                __m128i a = _mm_cmpgt_epi32(_mm_loadu_si128(numbers), limit);
                __m128i b = _mm_cmpgt_epi32(_mm_loadu_si128(numbers + 1), limit);
                __m128i c = _mm_cmpgt_epi32(_mm_loadu_si128(numbers + 2), limit);
                __m128i d = _mm_cmpgt_epi32(_mm_loadu_si128(numbers + 3), limit);
                later |= (uint64_t)bits_of_16(a, b, c, d) << 16 * j;
            }
    #else
            for (int32_t j = 0; j < 64; j++) later |= (uint64_t)(due[i + j] > now) << j;
    #endif
            words[i >> 6] = ~later;
        }
    }

    /* Mark the rows, few compared with the slots, whose count is not exactly one token. */
    static void mark_not_one(uint8_t *restrict marks, const int32_t *restrict counts,
                             const int32_t *restrict rows, int32_t n) {
        for (int32_t i = 0; i < n; i++) marks[i] = rows[i] >= 0 && counts[rows[i]] != 1;
    }

    WIDE static void mark_due(uint8_t *restrict marks, const int32_t *restrict due, int32_t now, int32_t n) {
        for (int32_t i = 0; i < n; i++) marks[i] = due[i] <= now;
    }

    WIDE static int32_t least_of(const int32_t *restrict numbers, int32_t n) {
        int32_t least = INT32_MAX;
        for (int32_t i = 0; i < n; i++) least = numbers[i] < least ? numbers[i] : least;
        return least;
    }

    /* Mark ids that are no tokens or may end a sequence, and rows that reach their limit. */
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

    /* Write the indices of the marks, in order; return their number. The marks have room for 63 more. */
    static int32_t list_marks(uint8_t *marks, int32_t n, int32_t *places) {
        int32_t found = 0;
        memset(marks + n, 0, 63);
        for (int32_t i = 0; i < n; i += 64) {
            uint64_t bits = 0;
    #if defined(__SSE2__)
            for (int32_t j = 0; j < 4; j++) {
                __m128i bytes = _mm_loadu_si128((const __m128i *)(marks + i + 16 * j));
                bits |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_slli_epi16(bytes, 7)) << 16 * j;
            }
    #else
            for (int32_t j = 0; j < 8; j++) {
                uint64_t bytes;
                memcpy(&bytes, marks + i + 8 * j, 8);
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
                bytes = __builtin_bswap64(bytes);
    #endif
                bits |= bytes * 0x0102040810204080 >> 56 << 8 * j;  /* the first byte is the lowest bit */
            }
    #endif
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

    WIDE static void count_down_from(int32_t *restrict target, int32_t first, int32_t n) {
        for (int32_t i = 0; i < n; i++) target[i] = first - i;
    }

    /* Write a run of steady decodes into a step, with the slot mapping of one group. */
    WIDE static void write_along(int32_t *restrict ids, int32_t *restrict positions, int32_t *restrict lengths,
                                 int32_t *restrict slots, int32_t *restrict mapping,
                                 const int32_t *restrict next_id, const int32_t *restrict origin,
                                 const int32_t *restrict lift, const int32_t *restrict rows,
                                 int32_t round, int32_t n) {
        for (int32_t i = 0; i < n; i++) {
            ids[i] = next_id[i];
            positions[i] = origin[i] + round;
            lengths[i] = origin[i] + round + 1;
            mapping[i] = lift[i] + round;
            slots[i] = rows[i];
        }
    }

    /* Return whether one of a step's ids is no token or may end a sequence. */
    WIDE static int32_t any_hit(const int32_t *restrict tokens, int32_t n, int32_t vocabulary,
                                const int32_t *restrict eos, int32_t eos_count) {
        uint32_t hit = 0;
        for (int32_t i = 0; i < n; i++) hit |= (uint32_t)tokens[i] >= (uint32_t)vocabulary;
        for (int32_t k = 0; k < eos_count; k++) {
            int32_t end = eos[k];
            for (int32_t i = 0; i < n; i++) hit |= tokens[i] == end;
        }
        return hit;
    }

    /* Steady decodes have their tokens of the latest RING rounds in a ring, which are copied to their own
       buffers together: copying one a round would touch a cache line each. */
    enum { RING = 8 };

    /* Copy a row's tokens from the ring to its buffer, from round `first` up to `round`, excluded. */
    static void write_row(const int32_t *ring, ptrdiff_t width, int32_t *end, int32_t row, int32_t first,
                          int32_t round) {
        for (int32_t i = first; i < round; i++) end[i] = ring[(i & (RING - 1)) * width + row];
    }

    /* Fill the ring with the buffers' tokens for rows that joined since its last copy, so that copying it
       changes nothing there. A buffer has room for RING tokens before its first. */
    static void complete_rows(int32_t *ring, ptrdiff_t width, int32_t *const *ends, const int32_t *since,
                              uint64_t rows, int32_t row, int32_t round) {
        for (; rows; rows &= rows - 1) {
            int32_t k = row + __builtin_ctzll(rows);
            for (int32_t i = round - RING; i < since[k]; i++) ring[(i & (RING - 1)) * width + k] = ends[k][i];
        }
    }

    /* Copy the tokens of four rows and the four rounds from `round` on. */
    static inline void write_four(const int32_t *restrict ring, ptrdiff_t width, int32_t *const *restrict ends,
                                  int32_t row, int32_t round) {
    #if defined(__SSE2__)
        __m128i a = _mm_loadu_si128((const __m128i *)(ring + (round & (RING - 1)) * width + row));
        __m128i b = _mm_loadu_si128((const __m128i *)(ring + ((round + 1) & (RING - 1)) * width + row));
        __m128i c = _mm_loadu_si128((const __m128i *)(ring + ((round + 2) & (RING - 1)) * width + row));
        __m128i d = _mm_loadu_si128((const __m128i *)(ring + ((round + 3) & (RING - 1)) * width + row));
        __m128i low = _mm_unpacklo_epi32(a, b), low_after = _mm_unpacklo_epi32(c, d);
        __m128i high = _mm_unpackhi_epi32(a, b), high_after = _mm_unpackhi_epi32(c, d);
        _mm_storeu_si128((__m128i *)(ends[row] + round), _mm_unpacklo_epi64(low, low_after));
        _mm_storeu_si128((__m128i *)(ends[row + 1] + round), _mm_unpackhi_epi64(low, low_after));
        _mm_storeu_si128((__m128i *)(ends[row + 2] + round), _mm_unpacklo_epi64(high, high_after));
        _mm_storeu_si128((__m128i *)(ends[row + 3] + round), _mm_unpackhi_epi64(high, high_after));
    #else
        for (int32_t j = 0; j < 4; j++) write_row(ring, width, ends[row + j], row + j, round, round + 4);
    #endif
    }

    /* Copy the tokens of the steady decodes among 64 rows, of the RING rounds before `round`. */
    static void write_down(const int32_t *restrict ring, ptrdiff_t width, int32_t *const *restrict ends,
                           uint64_t riding, int32_t row, int32_t round) {
        for (; riding; riding >>= 4, row += 4) {
            if ((riding & 15) == 15) {
                for (int32_t i = round - RING; i < round; i += 4) write_four(ring, width, ends, row, i);
                continue;
            }
            for (int32_t j = 0; j < 4; j++)
                if (riding >> j & 1) write_row(ring, width, ends[row + j], row + j, round - RING, round);
        }
    }

    /* Prefetch the memory of later tokens of 64 rows, not accessed since the sequence arrived. */
    static void fetch_ahead(int32_t *const *restrict ends, uint64_t riding, int32_t row, int32_t round) {
        for (; riding; riding &= riding - 1)
            __builtin_prefetch(ends[row + __builtin_ctzll(riding)] + round, 1);
    }

    /* Write the indices of set bits, in order; return their number. They are written in eights, because the
       number in a word is unpredictable: there must be room for seven more. */
    WIDE static int32_t list_bits(const uint64_t *words, int32_t n, int32_t *places) {
        int32_t found = 0;
        for (int32_t i = 0; i < n; i++) {
            uint64_t bits = words[i];
            int32_t count = __builtin_popcountll(bits);
            for (int32_t k = 0; k < count; k += 8)
                for (int32_t j = 0; j < 8; j++) {
                    places[found + k + j] = 64 * i + __builtin_ctzll(bits | (uint64_t)1 << 63);
                    bits &= bits - 1;
                }
            found += count;
        }
        return found;
    }

    static inline PyObject **list_items(PyObject *list) { return ((PyListObject *)list)->ob_item; }

    static void fetch_all(const int32_t *numbers, int32_t n) {
        for (int32_t i = 0; i < n; i += 16) __builtin_prefetch(numbers + i);
    }

    static void set_ones(int32_t *restrict counts, const int32_t *restrict rows, int32_t n) {
        for (int32_t i = 0; i < n; i++) if (rows[i] >= 0) counts[rows[i]] = 1;
    }
    """
    PyObject **list_items(object source) noexcept
    int lowest_bit "__builtin_ctzll" (uint64_t word) noexcept
    void prefetch "__builtin_prefetch" (const void *address) noexcept
    void find_unlike(uint64_t *words, int32_t *counts, int32_t *usual, int32_t n) noexcept
    void mark_not_one(uint8_t *marks, int32_t *counts, int32_t *rows, int32_t n) noexcept
    void mark_due(uint8_t *marks, int32_t *due, int32_t now, int32_t n) noexcept
    void find_due(uint64_t *words, int32_t *due, int32_t now, int32_t n) noexcept
    int32_t least_of(int32_t *numbers, int32_t n) noexcept
    void mark_hits(
        uint8_t *marks, int32_t *tokens, int32_t vocabulary, int32_t *closer, int32_t round, int32_t *eos,
        int32_t eos_count, int32_t n,
    ) noexcept
    int32_t list_marks(uint8_t *marks, int32_t n, int32_t *places) noexcept
    void add_to_all(int32_t *target, int32_t *source, int32_t amount, int32_t n) noexcept
    void count_from(int32_t *target, int32_t first, int32_t n) noexcept
    void count_down_from(int32_t *target, int32_t first, int32_t n) noexcept
    void write_along(
        int32_t *ids, int32_t *positions, int32_t *lengths, int32_t *slots, int32_t *mapping, int32_t *next_id,
        int32_t *origin, int32_t *lift, int32_t *rows, int32_t round, int32_t n,
    ) noexcept
    int32_t any_hit(int32_t *tokens, int32_t n, int32_t vocabulary, int32_t *eos, int32_t eos_count) noexcept
    int32_t RING
    void write_row(
        int32_t *ring, ptrdiff_t width, int32_t *end, int32_t row, int32_t first, int32_t round
    ) noexcept
    void complete_rows(
        int32_t *ring, ptrdiff_t width, int32_t **ends, int32_t *since, uint64_t rows, int32_t row, int32_t round
    ) noexcept
    void write_down(
        int32_t *ring, ptrdiff_t width, int32_t **ends, uint64_t riding, int32_t row, int32_t round
    ) noexcept
    void fetch_ahead(int32_t **ends, uint64_t riding, int32_t row, int32_t round) noexcept
    int32_t list_bits(uint64_t *words, int32_t n, int32_t *places) noexcept
    void fetch_all(int32_t *numbers, int32_t n) noexcept
    void set_ones(int32_t *counts, int32_t *rows, int32_t n) noexcept
