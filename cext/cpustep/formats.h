/* The formats that weights are kept in. Included by kernels.h for each instruction set and dtype.
 *
 * A format is a file that defines an object of type `Format`, and an entry here: no other file contains its
 * name. Kernels look it up in their list, so that a format may have its own code for an instruction set, or may be
 * left out where it does not pay. */
#include "format_plain.h"
#include "format_int8.h"
#include "format_int4.h"
#include "format_ggml.h"

static const Format *const NAME(formats)[] = {
    &NAME(plain),  &NAME(int8),   &NAME(int4),    &NAME(q4_0),   &NAME(q4_1),    &NAME(q5_0),    &NAME(q5_1), &NAME(q8_0),
    &NAME(q2_k),   &NAME(q3_k),   &NAME(q4_k),    &NAME(q5_k),   &NAME(q6_k),    &NAME(iq4_nl),  &NAME(iq4_xs),
    &NAME(mxfp4),  &NAME(s4_bf16), &NAME(u4_f16), &NAME(u4_bf16), &NAME(s8_bf16), NULL,
};
