/* The numbers of one dtype. Included by kernels.h for each dtype. */

#if BF16
typedef bf16 NAME(number);
#else
typedef float NAME(number);
#endif

ALWAYS float NAME(as_float)(NAME(number) number)
{
#if BF16
    return from_bits((uint32_t)number << 16);
#else
    return number;
#endif
}

ALWAYS void NAME(put)(NAME(number) *to, vf v)
{
#if BF16
    store_bf16(to, v);
#else
    store(to, v);
#endif
}

/* Return the index of input `k` of an output in a block, in the order that products read. */
ALWAYS long NAME(index_in_block)(int k, int half, int column)
{
#if BF16
    return (long)half * TILE + k / 2 * 32 + column * 2 + k % 2;
#else
    return (long)k * PANEL + half * 16 + column;
#endif
}

/* Return the address of the activation of a row and channel. */
ALWAYS NAME(number) *NAME(element_of)(void *activations, int rows, int depth, int row, int channel)
{
#if BF16
    int height = rows < 16 ? rows : 16;
    return (bf16 *)activations + (long)(row & ~15) * depth + (long)(channel >> 5) * height * 32 + (row & 15) * 32 +
           (channel & 31);
#else
    (void)rows;
    return (float *)activations + (long)row * depth + channel;
#endif
}
