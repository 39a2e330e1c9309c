/* Weights of 8 bits: integers of −127…127, and one scale for each output, its largest weight / 127. Included by
 * formats.h.
 *
 * A block has one byte for each weight, in the order of the kernels' own blocks, except that in bfloat16's order a
 * pair of inputs has the 16 numbers of the first before those of the second. The tail has the scales, float32. The
 * integers are multiplied as they are, and the sums are multiplied by the scales. */

/* Symmetric quantization: 0 stays 0, and an output's largest weight becomes ±127. */
static int64_t NAME(pack_int8)(const Format *format, char *panels, const void *source, int rows, int inputs, int first,
                               int half)
{
    int depth = padded(inputs);
    for (int i = 0; i < rows; i++) {
        const NAME(number) *from = (const NAME(number) *)source + (long)i * inputs;
        Position at = position_of(first + i, half);
        char *panel = panels + at.panel * panel_bytes(format, depth);
        float largest = 0;
        for (int k = 0; k < inputs; k++) {
            float size = fabsf(NAME(as_float)(from[k]));
            if (!isfinite(size)) return (int64_t)i * inputs + k;
            if (size > largest) largest = size;
        }
        float scale = largest / 127;
        /* Weights too small for a scale become 0. */
        float factor = scale >= 1e-37f ? 1 / scale : 0;
        for (int k = 0; k < inputs; k++) {
            int8_t *block = (int8_t *)(panel + k / 32 * format->block_bytes);
#if BF16
            int8_t *to = block + at.half * TILE + k % 32 / 2 * 32 + k % 2 * 16 + at.column;
#else
            int8_t *to = block + k % 32 * PANEL + at.half * 16 + at.column;
#endif
            *to = (int8_t)lrintf(NAME(as_float)(from[k]) * factor);
        }
        ((float *)(panel + depth / 32 * format->block_bytes))[at.half * 16 + at.column] = scale;
    }
    return -1;
}

/* Convert 32 weights to the dtype: exactly, and without their scale. */
ALWAYS void NAME(widen)(const int8_t *from, NAME(number) *to)
{
#if BF16
    for (int i = 0; i < 16; i += VW) { /* an 8-bit integer is exact in the upper half of a float */
        vu pairs = (vu)load_bytes(from + i) >> 16 | (vu)load_bytes(from + 16 + i);
        memcpy(to + 2 * i, &pairs, sizeof pairs);
    }
#else
    for (int i = 0; i < 32; i += VW) store(to + i, load_bytes(from + i));
#endif
}

static void NAME(unpack_int8)(const Format *format, const char *panel, int depth, int index, void *numbers)
{
    (void)depth;
    const char *block = panel + index * format->block_bytes;
    for (int i = 0; i < 2 * TILE; i += 32) NAME(widen)((const int8_t *)block + i, (NAME(number) *)numbers + i);
}

static const Format NAME(int8) = {
    .name = "int8",
    .block_bytes = 2 * TILE,
    .tail_bytes = PANEL * sizeof(float),
    .scaled = 1,
    .pack = NAME(pack_int8),
    .unpack = NAME(unpack_int8),
};
