/* Matrix products of one dtype, fused with the use of their results. Included by kernels.h for each dtype.
 *
 * A row's sums run over the inputs in order, whatever the number of rows: a sequence's result does not depend
 * on the rest of the batch. */

/* Apply SiLU or GELU to the gate, as exact as the dtype it is rounded to. */
ALWAYS vf NAME(activate)(vf gate, int is_gelu)
{
#if BF16 && VW == 16
    vf slope = gate;
    if (is_gelu) slope = 1.5957691216f * (gate + 0.044715f * gate * gate * gate);
    vf away = 1.0f + rough_power_of_two(slope * -LOG2_E);
    return gate * (vf)_mm512_rcp14_ps((__m512)away);
#else
    if (is_gelu) return gelu(gate);
    return silu(gate);
#endif
}

/* Process and store one row of a panel's results, two halves of 16, as the product's kind requires. */
ALWAYS void NAME(finish)(const int kind, const Product *p, int panel, int row, const float *half0, const float *half1)
{
    const float *bias = p->bias ? p->bias + (long)panel * PANEL : NULL;
    const float *scales = scales_at(&p->weight, p->depth, panel);
    float *to = p->output + row * p->stride + (long)panel * PANEL;
    float tail[PANEL];
    float *logits = kind == LOGITS && (panel + 1) * PANEL > p->columns ? tail : to;
    for (int i = 0; i < 16; i += VW) {
        vf a = load(half0 + i), b = load(half1 + i);
        if (scales) {
            a *= load(scales + i);
            b *= load(scales + 16 + i);
        }
        if (bias) {
            a += load(bias + i);
            b += load(bias + 16 + i);
        }
        if (kind == GATE) {
            NAME(put)(NAME(element_of)(p->gated, p->rows, p->gated_depth, row, panel * 16 + i),
                      NAME(activate)(a, p->gelu) * b);
            continue;
        }
        if (kind == ADD) {
            a += load(to + i);
            b += load(to + 16 + i);
        }
        if (kind == LOGITS && p->cap > 0) a = capped(a, p->cap), b = capped(b, p->cap);
        store(logits + i, a);
        store(logits + 16 + i, b);
    }
    if (kind == LOGITS && logits == tail) memcpy(to, tail, (size_t)(p->columns - panel * PANEL) * sizeof *to);
}

/* Expand `FINISH(kind)` with the product's kind as a constant. */
#undef BY_KIND
#define BY_KIND(p, FINISH) \
    switch ((p)->kind) { \
    case STORE: FINISH(STORE); break; \
    case ADD: FINISH(ADD); break; \
    case GATE: FINISH(GATE); break; \
    default: FINISH(LOGITS); \
    }

/* Rows at once, such that their sums fit in registers: AVX-512 has 32, AVX2 and SSE2 have 16. */
#if BF16
enum { NAME(height) = VW == 16 ? 8 : VW == 8 ? 2 : 1 };
#else
enum { NAME(height) = VW == 16 ? 12 : VW == 8 ? 3 : 1 };
#endif

/* Multiply `R` rows by `depth` inputs of one panel; add the sums to `results`, or store them there if `first`.
 * `step`: the distance of a row's blocks of 32 inputs; `pitch`: of rows. */
ALWAYS void NAME(panel)(const int R, const NAME(number) *a, long step, long pitch, const NAME(number) *w, int depth,
                        int first, float (*results)[PANEL])
{
    vf sums[NAME(height)][2 * PIECES];
#pragma GCC unroll 16
    for (int m = 0; m < R; m++)
#pragma GCC unroll 8
        for (int j = 0; j < 2 * PIECES; j++) sums[m][j] = first ? (vf){0} : load(results[m] + j * VW);
    for (int block = 0; block < depth / 32; block++, a += step) {
#if BF16
        /* Memory takes longer than compute for so few rows. Processors fetch one ascending stream of addresses faster
         * than two that alternate: one tile is read after the other. */
        if (R < 4) {
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++)
                for (int pair = 0; pair < 16; pair++, w += 32) {
                    __builtin_prefetch(w + 1024);
#pragma GCC unroll 8
                    for (int j = 0; j < PIECES; j++) {
                        vu weights = load_pairs(w + j * 2 * VW);
#pragma GCC unroll 16
                        for (int m = 0; m < R; m++) {
                            vf *sum = &sums[m][half * PIECES + j];
                            *sum = dot_pairs(*sum, weights, load_pair(a + m * pitch + 2 * pair));
                        }
                    }
                }
            continue;
        }
        for (int pair = 0; pair < 16; pair++, w += 32) {
#pragma GCC unroll 8
            for (int j = 0; j < PIECES; j++) {
                vu w0 = load_pairs(w + j * 2 * VW), w1 = load_pairs(w + TILE + j * 2 * VW);
#pragma GCC unroll 16
                for (int m = 0; m < R; m++) {
                    uint32_t both = load_pair(a + m * pitch + 2 * pair);
                    sums[m][j] = dot_pairs(sums[m][j], w0, both);
                    sums[m][PIECES + j] = dot_pairs(sums[m][PIECES + j], w1, both);
                }
            }
        }
        w += TILE;
#else
        for (int k = 0; k < 32; k++, w += PANEL) {
            if (R < 4) { /* with more rows, compute takes longer than memory */
                __builtin_prefetch(w + 256);
                __builtin_prefetch(w + 256 + 16);
            }
            vf v[2 * PIECES];
#pragma GCC unroll 8
            for (int j = 0; j < 2 * PIECES; j++) v[j] = load(w + j * VW);
#pragma GCC unroll 16
            for (int m = 0; m < R; m++) {
                vf input = splat(a[m * pitch + k]);
#pragma GCC unroll 8
                for (int j = 0; j < 2 * PIECES; j++) sums[m][j] += input * v[j];
            }
        }
#endif
    }
