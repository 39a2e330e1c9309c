/* The kernels of one dtype for the instruction set that the including file was compiled for. */
#if BF16
#define NAME(word) word##_bf16
#else
#define NAME(word) word##_f32
#endif

#include "ggml.h"
#include "number.h"
#include "codes.h"
#include "formats.h"
#include "product.h"
#include "rows.h"
#include "attention.h"
#undef CHOOSE_ROW
#if BF16
#define CHOOSE_ROW 0
#else
#include "choose.h"
#define CHOOSE_ROW NAME(choose_row)
#endif

#ifndef KERNELS
/* Further arguments set the members that differ. */
#define KERNELS(label, number_type, ...) \
    { \
        .name = label, .dtype = number_type, .embed = NAME(embed), .normalize = NAME(normalize), \
        .add_normalized = NAME(add_normalized), .split_heads = NAME(split_heads), .attend = NAME(attend), \
        .merge = NAME(merge), .formats = NAME(formats), .choose_row = CHOOSE_ROW, __VA_ARGS__ \
    }
#endif
