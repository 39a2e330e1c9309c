/* For any processor: vectors of 16 bytes, which the compiler maps to the target's instructions. */
#include "cpustep.h"

#define VW 4
#define DOT_BF16 0
#include "vector.h"

#define BF16 0
#include "kernels.h"
const Kernels portable_f32 = KERNELS("portable", FLOAT32, .multiply = NAME(multiply), .sum_inputs = NAME(sum_inputs));
#undef NAME
#undef BF16
#define BF16 1
#include "kernels.h"
const Kernels portable_bf16 = KERNELS("portable", BFLOAT16, .multiply = NAME(multiply), .sum_inputs = NAME(sum_inputs));
