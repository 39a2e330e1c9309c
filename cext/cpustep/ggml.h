/* How ggml's types, and codes of other checkpoints, are kept. Included by ggml.c, which packs them, and by format_ggml.h, which reads them. */
#ifndef FAIRLEAD_CPUSTEP_GGML_H
#define FAIRLEAD_CPUSTEP_GGML_H

#include "cpustep.h"

/* A block of 32 inputs and 32 outputs has the parts of its codes, and then its scales. A part that a type has not
 * takes no bytes. The parts of small codes are words of 16 bits, by half of the panel [2]; a word has bits of one
 * input of several pairs, those of the first pair lowest, so that a shift brings a pair's bits of 16 outputs to the
 * lower end of 32 words, which are the operand of a table look-up:
 *   low [4][16][2]     by four pairs, output and input of the pair: 4 bits of each pair's code
 *   two [2][16][2]     by eight pairs, output and input: 2 bits of each, above `low`
 *   one [16][2]        by output and input: 1 bit of each of the 16 pairs, above those
 *   whole [32][16]     by input and output, in bytes: all 8 bits, signed
 * Scales by output [32]: HALVES float16, or BFLOATS bfloat16, and then the offsets, if any, or a byte with the code of
 * 0 (ZEROS); POWERS a byte; FACTORS by group a signed byte,
 * and then those of the offsets, which are subtracted; NIBBLES by group a byte, the scale's factor in the lower half
 * and the offset's in the upper one. The last two are factors of float16 that 256 inputs share: after the blocks of
 * a panel there are those by output, and then the offsets', for each 256 inputs. */
enum { LOW_BYTES = 512, TWO_BYTES = 256, ONE_BYTES = 128, WHOLE_BYTES = 1024 };
enum { HALVES, BFLOATS, POWERS, FACTORS, NIBBLES };
enum { ZEROS = 2 }; /* of `offsets` */

/* The 32 inputs of a row that are packed together. Scales by group are float16, powers or factors. */
typedef struct {
    uint8_t codes[32];
    uint16_t scales[2], offsets[2];
    uint16_t shared, shared_offset;
} Split;

typedef struct Layout {
    int elements, bytes; /* of a block as it is stored */
    int low, two, one, whole;
    int groups; /* in 32 inputs */
    int scale, offsets; /* 0: there are none */
    int zero; /* the code of 0, if it is not 0; without a codebook, a code's value is its distance from it */
    void (*split)(const uint8_t *block, int part, Split *);
} Layout;

void split_q4_0(const uint8_t *, int, Split *);
void split_q4_1(const uint8_t *, int, Split *);
void split_q5_0(const uint8_t *, int, Split *);
void split_q5_1(const uint8_t *, int, Split *);
void split_q8_0(const uint8_t *, int, Split *);
void split_q2_k(const uint8_t *, int, Split *);
void split_q3_k(const uint8_t *, int, Split *);
void split_q4_k(const uint8_t *, int, Split *);
void split_q5_k(const uint8_t *, int, Split *);
void split_q6_k(const uint8_t *, int, Split *);
void split_iq4_xs(const uint8_t *, int, Split *);
void split_mxfp4(const uint8_t *, int, Split *);
void split_u4(const uint8_t *, int, Split *);
/* Writes the codes of 32 inputs of an output. `at`: the block. */
void put_codes(const Layout *, const uint8_t *codes, uint8_t *at, int half, int column);
int64_t pack_ggml(const Format *format, char *panels, const void *source, int rows, int inputs, int first, int half);

/* Define a type's layout, and the bytes of its blocks and of what 256 inputs share. The arguments are the fields of
 * `Layout` in their order. */
#define LAYOUT(word, elements, bytes, low, two, one, whole, groups, scale, offsets, zero) \
    __attribute__((unused)) static const Layout word = {elements, bytes, low,     two,  one,         whole, \
                                                        groups,   scale, offsets, zero, split_##word}; \
    enum { \
        word##_block_bytes = (low)*LOW_BYTES + (two)*TWO_BYTES + (one)*ONE_BYTES + (whole)*WHOLE_BYTES + \
                             PANEL * ((scale) <= BFLOATS ? 2 + ((offsets) == ZEROS ? 1 : 2 * (offsets)) \
                                                         : (groups) * ((scale) == NIBBLES ? 1 : 1 + (offsets))), \
        word##_shared_bytes = (scale) >= FACTORS ? 2 * PANEL * (1 + (offsets)) : 0, \
        word##_groups = groups, \
        word##_offsets = (offsets) != 0 \
    };
#define split_iq4_nl split_q4_0
#define split_s4_bf16 split_q4_0
#define split_s8_bf16 split_q8_0
#define split_u4_f16 split_u4
#define split_u4_bf16 split_u4
LAYOUT(q4_0, 32, 18, 1, 0, 0, 0, 1, HALVES, 0, 8)
LAYOUT(q4_1, 32, 20, 1, 0, 0, 0, 1, HALVES, 1, 0)
LAYOUT(q5_0, 32, 22, 1, 0, 1, 0, 1, HALVES, 0, 16)
LAYOUT(q5_1, 32, 24, 1, 0, 1, 0, 1, HALVES, 1, 0)
LAYOUT(q8_0, 32, 34, 0, 0, 0, 1, 1, HALVES, 0, 0)
LAYOUT(iq4_nl, 32, 18, 1, 0, 0, 0, 1, HALVES, 0, 0)
LAYOUT(mxfp4, 32, 17, 1, 0, 0, 0, 1, POWERS, 0, 0)
LAYOUT(q2_k, 256, 84, 0, 1, 0, 0, 2, NIBBLES, 1, 0)
LAYOUT(q3_k, 256, 110, 0, 1, 1, 0, 2, FACTORS, 0, 4)
LAYOUT(q4_k, 256, 144, 1, 0, 0, 0, 1, FACTORS, 1, 0)
LAYOUT(q5_k, 256, 176, 1, 0, 1, 0, 1, FACTORS, 1, 0)
LAYOUT(q6_k, 256, 210, 1, 1, 0, 0, 2, FACTORS, 0, 32)
LAYOUT(iq4_xs, 256, 136, 1, 0, 0, 0, 1, FACTORS, 0, 0)
/* Of folders: signed codes of 4 and 8 bits, and unsigned ones of 4 bits with a code of 0 for each group. */
LAYOUT(s4_bf16, 32, 18, 1, 0, 0, 0, 1, BFLOATS, 0, 8)
LAYOUT(u4_f16, 32, 19, 1, 0, 0, 0, 1, HALVES, ZEROS, 0)
LAYOUT(u4_bf16, 32, 19, 1, 0, 0, 0, 1, BFLOATS, ZEROS, 0)
LAYOUT(s8_bf16, 32, 34, 0, 0, 0, 1, 1, BFLOATS, 0, 0)
#undef LAYOUT

/* The values of the codes: of IQ4, and twice those of MXFP4, whose powers are halved. */
__attribute__((unused)) static const float non_linear[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                             1,    13,   25,  38,  53,  69,  89,  113};
__attribute__((unused)) static const float fp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

#endif
