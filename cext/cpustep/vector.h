/* Vectors of VW floats, for a file compiled for an instruction set that has them. Include once per file.
 *
 * VW 16 is AVX-512, 8 is AVX2 with FMA, 4 is whatever the compiler makes of 16 bytes: SSE2, NEON, or scalars.
 * DOT_BF16: vdpbf16ps is available. */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if VW > 4
#include <immintrin.h>
#endif

#define ALWAYS static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * VW), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * VW), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * VW), may_alias));
typedef uint16_t vh __attribute__((vector_size(2 * VW), may_alias));
typedef int8_t vb __attribute__((vector_size(VW), may_alias));

enum { PIECES = 16 / VW }; /* vectors for 16 numbers */

/* The same at any address of their numbers. */
typedef float vf_at __attribute__((vector_size(4 * VW), may_alias, aligned(4)));
typedef uint32_t vu_at __attribute__((vector_size(4 * VW), may_alias, aligned(2)));
typedef uint32_t pair_at __attribute__((may_alias, aligned(2)));

ALWAYS vf load(const float *from) { return *(const vf_at *)from; }
ALWAYS void store(float *to, vf v) { *(vf_at *)to = v; }
ALWAYS vf load_bytes(const int8_t *from)
{
#if VW == 16
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif VW == 8
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
    vb bytes;
    memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, vi), vf);
#endif
}
ALWAYS vu load_pairs(const bf16 *from) { return *(const vu_at *)from; }
ALWAYS uint32_t load_pair(const bf16 *from) { return *(const pair_at *)from; }
ALWAYS vf splat(float a) { return a - (vf){0}; }
ALWAYS float from_bits(uint32_t bits)
{
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}
ALWAYS vf choose(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

#if VW == 16
ALWAYS vf greater(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
ALWAYS vf lesser(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
ALWAYS float total(vf a) { return _mm512_reduce_add_ps((__m512)a); }
ALWAYS float highest(vf a) { return _mm512_reduce_max_ps((__m512)a); }
ALWAYS vf nearest(vf a) { return (vf)_mm512_roundscale_ps((__m512)a, _MM_FROUND_TO_NEAREST_INT); }
/* Denormal results become 0: computing them costs some hundred cycles for each vector with a masked key. */
ALWAYS vf times_power(vf a, vf n)
{
    __mmask16 normal = _mm512_cmp_ps_mask((__m512)n, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ); /* NaN stays */
    return (vf)_mm512_maskz_scalef_ps(normal, (__m512)a, (__m512)n);
}
#elif VW == 8
ALWAYS vf greater(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
ALWAYS vf lesser(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
ALWAYS vf nearest(vf a) { return (vf)_mm256_round_ps((__m256)a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#else
ALWAYS vf greater(vf a, vf b) { return choose(a > b, a, b); }
ALWAYS vf lesser(vf a, vf b) { return choose(a < b, a, b); }
/* Adding and subtracting 1.5 · 2²³ rounds off the fraction. */
ALWAYS vf nearest(vf a) { return a + 12582912.0f - 12582912.0f; }
#endif

#if VW < 16
ALWAYS float total(vf a)
{
    float sum = a[0];
    for (int i = 1; i < VW; i++) sum += a[i];
    return sum;
}
ALWAYS float highest(vf a)
{
    float top = a[0];
    for (int i = 1; i < VW; i++) top = a[i] > top ? a[i] : top;
    return top;
}
/* Results below 2^-126 are 0: a masked key must weigh exactly 0, or a row's result would depend on how many
 * masked keys it was computed with. */
ALWAYS vf times_power(vf a, vf n)
{
    vi exponent = (__builtin_convertvector(greater(n, splat(-127.0f)), vi) + 127) << 23;
    return a * (vf)exponent;
}
#endif

/* 2^x, relative error about 2e-7; 0 where x < -127, −inf included. The polynomial is from Cephes' exp2f. */
ALWAYS vf power_of_two(vf x)
{
    x = greater(splat(-200.0f), lesser(splat(126.0f), x)); /* this order of arguments keeps a NaN */
    vf n = nearest(x), f = x - n;
    vf p = f * 1.535336188319500e-4f + 1.339887440266574e-3f;
    p = p * f + 9.618437357674640e-3f;
    p = p * f + 5.550332471162809e-2f;
    p = p * f + 2.402264791363012e-1f;
    p = p * f + 6.931472028550421e-1f;
    return times_power(p * f + 1.0f, n);
}

/* The same with an error of about 5e-6, for results that are rounded to bfloat16 anyway. */
ALWAYS vf rough_power_of_two(vf x)
{
    x = greater(splat(-200.0f), lesser(splat(126.0f), x));
    vf n = nearest(x), f = x - n;
    vf p = f * 9.6181292e-3f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    return times_power(p * f + 1.0f, n);
}

#define LOG2_E 1.44269504f

ALWAYS vf sigmoid_times(vf x, vf slope) { return x / (1.0f + power_of_two(slope * -LOG2_E)); }
ALWAYS vf silu(vf x) { return sigmoid_times(x, x); }
/* x · ½ · (1 + tanh z) is x · sigmoid(2z). */
ALWAYS vf gelu(vf x) { return sigmoid_times(x, 1.5957691216f * (x + 0.044715f * x * x * x)); }
/* cap · tanh(x / cap) */
ALWAYS vf capped(vf x, float cap) { return cap - 2.0f * cap / (1.0f + power_of_two(x * (2.0f * LOG2_E / cap))); }

/* Keep lane i, of position first + i, where low ≤ position < high; −inf elsewhere. */
ALWAYS vf visible(vf scores, int first, int low, int high)
{
    vi position;
    for (int i = 0; i < VW; i++) position[i] = i;
    position += first;
    return choose((position >= low) & (position < high), scores, splat(-INFINITY));
}

ALWAYS vf load_bf16(const bf16 *from)
{
    vh half;
    memcpy(&half, from, sizeof half);
    return (vf)(__builtin_convertvector(half, vu) << 16);
}

ALWAYS bf16 to_bf16(float a)
{
    uint32_t bits;
    memcpy(&bits, &a, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return (bf16)(bits >> 16 | 0x40); /* NaN stays NaN */
    return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

ALWAYS void store_bf16(bf16 *to, vf v)
{
#if DOT_BF16
    __m256bh half = _mm512_cvtneps_pbh((__m512)v);
    memcpy(to, &half, sizeof half);
#else
    vu bits = (vu)v, nan = (vu)((bits & 0x7fffffff) > 0x7f800000);
    vu rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    vh half = __builtin_convertvector((rounded & ~nan) | ((bits >> 16 | 0x40) & nan), vh);
    memcpy(to, &half, sizeof half);
#endif
}

/* Add the products of a pair of bfloat16 with VW pairs to `sum`. */
ALWAYS vf dot_pairs(vf sum, vu pairs, uint32_t pair)
{
#if DOT_BF16
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32((int)pair));
#else
    sum += from_bits(pair << 16) * (vf)(pairs << 16);
    return sum + from_bits(pair & 0xffff0000) * (vf)(pairs & 0xffff0000);
#endif
}
