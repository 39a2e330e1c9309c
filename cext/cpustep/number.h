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
