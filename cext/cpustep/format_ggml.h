/* Weights in the blocks of a GGUF file, or of a folder's codes with scales, of 2 to 8 bits. Included by formats.h.
 *
 * A weight is scale · value + offset. The value is the code, or what a codebook has for it. A group of 16 or 32 inputs
 * of an output has its scale: a float16, a power of two, or a factor of a float16 that 256 inputs share; offsets
 * likewise. ggml.c packs the blocks as they are in the file, and cpustep.h has the layout.
 *
 * Products use the values of the codes, and scale the sums of groups (codes.h). The embedding's rows, and AMX's tiles,
 * which cannot scale sums, use the weights: scale times value is exact in float32, and a weight is then rounded once to
 * float32, and in a bfloat16 model once more. Every instruction set makes the weights that the library `gguf` makes. */

/* Finite halves only: ggml.c refuses others. */
ALWAYS vf NAME(load_halves)(const uint16_t *from)
{
#if VW == 16
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#else
    vh half;
    memcpy(&half, from, sizeof half);
    vu bits = __builtin_convertvector(half, vu);
    vf size = (vf)((bits & 0x7fff) << 13) * 0x1p112f; /* the exponent's bias is 15, not 127 */
    return (vf)((vu)size | (bits & 0x8000) << 16);
#endif
}

ALWAYS vf NAME(load_scales)(const Layout layout, const uint16_t *from)
{
    return layout.scale == BFLOATS ? load_bf16(from) : NAME(load_halves)(from);
}

/* Half a power of two: the byte is the exponent of a float32, apart from the smallest two. */
ALWAYS vf NAME(load_powers)(const uint8_t *from)
{
    vu exponents = NAME(load_codes)(from);
    return choose((vi)(exponents < 2), (vf)(((vu){0} + 0x200000) << exponents), (vf)((exponents - 1) << 23));
}

ALWAYS vf NAME(value_of)(const float *codebook, vu codes)
{
    if (codebook) return NAME(look_up)(codebook, codes);
    return __builtin_convertvector((vi)codes, vf);
}

/* Read what scales the codes of a group of a block, for VW outputs. */
ALWAYS void NAME(read_group)(const Format *format, const Layout layout, const char *panel, int depth, int block, int group,
                             int output, vf *scale, vf *offset)
{
    const uint8_t *scales = (const uint8_t *)panel + block * format->block_bytes + layout.low * LOW_BYTES +
                            layout.two * TWO_BYTES + layout.one * ONE_BYTES + layout.whole * WHOLE_BYTES;
    const uint16_t *shared = (const uint16_t *)(shared_at(format, panel, depth, block));
    const uint8_t *factors = scales + group * PANEL + output;
    *offset = (vf){0};
    switch (layout.scale) {
    case HALVES:
    case BFLOATS:
        *scale = NAME(load_scales)(layout, (const uint16_t *)scales + output);
        if (layout.offsets == ZEROS)
            *offset = *scale * -__builtin_convertvector((vi)NAME(load_codes)(scales + 2 * PANEL + output), vf);
        else if (layout.offsets)
            *offset = NAME(load_scales)(layout, (const uint16_t *)scales + PANEL + output);
        break;
    case POWERS: *scale = NAME(load_powers)(factors); break;
    case NIBBLES: {
        vu both = NAME(load_codes)(factors);
        *scale = NAME(load_halves)(shared + output) * __builtin_convertvector((vi)(both & 15), vf);
        *offset = NAME(load_halves)(shared + PANEL + output) * -__builtin_convertvector((vi)(both >> 4), vf);
        break;
    }
    default:
        *scale = NAME(load_halves)(shared + output) * load_bytes((const int8_t *)factors);
        if (layout.offsets)
            *offset = NAME(load_halves)(shared + PANEL + output) *
                      -load_bytes((const int8_t *)factors + layout.groups * PANEL);
    }
}

ALWAYS void NAME(read_all_groups)(const Format *format, const Layout layout, const char *panel, int depth, int block,
                                  Factors *factors)
{
    for (int output = 0; output < PANEL; output += VW)
#pragma GCC unroll 2
        for (int group = 0; group < layout.groups; group++) {
            vf scale, offset;
            NAME(read_group)(format, layout, panel, depth, block, group, output, &scale, &offset);
            store(factors->scales[group] + output, scale);
            if (layout.offsets) store(factors->offsets[group] + output, offset);
        }
}

