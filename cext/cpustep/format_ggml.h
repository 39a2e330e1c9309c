/* Weights in the blocks of a GGUF file, as codes of 2 to 8 bits. Included by formats.h.
 *
 * A weight is scale · value + offset. The value is the code, or what a codebook has for it. A group of 16 or 32 inputs
 * of an output has its scale: a float16, a power of two, or a factor of a float16 that 256 inputs share; offsets
 * likewise. ggml.c packs the blocks as they are in the file, and cpustep.h has the layout.
 *
 * Scale times value is exact in float32. A weight is then rounded once to float32, and in a bfloat16 model once
 * more: every instruction set makes the weights that the library `gguf` makes. */

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

ALWAYS void NAME(unpack_codes)(const Format *format, const Layout layout, const float *codebook, const char *panel,
                               int depth, int block, void *numbers)
{
    const uint8_t *low = (const uint8_t *)panel + block * format->block_bytes;
    const uint8_t *two = low + layout.low * LOW_BYTES, *one = two + layout.two * TWO_BYTES;
    const uint8_t *scales = one + layout.one * ONE_BYTES + layout.whole * WHOLE_BYTES;
    const uint16_t *shared = (const uint16_t *)(shared_at(format, panel, depth, block));
    const int pairs = 16 / layout.groups;
    for (int output = 0; output < PANEL; output += VW) {
        int half = output / 16, column = output % 16;
#pragma GCC unroll 2
        for (int group = 0; group < layout.groups; group++) {
            const uint8_t *factors = scales + group * PANEL + output;
            vf scale, offset = {0};
            switch (layout.scale) {
            case HALVES:
                scale = NAME(load_halves)((const uint16_t *)scales + output);
                if (layout.offsets) offset = NAME(load_halves)((const uint16_t *)scales + PANEL + output);
                break;
            case POWERS: scale = NAME(load_powers)(factors); break;
            case NIBBLES: {
                vu both = NAME(load_codes)(factors);
                scale = NAME(load_halves)(shared + output) * __builtin_convertvector((vi)(both & 15), vf);
                offset = NAME(load_halves)(shared + PANEL + output) * -__builtin_convertvector((vi)(both >> 4), vf);
                break;
            }
            default:
                scale = NAME(load_halves)(shared + output) * load_bytes((const int8_t *)factors);
                if (layout.offsets)
                    offset = NAME(load_halves)(shared + PANEL + output) *
                             -load_bytes((const int8_t *)factors + layout.groups * PANEL);
            }
            if (layout.zero) offset = scale * -(float)layout.zero; /* exact, as is its sum with scale times code */
#pragma GCC unroll 4
            for (int pair = group * pairs; pair < (group + 1) * pairs; pair++) {
                if (layout.whole) {
                    const int8_t *from = (const int8_t *)low + half * (WHOLE_BYTES / 2) + pair * 32 + column;
                    NAME(store_inputs)(numbers, pair, output, load_bytes(from) * scale, load_bytes(from + 16) * scale);
                    continue;
                }
                vu even = {0}, odd = {0};
                if (layout.low) {
                    vu both = NAME(load_codes)(low + half * (LOW_BYTES / 2) + pair * 16 + column);
                    even = both & 15;
                    odd = both >> 4;
                }
                if (layout.two) {
                    vu bits = NAME(load_codes)(two + half * (TWO_BYTES / 2) + pair / 2 * 16 + column);
                    bits >>= pair % 2 * 4;
                    even |= (bits & 3) << 4 * layout.low;
                    odd |= (bits >> 2 & 3) << 4 * layout.low;
                }
                if (layout.one) {
                    vu bits = NAME(load_codes)(one + half * (ONE_BYTES / 2) + pair / 4 * 16 + column);
                    bits >>= pair % 4 * 2;
                    even |= (bits & 1) << (layout.low ? 4 : 2);
                    odd |= (bits >> 1 & 1) << (layout.low ? 4 : 2);
                }
                NAME(store_inputs)(numbers, pair, output, NAME(value_of)(codebook, even) * scale + offset,
                                   NAME(value_of)(codebook, odd) * scale + offset);
            }
        }
    }
}

/* Define the format of one of ggml's types: its layout is in ggml.h. */
#undef GGML_FORMAT
#define GGML_FORMAT(word, label, book) \
    static void NAME(unpack_##word)(const Format *format, const char *panel, int depth, int block, void *numbers) \
    { \
        NAME(unpack_codes)(format, word, book, panel, depth, block, numbers); \
    } \
    static const Format NAME(word) = {.name = label, \
                                      .block_bytes = word##_block_bytes, \
                                      .shared_bytes = word##_shared_bytes, \
                                      .pack = pack_ggml, \
                                      .unpack = NAME(unpack_##word), \
                                      .stored = &word};
GGML_FORMAT(q4_0, "q4_0", NULL)
GGML_FORMAT(q4_1, "q4_1", NULL)
GGML_FORMAT(q5_0, "q5_0", NULL)
GGML_FORMAT(q5_1, "q5_1", NULL)
GGML_FORMAT(q8_0, "q8_0", NULL)
GGML_FORMAT(q2_k, "q2_k", NULL)
GGML_FORMAT(q3_k, "q3_k", NULL)
GGML_FORMAT(q4_k, "q4_k", NULL)
GGML_FORMAT(q5_k, "q5_k", NULL)
GGML_FORMAT(q6_k, "q6_k", NULL)
GGML_FORMAT(iq4_nl, "iq4_nl", non_linear)
GGML_FORMAT(iq4_xs, "iq4_xs", non_linear)
GGML_FORMAT(mxfp4, "mxfp4", fp4)
