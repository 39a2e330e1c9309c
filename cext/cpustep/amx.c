/* AMX: bfloat16 products, and attention of many rows, in tiles of 16 × 32. Operations on single rows, and
 * attention of few rows, use vdpbf16ps. */
#include "cpustep.h"
#include "targets.h"

#if defined(__x86_64__)
#include <immintrin.h>
BEGIN_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16,avx2,fma,bmi,bmi2")
#define VW 16
#define DOT_BF16 1
#include "vector.h"
#define BF16 1
#include "kernels.h"
#include "amx_product.h"
#include "amx_attention.h"

static void release_tiles(void) { _tile_release(); }

const Kernels amx_bf16 = KERNELS("amx", BFLOAT16, .tiles = 1, .multiply = multiply_tiles, .attend_tiled = attend_tiles,
                                 .reset_thread = release_tiles);
END_TARGET
#endif
