/* AVX-512 with vdpbf16ps: Cooper Lake, Zen 4. */
#include "cpustep.h"
#include "targets.h"

#if defined(__x86_64__)
#include <immintrin.h>
BEGIN_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,bmi,bmi2")
#define VW 16
#define DOT_BF16 1
#include "vector.h"

#define BF16 1
#include "kernels.h"
const Kernels avx512bf16_bf16 = KERNELS("avx512bf16", BFLOAT16, .multiply = NAME(multiply), .sum_inputs = NAME(sum_inputs));
END_TARGET
#endif
