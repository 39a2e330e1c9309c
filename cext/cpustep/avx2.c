/* AVX2 with FMA: x86-64 since Haswell and Excavator. */
#include "cpustep.h"
#include "targets.h"

#if defined(__x86_64__)
#include <immintrin.h>
BEGIN_TARGET("avx2,fma,bmi,bmi2")
#define VW 8
#define DOT_BF16 0
#include "vector.h"

#define BF16 0
#include "kernels.h"
const Kernels avx2_f32 = KERNELS("avx2", FLOAT32, .multiply = NAME(multiply), .sum_inputs = NAME(sum_inputs));
#undef NAME
#undef BF16
#define BF16 1
#include "kernels.h"
const Kernels avx2_bf16 = KERNELS("avx2", BFLOAT16, .multiply = NAME(multiply), .sum_inputs = NAME(sum_inputs));
END_TARGET
#endif
