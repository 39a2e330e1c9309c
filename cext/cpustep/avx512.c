/* AVX-512: float32, and bfloat16 that is widened when it is loaded. */
#include "cpustep.h"
#include "targets.h"

#if defined(__x86_64__)
#include <immintrin.h>
BEGIN_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,bmi,bmi2")
#define VW 16
#define DOT_BF16 0
#include "vector.h"

#define BF16 0
#include "kernels.h"
const Kernels avx512_f32 = KERNELS("avx512", FLOAT32, .multiply = NAME(multiply), .sum_inputs = NAME(sum_inputs));
#undef NAME
#undef BF16
#define BF16 1
#include "kernels.h"
const Kernels avx512_bf16 = KERNELS("avx512", BFLOAT16, .multiply = NAME(multiply), .sum_inputs = NAME(sum_inputs));
END_TARGET
#endif
