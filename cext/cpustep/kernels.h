/* The kernels of one dtype for the instruction set that the including file was compiled for. */
#if BF16
#define NAME(word) word##_bf16
#else
#define NAME(word) word##_f32
#endif

#include "product.h"
#include "rows.h"
#include "attention.h"

#ifndef KERNELS
#define KERNELS(label, number_type) { \
    .name = label, .dtype = number_type, .multiply = NAME(multiply), .embed = NAME(embed), \
    .normalize = NAME(normalize), .add_normalized = NAME(add_normalized), .split_heads = NAME(split_heads), \
    .attend = NAME(attend), .merge = NAME(merge) }
#endif
