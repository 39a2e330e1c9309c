/* Packs rows of ggml's blocks into panels, without a change of any code or scale. Source of the blocks: ggml-quants.h.
 * A block has 32 inputs, or 256 in eight parts. */
#include "ggml.h"

#include <string.h>

static uint16_t half_at(const uint8_t *from) { return (uint16_t)(from[0] | from[1] << 8); }

/* `scale`: HALVES or BFLOATS. */
static int is_finite(uint16_t half, int scale)
{
    int exponent = scale == BFLOATS ? 0x7f80 : 0x7c00;
    return (half & exponent) != exponent;
}

/* The lower halves of 16 bytes, and then the upper ones. */
static void read_nibbles(const uint8_t *from, uint8_t *codes)
{
    for (int i = 0; i < 16; i++) {
        codes[i] = from[i] & 15;
        codes[16 + i] = from[i] >> 4;
    }
}

static void add_fifth_bits(const uint8_t *from, uint8_t *codes)
{
    for (int i = 0; i < 32; i++) codes[i] |= (from[i / 8] >> i % 8 & 1) << 4;
}

void split_q4_0(const uint8_t *block, int part, Split *split)
{
    (void)part;
    split->scales[0] = half_at(block);
    read_nibbles(block + 2, split->codes);
}

void split_q4_1(const uint8_t *block, int part, Split *split)
{
    (void)part;
    split->scales[0] = half_at(block);
    split->offsets[0] = half_at(block + 2);
    read_nibbles(block + 4, split->codes);
}

void split_q5_0(const uint8_t *block, int part, Split *split)
{
    (void)part;
    split->scales[0] = half_at(block);
    read_nibbles(block + 6, split->codes);
    add_fifth_bits(block + 2, split->codes);
}

void split_q5_1(const uint8_t *block, int part, Split *split)
{
    (void)part;
    split->scales[0] = half_at(block);
    split->offsets[0] = half_at(block + 2);
    read_nibbles(block + 8, split->codes);
    add_fifth_bits(block + 4, split->codes);
}

void split_q8_0(const uint8_t *block, int part, Split *split)
{
    (void)part;
    split->scales[0] = half_at(block);
    memcpy(split->codes, block + 2, 32);
}

void split_mxfp4(const uint8_t *block, int part, Split *split)
{
    (void)part;
    split->scales[0] = block[0];
    read_nibbles(block + 1, split->codes);
}

void split_u4(const uint8_t *block, int part, Split *split)
{
    (void)part;
    split->scales[0] = half_at(block);
    split->offsets[0] = block[2];
    read_nibbles(block + 3, split->codes);
}

void split_q2_k(const uint8_t *block, int part, Split *split)
{
    const uint8_t *codes = block + 16 + part / 4 * 32;
    for (int i = 0; i < 32; i++) split->codes[i] = codes[i] >> part % 4 * 2 & 3;
    for (int group = 0; group < 2; group++) split->scales[group] = block[2 * part + group];
    split->shared = half_at(block + 80);
    split->shared_offset = half_at(block + 82);
}

void split_q3_k(const uint8_t *block, int part, Split *split)
{
    const uint8_t *codes = block + 32 + part / 4 * 32, *scales = block + 96;
    for (int i = 0; i < 32; i++)
        split->codes[i] = (codes[i] >> part % 4 * 2 & 3) | (block[i] >> part & 1) << 2;
    for (int group = 0; group < 2; group++) {
        int index = 2 * part + group, low = index < 8 ? scales[index] & 15 : scales[index - 8] >> 4;
        split->scales[group] = (uint8_t)((low | (scales[8 + index % 4] >> index / 4 * 2 & 3) << 4) - 32);
    }
    split->shared = half_at(block + 108);
}

/* Factors of 6 bits, of the scale and of the offset of a part. */
static void read_factors(const uint8_t *from, int part, Split *split)
{
    if (part < 4) {
        split->scales[0] = from[part] & 63;
        split->offsets[0] = from[part + 4] & 63;
        return;
    }
    split->scales[0] = (from[part + 4] & 15) | (from[part - 4] >> 6) << 4;
    split->offsets[0] = from[part + 4] >> 4 | (from[part] >> 6) << 4;
}

void split_q4_k(const uint8_t *block, int part, Split *split)
{
    const uint8_t *codes = block + 16 + part / 2 * 32;
    for (int i = 0; i < 32; i++) split->codes[i] = codes[i] >> part % 2 * 4 & 15;
    read_factors(block + 4, part, split);
    split->shared = half_at(block);
    split->shared_offset = half_at(block + 2);
}

void split_q5_k(const uint8_t *block, int part, Split *split)
{
    const uint8_t *codes = block + 48 + part / 2 * 32;
    for (int i = 0; i < 32; i++)
        split->codes[i] = (codes[i] >> part % 2 * 4 & 15) | (block[16 + i] >> part & 1) << 4;
    read_factors(block + 4, part, split);
    split->shared = half_at(block);
    split->shared_offset = half_at(block + 2);
}