#pragma GCC unroll 16
    for (int m = 0; m < R; m++)
#pragma GCC unroll 8
        for (int j = 0; j < 2 * PIECES; j++) store(results[m] + j * VW, sums[m][j]);
}

/* Expand CASE(R) with the number of rows as a constant. */
#undef SWITCH_ROWS
#define SWITCH_ROWS(rows) \
    switch (rows) { \
        CASE(1) \
        CASES_FROM_2 \
    }
#undef CASES_FROM_2
#if VW == 16 && BF16
#define CASES_FROM_2 CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#elif VW == 16
#define CASES_FROM_2 \
    CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#elif VW == 8 && BF16
#define CASES_FROM_2 CASE(2)
#elif VW == 8
#define CASES_FROM_2 CASE(2) CASE(3)
#else
#define CASES_FROM_2
#endif

#define CASE(R) \
    case R: NAME(panel)(R, a, step, pitch, w, depth, first, results); break;
static void NAME(some_rows)(int rows, const NAME(number) *a, long step, long pitch, const NAME(number) *w, int depth,
                            int first, float (*results)[PANEL])
{
    SWITCH_ROWS(rows)
}
#undef CASE

/* Multiply `R` rows by the values of `blocks` blocks of codes, and scale the sums of each group; see codes.h.
 * `row_sums`: of the first row's inputs; `from`: the blocks before these. */
ALWAYS void NAME(panel_in_groups)(const int R, const Format *format, const NAME(number) *a, long step, long pitch,
                                  const NAME(number) *w, const Factors *factors, int from, int blocks,
                                  const float *row_sums, long sums_pitch, float (*results)[PANEL])
{
    int pairs = 16 / format->groups;
    for (int block = 0; block < blocks; block++, a += step, w += 2 * TILE, factors++)
        for (int group = 0; group < format->groups; group++) {
            vf sums[NAME(height)][2 * PIECES];
#pragma GCC unroll 16
            for (int m = 0; m < R; m++)
#pragma GCC unroll 8
                for (int j = 0; j < 2 * PIECES; j++) sums[m][j] = (vf){0};
#pragma GCC unroll 2
            for (int pair = group * pairs; pair < (group + 1) * pairs; pair++) {
#if BF16
                const bf16 *at = w + pair * 32;
#pragma GCC unroll 8
                for (int j = 0; j < PIECES; j++) {
                    vu w0 = load_pairs(at + j * 2 * VW), w1 = load_pairs(at + TILE + j * 2 * VW);
#pragma GCC unroll 16
                    for (int m = 0; m < R; m++) {
                        uint32_t both = load_pair(a + m * pitch + 2 * pair);
                        sums[m][j] = dot_pairs(sums[m][j], w0, both);
                        sums[m][PIECES + j] = dot_pairs(sums[m][PIECES + j], w1, both);
                    }
                }
#else
#pragma GCC unroll 2
                for (int k = 2 * pair; k < 2 * pair + 2; k++)
#pragma GCC unroll 8
                    for (int j = 0; j < 2 * PIECES; j++) {
                        vf v = load(w + k * PANEL + j * VW);
#pragma GCC unroll 16
                        for (int m = 0; m < R; m++) sums[m][j] += a[m * pitch + k] * v;
                    }
#endif
            }
#pragma GCC unroll 16
            for (int m = 0; m < R; m++)
#pragma GCC unroll 8
                for (int j = 0; j < 2 * PIECES; j++)
                    NAME(add_group)(sums[m][j], factors, format->groups, group, j * VW, format->offsets,
                                    row_sums + m * sums_pitch, from + block, results[m]);
        }
}

#define CASE(R) \
    case R: \
        NAME(panel_in_groups)(R, format, a, step, pitch, w, factors, from, blocks, row_sums, sums_pitch, results); \
        break;
static void NAME(some_rows_in_groups)(int rows, const Format *format, const NAME(number) *a, long step, long pitch,
                                      const NAME(number) *w, const Factors *factors, int from, int blocks,
                                      const float *row_sums, long sums_pitch, float (*results)[PANEL])
{
    SWITCH_ROWS(rows)
}
#undef CASE

