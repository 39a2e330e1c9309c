/* Weights in the kernels' own dtype and order, which need no unpacking. Included by formats.h. */

static int64_t NAME(pack_plain)(const Format *format, char *panels, const void *source, int rows, int inputs, int first,
                                int half)
{
    const NAME(number) *numbers = source;
    size_t panel = panel_bytes(format, padded(inputs));
    for (int start = 0; start < inputs; start += 32) { /* all rows of a block are written before the next block */
        int count = inputs - start < 32 ? inputs - start : 32;
        for (int i = 0; i < rows; i++) {
            const NAME(number) *from = numbers + (long)i * inputs + start;
            Position at = position_of(first + i, half);
            NAME(number) *to = (NAME(number) *)(panels + at.panel * panel + start / 32 * format->block_bytes);
            int bad = 0;
            for (int k = 0; k < count; k++) {
                to[NAME(index_in_block)(k, at.half, at.column)] = from[k];
                bad |= !isfinite(NAME(as_float)(from[k]));
            }
            for (int k = 0; bad && k < count; k++)
                if (!isfinite(NAME(as_float)(from[k]))) return (int64_t)i * inputs + start + k;
        }
    }
    return -1;
}

static const Format NAME(plain) = {
    .name = "none",
    .block_bytes = 2 * TILE * sizeof(NAME(number)),
    .pack = NAME(pack_plain),
};