void split_q6_k(const uint8_t *block, int part, Split *split)
{
    int quarter = part % 4;
    const uint8_t *low = block + part / 4 * 64 + quarter % 2 * 32, *high = block + 128 + part / 4 * 32;
    for (int i = 0; i < 32; i++)
        split->codes[i] = (low[i] >> quarter / 2 * 4 & 15) | (high[i] >> quarter * 2 & 3) << 4;
    for (int group = 0; group < 2; group++) split->scales[group] = block[192 + 2 * part + group];
    split->shared = half_at(block + 208);
}

void split_iq4_xs(const uint8_t *block, int part, Split *split)
{
    int low = block[4 + part / 2] >> part % 2 * 4 & 15, high = half_at(block + 2) >> 2 * part & 3;
    split->scales[0] = (uint8_t)((low | high << 4) - 32);
    split->shared = half_at(block);
    read_nibbles(block + 8 + part * 16, split->codes);
}

/* Write bits of 32 codes to words, by input of a pair: `bits` of each code from bit `from` on, of `pairs` pairs a word. */
static void put_words(const uint8_t *codes, int from, int bits, uint8_t *part, int column)
{
    int pairs = 16 / bits, mask = (1 << bits) - 1;
    uint16_t *words = (uint16_t *)part;
    for (int k = 0; k < 2; k++)
        for (int first = 0; first < 16; first += pairs) {
            unsigned word = 0;
            for (int i = 0; i < pairs; i++) word |= (codes[2 * (first + i) + k] >> from & mask) << bits * i;
            words[first / pairs * 32 + column * 2 + k] = (uint16_t)word;
        }
}

void put_codes(const Layout *layout, const uint8_t *codes, uint8_t *at, int half, int column)
{
    uint8_t *low = at, *two = low + layout->low * LOW_BYTES, *one = two + layout->two * TWO_BYTES;
    if (layout->whole) {
        for (int k = 0; k < 32; k++) low[half * (WHOLE_BYTES / 2) + k * 16 + column] = codes[k];
        return;
    }
    if (layout->low) put_words(codes, 0, 4, low + half * (LOW_BYTES / 2), column);
    if (layout->two) put_words(codes, 4 * layout->low, 2, two + half * (TWO_BYTES / 2), column);
    if (layout->one) put_words(codes, layout->low ? 4 : 2, 1, one + half * (ONE_BYTES / 2), column);
}

/* Write the scales of 32 inputs of an output. `at`: where the block's scales begin. Returns 0 if one is not finite. */
static int put_scales(const Layout *layout, const Split *split, uint8_t *at, uint16_t *shared, int output)
{
    if (layout->scale <= BFLOATS) {
        ((uint16_t *)at)[output] = split->scales[0];
        if (layout->offsets == ZEROS) {
            at[2 * PANEL + output] = (uint8_t)split->offsets[0];
            return is_finite(split->scales[0], layout->scale);
        }
        if (layout->offsets) ((uint16_t *)at)[PANEL + output] = split->offsets[0];
        return is_finite(split->scales[0], layout->scale) &&
               (!layout->offsets || is_finite(split->offsets[0], layout->scale));
    }
    for (int group = 0; group < layout->groups; group++) {
        at[group * PANEL + output] = (uint8_t)split->scales[group];
        if (layout->offsets && layout->scale == FACTORS)
            at[(layout->groups + group) * PANEL + output] = (uint8_t)split->offsets[group];
    }
    if (layout->scale == POWERS) return split->scales[0] <= 252; /* six times the power is finite */
    shared[output] = split->shared;
    if (layout->offsets) shared[PANEL + output] = split->shared_offset;
    return is_finite(split->shared, HALVES) && (!layout->offsets || is_finite(split->shared_offset, HALVES));
}

int64_t pack_ggml(const Format *format, char *panels, const void *source, int rows, int inputs, int first, int half)
{
    const Layout *layout = format->stored;
    int parts = layout->elements / 32, depth = padded(inputs);
    const uint8_t *from = source;
    for (int i = 0; i < rows; i++) {
        Position place = position_of(first + i, half);
        char *panel = panels + place.panel * panel_bytes(format, depth);
        for (int block = 0; block < inputs / 32; block++) {
            Split split;
            uint8_t *at = (uint8_t *)panel + block * format->block_bytes;
            layout->split(from, block % parts, &split);
            put_codes(layout, split.codes, at, place.half, place.column);
            at += layout->low * LOW_BYTES + layout->two * TWO_BYTES + layout->one * ONE_BYTES;
            at += layout->whole * WHOLE_BYTES;
            uint16_t *shared = (uint16_t *)shared_at(format, panel, depth, block);
            if (!put_scales(layout, &split, at, shared, place.half * 16 + place.column))
                return (int64_t)i * inputs + block * 32;
            if (block % parts == parts - 1) from += layout->bytes;
        }
    }
    return -1;
}