enum {
    NAME(part) = 256,    /* inputs that are unpacked at once: their weights stay in the first-level cache */
    NAME(highest) = 3792 /* rows: the scratch holds their sums, one part and its factors */
};
_Static_assert(NAME(highest) *PANEL * sizeof(float) + NAME(part) *PANEL * sizeof(NAME(number)) +
                       NAME(part) / 32 * sizeof(Factors) <=
                   SCRATCH_BYTES,
               "a thread's scratch is too small");

/* Unpack the blocks of a panel of `depth` inputs from `block` on, `count` inputs in all; of codes, their values and
 * their factors. */
ALWAYS void NAME(unpack_part)(const Format *format, const char *panel, int depth, int block, int count,
                              NAME(number) *to, Factors *factors)
{
    const char *from = panel + block * format->block_bytes;
    for (int k = 0; k < count; k += 32, from += format->block_bytes, to += 2 * TILE, block++) {
        for (size_t line = 0; line < format->block_bytes; line += 64) __builtin_prefetch(from + 1024 + line);
        if (!format->groups) {
            format->unpack(format, panel, depth, block, to);
            continue;
        }
        format->read_factors(format, panel, depth, block, factors++);
        format->widen(format, panel, block, to);
    }
}

/* Multiply few rows straight from the codes. */
static void NAME(multiply_few)(const Product *p, int first_panel, int last_panel)
{
    float sums[NAME(few)][PANEL] __attribute__((aligned(64)));
    for (int panel = first_panel; panel < last_panel; panel++) {
        p->weight.format->multiply_few(p->weight.format, p, panel_at(&p->weight, p->depth, panel), sums);
#define FINISH(kind) \
    for (int m = 0; m < p->rows; m++) NAME(finish)(kind, p, panel, m, sums[m], sums[m] + 16)
        BY_KIND(p, FINISH)
#undef FINISH
    }
}

/* Unused in amx.c, which includes this file too. */
__attribute__((unused)) static void NAME(multiply)(const Product *p, int first_panel, int last_panel, char *scratch)
{
    const Format *format = p->weight.format;
    float(*sums)[PANEL] = (float(*)[PANEL])scratch;
    NAME(number) *room = (NAME(number) *)(scratch + NAME(highest) *sizeof *sums);
    Factors *factors = (Factors *)(room + NAME(part) * PANEL);
    int part = format->unpack ? NAME(part) : p->depth;
    if (format->groups && p->rows <= NAME(few)) {
        NAME(multiply_few)(p, first_panel, last_panel);
        return;
    }
    /* The number of input rows that stay in the second-level cache while panels are read. */
    int rows_at_once = (int)((1 << 20) / (p->depth * sizeof(NAME(number)))) / 48 * 48;
    if (rows_at_once < 48) rows_at_once = 48;
    if (rows_at_once > NAME(highest)) rows_at_once = NAME(highest);
#if BF16
    long step = (p->rows < 16 ? p->rows : 16) * 32, pitch = 32;
#else
    long step = 32, pitch = p->depth;
#endif
    for (int top = 0; top < p->rows; top += rows_at_once) {
        int bottom = top + rows_at_once < p->rows ? top + rows_at_once : p->rows;
        for (int panel = first_panel; panel < last_panel; panel++) {
            const char *packed = panel_at(&p->weight, p->depth, panel);
            for (int begin = 0; begin < p->depth; begin += part) {
                int depth = p->depth - begin < part ? p->depth - begin : part, is_last = begin + depth == p->depth;
                const NAME(number) *w = (const NAME(number) *)packed;
                if (format->unpack) {
                    NAME(unpack_part)(format, packed, p->depth, begin / 32, depth, room, factors);
                    w = room;
                }
                for (int row = top, count; row < bottom; row += count) {
                    count = bottom - row < NAME(height) ? bottom - row : NAME(height);
#if BF16
                    if (count > 16 - (row & 15)) count = 16 - (row & 15); /* a tile of activations ends here */
#endif
                    const NAME(number) *a = NAME(element_of)((void *)p->input, p->rows, p->depth, row, begin);
                    float(*results)[PANEL] = sums + (row - top);
                    if (format->groups) {
                        if (begin == 0) memset(results, 0, count * sizeof *results);
                        const float *row_sums = p->input_sums + (long)row * (p->depth / 16);
                        NAME(some_rows_in_groups)(count, format, a, step, pitch, w, factors, begin / 32, depth / 32,
                                                  row_sums, p->depth / 16, results);
                    } else {
                        NAME(some_rows)(count, a, step, pitch, w, depth, begin == 0, results);
                    }
                    if (!is_last) continue;
#define FINISH(kind) \
    for (int m = 0; m < count; m++) NAME(finish)(kind, p, panel, row + m, results[m], results[m] + 16)
                    BY_KIND(p, FINISH)
#undef FINISH
                }
            }
        }
    }
}
