/* Products with the codes of weights. Included by kernels.h for each dtype, before the formats.
 *
 * ggml.h has the layout of a block's codes. Two functions multiply, and give the same bits: `few_codes` looks codes up
 * in registers, for few rows; for more rows, `widen_codes` writes the values of some blocks to the scratch, and product.h
 * multiplies them. Both add the products of a group of inputs in their order, and then multiply the sum by the scale. */

/* Return the codebook's values for the lower 4 bits of each code; further bits are ignored. */
ALWAYS vf NAME(look_up)(const float *values, vu codes)
{
#if VW == 16
    return (vf)_mm512_permutexvar_ps((__m512i)codes, _mm512_loadu_ps(values));
#elif VW == 8
    __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(values), (__m256i)codes);
    __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(values + 8), (__m256i)codes);
    return (vf)_mm256_blendv_ps(low, high, (__m256)(codes << 28)); /* by bit 3 of each code */
#else
    vf found;
    for (int i = 0; i < VW; i++) found[i] = values[codes[i] & 15];
    return found;
#endif
}

ALWAYS vu NAME(load_codes)(const uint8_t *from)
{
#if VW == 16
    return (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif VW == 8
    return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
    vu codes;
    for (int i = 0; i < VW; i++) codes[i] = from[i];
    return codes;
#endif
}

/* The parts of the codes of a half of the panel, VW outputs of it. Those that the type has not are undefined. */
typedef struct {
    vu low[4], two[2], one;
} NAME(Parts);

ALWAYS NAME(Parts) NAME(load_parts)(const Layout layout, const uint8_t *codes, int half, int column)
{
    NAME(Parts) parts;
    const uint8_t *low = codes + half * (LOW_BYTES / 2) + column * 4;
    codes += layout.low * LOW_BYTES;
    const uint8_t *two = codes + half * (TWO_BYTES / 2) + column * 4;
    codes += layout.two * TWO_BYTES;
    const uint8_t *one = codes + half * (ONE_BYTES / 2) + column * 4;
#pragma GCC unroll 4
    for (int i = 0; i < 4 * layout.low; i++) parts.low[i] = load_pairs((const bf16 *)(low + i * 64));
#pragma GCC unroll 2
    for (int i = 0; i < 2 * layout.two; i++) parts.two[i] = load_pairs((const bf16 *)(two + i * 64));
    if (layout.one) parts.one = load_pairs((const bf16 *)one);
    return parts;
}

/* Return the codes of one input of a pair, `second` or first, of VW outputs. */
ALWAYS vu NAME(codes_at)(const Layout layout, const NAME(Parts) *parts, const int pair, const int second)
{
    vu codes = {0};
    if (layout.low) codes = parts->low[pair / 4] >> (pair % 4 * 4 + second * 16) & 15;
    if (layout.two) codes |= (parts->two[pair / 8] >> (pair % 8 * 2 + second * 16) & 3) << 4 * layout.low;
    if (layout.one) codes |= (parts->one >> (pair + second * 16) & 1) << (layout.low ? 4 : 2);
    return codes;
}

#if BF16 && VW == 16
typedef uint16_t NAME(words) __attribute__((vector_size(64), may_alias));

/* The value of each code, repeated up to 32 values; `more`: the values of codes from 32 on. */
typedef struct {
    __m512i values, more;
} NAME(Table);

ALWAYS NAME(Table) NAME(table_of)(const Layout layout, const Format *format)
{
    bf16 room[64] __attribute__((aligned(64)));
    int most = (1 << (4 * layout.low + 2 * layout.two + layout.one)) - 1;
    for (int first = 0; first < 64; first += VW) {
        vi codes;
        for (int i = 0; i < VW; i++) codes[i] = (first + i) & most;
        vf values = __builtin_convertvector(codes, vf);
        if (format->codebook)
            values = NAME(look_up)(format->codebook, (vu)codes);
        else
            values -= (float)format->stored->zero;
        store_bf16(room + first, values);
    }
    return (NAME(Table)){_mm512_load_si512(room), _mm512_load_si512(room + 32)};
}

/* Shift words so that their bit `from` becomes bit `to`. */
ALWAYS NAME(words) NAME(align)(vu words, const int from, const int to)
{
    if (from >= to) return (NAME(words))words >> (from - to);
    return (NAME(words))words << (to - from);
}

/* Return the values of 16 outputs for a pair of inputs. A look-up ignores the bits above those that it needs. */
ALWAYS vu NAME(values_at)(const Layout layout, const NAME(Table) *table, const NAME(Parts) *parts, const int pair)
{
    NAME(words) codes;
    if (layout.low) {
        codes = NAME(align)(parts->low[pair / 4], pair % 4 * 4, 0);
        if (layout.two) codes = (codes & 15) | (NAME(align)(parts->two[pair / 8], pair % 8 * 2, 4) & 0xfff0);
        if (layout.one) codes = (codes & 15) | (NAME(align)(parts->one, pair, 4) & 0xfff0);
    } else {
        codes = NAME(align)(parts->two[pair / 8], pair % 8 * 2, 0);
        if (layout.one) codes = (codes & 3) | (NAME(align)(parts->one, pair, 2) & 0xfffc);
    }
    if (layout.low && layout.two) return (vu)_mm512_permutex2var_epi16(table->values, (__m512i)codes, table->more);
    return (vu)_mm512_permutexvar_epi16((__m512i)codes, table->values);
}

/* Return the values of signed bytes in the same order: an integer of 8 bits is exact in the upper half of a float. */
ALWAYS vu NAME(whole_at)(const int8_t *from) { return (vu)load_bytes(from) >> 16 | (vu)load_bytes(from + 16); }
#else
/* `book`: the values of 16 codes, if the type has a codebook; else `zero`: 2²³ more than the code whose value is 0. */
typedef struct {
    const float *book;
    float zero;
} NAME(Table);

ALWAYS NAME(Table) NAME(table_of)(const Layout layout, const Format *format)
{
    (void)layout;
    return (NAME(Table)){format->codebook, 8388608.0f + (float)(format->stored ? format->stored->zero : 0)};
}

/* A code in the lower bits of the float 2²³ makes the number 2²³ + code. */
ALWAYS vf NAME(value_at)(const Layout layout, const int booked, const NAME(Table) *table, const NAME(Parts) *parts,
                         const int pair, const int second)
{
    vu codes = NAME(codes_at)(layout, parts, pair, second);
    if (booked) return NAME(look_up)(table->book, codes);
    return (vf)(codes | 0x4b000000) - table->zero;
}
#endif

/* Add the sums of a group of a block to the row's sums, with the scale of each output. `row_sums`: of the row's inputs,
 * for formats with offsets. */
ALWAYS void NAME(add_group)(vf sum, const Factors *factors, const int groups, int group, int output, int offsets,
                            const float *row_sums, int block, float *to)
{
    vf all = load(to + output);
    all += sum * load(factors->scales[group] + output);
    if (offsets) {
        const float *inputs = row_sums + 2 * block;
        all += load(factors->offsets[group] + output) * (groups == 2 ? inputs[group] : inputs[0] + inputs[1]);
    }
    store(to + output, all);
}

/* Rows that are multiplied straight from the codes. */
enum { NAME(few) = VW == 16 ? 4 : VW == 8 ? 2 : 1, NAME(codes_ahead) = 1536 };

/* Multiply the `R` rows of a product by one panel; see `Format.multiply_few`. `booked`: there is a codebook. */
ALWAYS void NAME(few_codes)(const int R, const Layout layout, const int booked, const Format *format, const Product *p,
                            const char *panel, float (*sums)[PANEL])
{
    const NAME(Table) table = NAME(table_of)(layout, format);
    const NAME(number) *a = p->input;
    const int pairs = 16 / layout.groups;
    long step = BF16 ? R * 32 : 32, pitch = BF16 ? 32 : p->depth;
    Factors factors __attribute__((aligned(64)));
    (void)booked;
    memset(sums, 0, R * sizeof *sums);
    for (int block = 0; block < p->depth / 32; block++, a += step) {
        const uint8_t *codes = (const uint8_t *)panel + block * format->block_bytes;
        for (size_t line = 0; line < format->block_bytes; line += 64)
            __builtin_prefetch(codes + NAME(codes_ahead) + line);
        format->read_factors(format, panel, p->depth, block, &factors);
        for (int output = 0; output < PANEL; output += VW) {
            int half = output / 16, column = output % 16;
            const NAME(Parts) parts = NAME(load_parts)(layout, codes, half, column);
            const int8_t *whole = (const int8_t *)codes + half * (WHOLE_BYTES / 2) + column;
#pragma GCC unroll 2
            for (int group = 0; group < layout.groups; group++) {
                vf added[NAME(few)] = {{0}};
#pragma GCC unroll 16
                for (int pair = group * pairs; pair < (group + 1) * pairs; pair++) {
#if BF16 && VW == 16
                    vu values = layout.whole ? NAME(whole_at)(whole + pair * 32)
                                             : NAME(values_at)(layout, &table, &parts, pair);
#pragma GCC unroll 4
                    for (int m = 0; m < R; m++)
                        added[m] = dot_pairs(added[m], values, load_pair(a + m * pitch + 2 * pair));
#else
                    vf first, second;
                    if (layout.whole) {
                        first = load_bytes(whole + pair * 32);
                        second = load_bytes(whole + pair * 32 + 16);
                    } else {
                        first = NAME(value_at)(layout, booked, &table, &parts, pair, 0);
                        second = NAME(value_at)(layout, booked, &table, &parts, pair, 1);
                    }
#pragma GCC unroll 4
                    for (int m = 0; m < R; m++) {
                        added[m] += NAME(as_float)(a[m * pitch + 2 * pair]) * first;
                        added[m] += NAME(as_float)(a[m * pitch + 2 * pair + 1]) * second;
                    }
#endif
                }
#pragma GCC unroll 4
                for (int m = 0; m < R; m++)
                    NAME(add_group)(added[m], &factors, layout.groups, group, output, format->offsets,
                                    p->input_sums + (long)m * (p->depth / 16), block, sums[m]);
            }
        }
    }
}

/* See `Format.widen`. */
ALWAYS void NAME(widen_codes)(const Layout layout, const int booked, const Format *format, const char *panel, int block,
                              NAME(number) *values)
{
    const NAME(Table) table = NAME(table_of)(layout, format);
    const uint8_t *codes = (const uint8_t *)panel + block * format->block_bytes;
    (void)booked;
    for (int output = 0; output < PANEL; output += VW) {
        int half = output / 16, column = output % 16;
        const NAME(Parts) parts = NAME(load_parts)(layout, codes, half, column);
        const int8_t *whole = (const int8_t *)codes + half * (WHOLE_BYTES / 2) + column;
#pragma GCC unroll 16
        for (int pair = 0; pair < 16; pair++) {
            NAME(number) *to = values + NAME(index_in_block)(2 * pair, half, column);
#if BF16 && VW == 16
            vu both = layout.whole ? NAME(whole_at)(whole + pair * 32) : NAME(values_at)(layout, &table, &parts, pair);
            memcpy(to, &both, sizeof both);
#else
            vf first, second;
            if (layout.whole) {
                first = load_bytes(whole + pair * 32);
                second = load_bytes(whole + pair * 32 + 16);
            } else {
                first = NAME(value_at)(layout, booked, &table, &parts, pair, 0);
                second = NAME(value_at)(layout, booked, &table, &parts, pair, 1);
            }
#if BF16
            vu both = (vu)first >> 16 | (vu)second;
            memcpy(to, &both, sizeof both);
#else
            store(to, first);
            store(to + PANEL, second);
#endif
#endif
        }
    }
}

/* Write the sum of each 16 inputs of a row. */
__attribute__((unused)) static void NAME(sum_inputs)(const Product *p, int row, float *sums)
{
    for (int k = 0; k < p->depth; k += 16) {
        const NAME(number) *a = NAME(element_of)((void *)p->input, p->rows, p->depth, row, k);
        vf sum = {0};
        for (int i = 0; i < 16; i += VW) {
#if BF16
            sum += load_bf16(a + i);
#else
            sum += load(a + i);
#endif
        }
        sums[k / 16] = total(sum);
    }
}

/* Define the functions of a kind of codes for `Format`. The arguments are fields of `Layout`, and `booked`. */
#undef FEW_CASE
#define FEW_CASE(R, layout, booked) \
    case R: \
        if (R <= NAME(few)) NAME(few_codes)(R <= NAME(few) ? R : 1, layout, booked, format, p, panel, sums); \
        break;
#undef CODES
#define CODES(word, low_, two_, one_, whole_, groups_, booked) \
    static void NAME(widen_##word)(const Format *format, const char *panel, int block, void *values) \
    { \
        const Layout layout = {.low = low_, .two = two_, .one = one_, .whole = whole_, .groups = groups_}; \
        NAME(widen_codes)(layout, booked, format, panel, block, values); \
    } \
    static void NAME(few_##word)(const Format *format, const Product *p, const char *panel, float (*sums)[PANEL]) \
    { \
        const Layout layout = {.low = low_, .two = two_, .one = one_, .whole = whole_, .groups = groups_}; \
        switch (p->rows) { \
            FEW_CASE(1, layout, booked) \
            FEW_CASE(2, layout, booked) \
            FEW_CASE(3, layout, booked) \
            FEW_CASE(4, layout, booked) \
        } \
    }
CODES(nibbles, 1, 0, 0, 0, 1, 0)
CODES(booked_nibbles, 1, 0, 0, 0, 1, 1)
CODES(five_bits, 1, 0, 1, 0, 1, 0)
CODES(six_bits, 1, 1, 0, 0, 2, 0)
CODES(two_bits, 0, 1, 0, 0, 2, 0)
CODES(three_bits, 0, 1, 1, 0, 2, 0)
CODES(bytes, 0, 0, 0, 1, 1, 0)