/* Write a block's weights, scaled and rounded to the dtype. */
ALWAYS void NAME(unpack_codes)(const Format *format, const Layout layout, const float *codebook, const char *panel,
                               int depth, int block, void *numbers)
{
    const uint8_t *codes = (const uint8_t *)panel + block * format->block_bytes;
    const int pairs = 16 / layout.groups;
    for (int output = 0; output < PANEL; output += VW) {
        int half = output / 16, column = output % 16;
        const NAME(Parts) parts = NAME(load_parts)(layout, codes, half, column);
#pragma GCC unroll 2
        for (int group = 0; group < layout.groups; group++) {
            vf scale, offset;
            NAME(read_group)(format, layout, panel, depth, block, group, output, &scale, &offset);
            if (layout.zero) offset = scale * -(float)layout.zero; /* exact, as is its sum with scale times code */
#pragma GCC unroll 16
            for (int pair = group * pairs; pair < (group + 1) * pairs; pair++) {
                if (layout.whole) {
                    const int8_t *from = (const int8_t *)codes + half * (WHOLE_BYTES / 2) + pair * 32 + column;
                    NAME(store_inputs)(numbers, pair, output, load_bytes(from) * scale, load_bytes(from + 16) * scale);
                    continue;
                }
                vu even = NAME(codes_at)(layout, &parts, pair, 0), odd = NAME(codes_at)(layout, &parts, pair, 1);
                NAME(store_inputs)(numbers, pair, output, NAME(value_of)(codebook, even) * scale + offset,
                                   NAME(value_of)(codebook, odd) * scale + offset);
            }
        }
    }
}

/* Define the format of one of ggml's types: its layout is in ggml.h, and the kind of its codes in codes.h. */
#undef GGML_FORMAT
#define GGML_FORMAT(word, label, book, kind) \
    static void NAME(unpack_##word)(const Format *format, const char *panel, int depth, int block, void *numbers) \
    { \
        NAME(unpack_codes)(format, word, book, panel, depth, block, numbers); \
    } \
    static void NAME(read_##word)(const Format *format, const char *panel, int depth, int block, Factors *factors) \
    { \
        NAME(read_all_groups)(format, word, panel, depth, block, factors); \
    } \
    static const Format NAME(word) = {.name = label, \
                                      .block_bytes = word##_block_bytes, \
                                      .shared_bytes = word##_shared_bytes, \
                                      .pack = pack_ggml, \
                                      .unpack = NAME(unpack_##word), \
                                      .codebook = book, \
                                      .groups = word##_groups, \
                                      .offsets = word##_offsets, \
                                      .read_factors = NAME(read_##word), \
                                      .widen = NAME(widen_##kind), \
                                      .multiply_few = NAME(few_##kind), \
                                      .stored = &word};
GGML_FORMAT(q4_0, "q4_0", NULL, nibbles)
GGML_FORMAT(q4_1, "q4_1", NULL, nibbles)
GGML_FORMAT(q5_0, "q5_0", NULL, five_bits)
GGML_FORMAT(q5_1, "q5_1", NULL, five_bits)
GGML_FORMAT(q8_0, "q8_0", NULL, bytes)
GGML_FORMAT(q2_k, "q2_k", NULL, two_bits)
GGML_FORMAT(q3_k, "q3_k", NULL, three_bits)
GGML_FORMAT(q4_k, "q4_k", NULL, nibbles)
GGML_FORMAT(q5_k, "q5_k", NULL, five_bits)
GGML_FORMAT(q6_k, "q6_k", NULL, six_bits)
GGML_FORMAT(iq4_nl, "iq4_nl", non_linear, booked_nibbles)
GGML_FORMAT(iq4_xs, "iq4_xs", non_linear, booked_nibbles)
GGML_FORMAT(mxfp4, "mxfp4", fp4, booked_nibbles)
GGML_FORMAT(s4_bf16, "s4_bf16", NULL, nibbles)
GGML_FORMAT(u4_f16, "u4_f16", NULL, nibbles)
GGML_FORMAT(u4_bf16, "u4_bf16", NULL, nibbles)
GGML_FORMAT(s8_bf16, "s8_bf16", NULL, bytes)
