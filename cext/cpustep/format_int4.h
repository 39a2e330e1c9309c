/* Weights of 4 bits in groups of 32 inputs, with a codebook. Included by formats.h.
 *
 * A weight is scale · codebook[code] + offset. Each output has a scale and an offset for each block, in bfloat16. A
 * block is 640 bytes:
 *   codes                  `low` of ggml.h
 *   scales [32]            bfloat16, by output
 *   offsets [32]           bfloat16, by output
 * Products use the values of the codes (codes.h). Where weights are unpacked, scale times codebook value is exact in
 * float32, as both have 8 bits. A weight is then rounded once to float32, and in a bfloat16 model once more. */

enum { NAME(scales_of_int4) = LOW_BYTES / sizeof(bf16), NAME(offsets_of_int4) = NAME(scales_of_int4) + PANEL };

/* Equal steps, for checkpoints that are rounded when they are loaded. Values ascend. */
static const float NAME(equal_steps)[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* Each group's smallest weight becomes the first value of the codebook, and its largest weight the last one. */
static int64_t NAME(pack_int4)(const Format *format, char *panels, const void *source, int rows, int inputs, int first,
                               int half)
{
    const float *values = format->codebook;
    float between[15];
    for (int i = 0; i < 15; i++) between[i] = (values[i] + values[i + 1]) / 2;
    for (int i = 0; i < rows; i++) {
        Position at = position_of(first + i, half);
        char *panel = panels + at.panel * panel_bytes(format, padded(inputs));
        for (int start = 0; start < inputs; start += 32) {
            const NAME(number) *from = (const NAME(number) *)source + (long)i * inputs + start;
            char *block = panel + start / 32 * format->block_bytes;
            int count = inputs - start < 32 ? inputs - start : 32, output = at.half * 16 + at.column;
            float weights[32], least = INFINITY, most = -INFINITY;
            uint8_t codes[32] = {0};
            for (int k = 0; k < count; k++) {
                weights[k] = NAME(as_float)(from[k]);
                if (!isfinite(weights[k])) return (int64_t)i * inputs + start + k;
                if (weights[k] < least) least = weights[k];
                if (weights[k] > most) most = weights[k];
            }
            float steps = values[15] - values[0];
            bf16 scale = to_bf16(most / steps - least / steps); /* the difference alone might be infinite */
            float width = from_bits((uint32_t)scale << 16);
            bf16 offset = to_bf16(least - width * values[0]);
            float zero = from_bits((uint32_t)offset << 16), factor = width >= 1e-37f ? 1 / width : 0;
            for (int k = 0; k < count; k++) {
                float value = (weights[k] - zero) * factor;
                for (int j = 0; j < 15; j++) codes[k] += value > between[j];
            }
            ((bf16 *)block)[NAME(scales_of_int4) + output] = factor > 0 ? scale : 0;
            ((bf16 *)block)[NAME(offsets_of_int4) + output] = offset;
            put_codes(&q4_1, codes, (uint8_t *)block, at.half, at.column);
        }
    }
    return -1;
}

/* Store VW outputs' weights for a pair of inputs. */
ALWAYS void NAME(store_inputs)(NAME(number) *numbers, int pair, int output, vf even, vf odd)
{
#if BF16 && DOT_BF16
    static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    both = _mm512_permutexvar_epi16(_mm512_loadu_si512(order), both);
    _mm512_storeu_si512(numbers + NAME(index_in_block)(2 * pair, output / 16, output % 16), both);
#elif BF16
    vu first = (vu)even, second = (vu)odd;
    first += 0x7fff + (first >> 16 & 1);
    second += 0x7fff + (second >> 16 & 1);
    vu both = first >> 16 | (second & 0xffff0000);
    memcpy(numbers + NAME(index_in_block)(2 * pair, output / 16, output % 16), &both, sizeof both);
#else
    store(numbers + 2 * pair * PANEL + output, even);
    store(numbers + (2 * pair + 1) * PANEL + output, odd);
#endif
}

static void NAME(unpack_int4)(const Format *format, const char *panel, int depth, int index, void *numbers)
{
    (void)depth;
    const char *block = panel + index * format->block_bytes;
    for (int output = 0; output < PANEL; output += VW) {
        const NAME(Parts) parts = NAME(load_parts)(q4_1, (const uint8_t *)block, output / 16, output % 16);
        vf scale = load_bf16((const bf16 *)block + NAME(scales_of_int4) + output);
        vf offset = load_bf16((const bf16 *)block + NAME(offsets_of_int4) + output);
#pragma GCC unroll 16
        for (int pair = 0; pair < 16; pair++) {
            vf even = NAME(look_up)(format->codebook, NAME(codes_at)(q4_1, &parts, pair, 0)) * scale + offset;
            vf odd = NAME(look_up)(format->codebook, NAME(codes_at)(q4_1, &parts, pair, 1)) * scale + offset;
            NAME(store_inputs)(numbers, pair, output, even, odd);
        }
    }
}

static void NAME(read_int4)(const Format *format, const char *panel, int depth, int index, Factors *factors)
{
    (void)depth;
    const bf16 *block = (const bf16 *)(panel + index * format->block_bytes);
    for (int output = 0; output < PANEL; output += VW) {
        store(factors->scales[0] + output, load_bf16(block + NAME(scales_of_int4) + output));
        store(factors->offsets[0] + output, load_bf16(block + NAME(offsets_of_int4) + output));
    }
}

static const Format NAME(int4) = {
    .name = "int4",
    .block_bytes = LOW_BYTES + 2 * PANEL * sizeof(bf16),
    .pack = NAME(pack_int4),
    .unpack = NAME(unpack_int4),
    .codebook = NAME(equal_steps),
    .groups = 1,
    .offsets = 1,
    .read_factors = NAME(read_int4),
    .widen = NAME(widen_booked_nibbles),
    .multiply_few = NAME(few_booked_nibbles),
};
