/* The step of a dense decoder on a CPU: the types and functions that its parts share.
 *
 * Owns the packed weights, the pages of the KV cache and the buffers between layers. It has no notion of
 * Python, sequences or samplers. Everything here trusts its arguments; `check.c` validates a step first.
 *
 * Names: T tokens of a step, all sequences flattened; B sequences (rows of the step); S tokens with logits, to sample;
 * H query heads, K KV heads, G = H / K, D channels a head, C hidden channels. A size with the suffix p is
 * padded with zeros to a multiple of 32. In matrices, M is rows of activations, N outputs and K inputs.
 *
 * Weights, in panels of 32 outputs, so that a thread reads one as a single stream:
 *   bfloat16 [N/32][Kp/32][2][16][16][2]   two tiles (outputs 0…15 and 16…31); a tile has 16 pairs of inputs,
 *                                          for each its 16 outputs, for each the pair: AMX's right operand;
 *                                          one line of it is an operand of vdpbf16ps
 *   float32  [N/32][Kp][32]
 * Gate and up are one matrix: each of its panels has 16 outputs of gate and the same 16 of up.
 *
 * A block is 32 inputs of a panel. A `Format` may keep blocks in fewer bytes: a product unpacks a few of them at a
 * time into the order above, in the thread's scratch, where the cache holds them, or multiplies few rows straight from
 * the codes, in registers. Less memory is read. The files format_*.h describe how each format keeps a block.
 *
 * Activations that a matrix is applied to:
 *   bfloat16 [M/16][Kp/32][16][32]         tiles of 16 rows and 32 channels: AMX's left operand. With fewer
 *                                          than 16 rows in all, a tile has only those
 *   float32  [M][Kp]
 *
 * KV pages, a page of K and then one of V for each block of 16 tokens and KV head:
 *   bfloat16 K [Dp/2][16 tokens][2]  V [8][Dp][2] (two tokens of a channel side by side)
 *   float32  K [Dp][16 tokens]       V [16 tokens][Dp]
 */
#ifndef FAIRLEAD_CPUSTEP_H
#define FAIRLEAD_CPUSTEP_H

#include <stddef.h>
#include <stdint.h>

typedef uint16_t bf16;

enum {
    BLOCK = 16,        /* tokens a page */
    PANEL = 32,        /* outputs a panel of a matrix; sizes are padded to a multiple of it */
    TILE = 512,        /* numbers in a tile of bfloat16 */
    CHUNK = 256,       /* keys of one partial softmax; chunks begin at multiples of it */
    ROWS_AT_ONCE = 32, /* rows of queries an attention task has at most */
    HEAD_AT_MOST = 256,
    GROUPS_AT_MOST = 8,
    ROPES_AT_MOST = 8,
    THREADS_AT_MOST = 256
};

enum { FLOAT32 = 0, BFLOAT16 = 1 };

static inline int padded(int size) { return (size + PANEL - 1) / PANEL * PANEL; }

typedef struct {
    int dtype;
    int vocabulary, hidden, inner, layers, heads, kv_heads, head_dim;
    int tied; /* the output head uses the embedding's matrix */
    int qkv_bias, output_bias, mlp_bias;
    int query_key_norm; /* an RMSNorm over the channels of each query and key head */
    int post_norms;     /* the results of attention and MLP are normalized before they are added */
    int gelu;           /* the gate is GELU (tanh form), not SiLU */
    float epsilon;
    float embedding_scale, attention_scale;
    float attention_cap, logit_cap; /* cap · tanh(x / cap); 0: none */
    int groups, ropes;
    int windows[GROUPS_AT_MOST]; /* tokens a query attends to, its own included; 0: all */
    int rotated[ROPES_AT_MOST];  /* channels that rotate, an even number */
    float rope_scale[ROPES_AT_MOST];
    int threads, tokens_at_most;
} Shape;

/* The matrices and vectors of a layer. Biases are in the order of the matrices. */
enum { QKV, OUTPUT, GATE_UP, DOWN, MATRICES };
enum { QUERY_FORMAT, KEY_FORMAT, VALUE_FORMAT, OUTPUT_FORMAT, GATE_UP_FORMAT, DOWN_FORMAT, FORMATS };
enum { ATTENTION_NORM, QUERY_NORM, KEY_NORM, POST_ATTENTION_NORM, MLP_NORM, POST_MLP_NORM, NORMS };
enum { QKV_BIAS = NORMS, OUTPUT_BIAS, GATE_UP_BIAS, DOWN_BIAS, VECTORS };

struct Layout;
struct Product;

/* The factors of a block's 32 outputs, by group of its inputs. */
typedef struct {
    float scales[2][PANEL], offsets[2][PANEL];
} Factors;

/* How a matrix is kept. Each panel has its blocks, one for each 32 inputs, then what 256 inputs share, then a tail. */
typedef struct Format {
    const char *name;   /* as the argument `quantization` names it; "none": the kernels' own order */
    size_t block_bytes; /* of a block; a multiple of 32 */
    size_t shared_bytes; /* after the blocks, for each 256 inputs; a multiple of 64, as is `tail_bytes` */
    size_t tail_bytes;  /* of a panel after all that */
    int scaled;         /* the tail begins with a float for each output, which multiplies the output's sums */
    /* Copies `rows` rows [rows, inputs] into panels; `first` and `half`: see `position_of`. They are numbers of the
     * dtype, or blocks if there is `stored`. Returns −1, or the index of a number that is infinite or NaN. */
    int64_t (*pack)(const struct Format *, char *panels, const void *source, int rows, int inputs, int first, int half);
    /* Writes a block of a panel in the kernels' own order. NULL: it is in that order already. */
    void (*unpack)(const struct Format *, const char *panel, int depth, int block, void *numbers);
    const float *codebook; /* the value of each code, for the functions above; NULL: codes are numbers */
    /* A format of codes: a weight is scale · value + offset, with the scale and offset of its output and group. Such
     * blocks are multiplied by the values of their codes, which the kernels' dtype has exactly; the sum of each
     * group is multiplied by the scale, and the sum of the group's inputs by the offset. So no weight is rounded. */
    int groups;  /* of a block: 1 or 2. 0: this is none; products use what `unpack` makes */
    int offsets; /* whether there are offsets; else they are 0 */
    void (*read_factors)(const struct Format *, const char *panel, int depth, int block, Factors *);
    /* Writes the values of a block's codes in the kernels' own order. */
    void (*widen)(const struct Format *, const char *panel, int block, void *values);
    /* Multiplies the few rows of a product by a panel, straight from its codes; writes sums [rows][32]. */
    void (*multiply_few)(const struct Format *, const struct Product *, const char *panel, float (*sums)[PANEL]);
    const struct Layout *stored; /* of blocks that a checkpoint has in this format; NULL: it is made of numbers */
} Format;

/* A matrix, or some of its panels: queries, keys and values may have formats of their own. */
typedef struct Matrix {
    const Format *format;
    char *panels;              /* NULL: this model has no such matrix */
    int first, end;            /* the panels of these, `end` excluded */
    const struct Matrix *next; /* the panels from `end` on; NULL: there are none */
} Matrix;

/* Return the bytes of a panel of `depth` inputs, a multiple of 32. */
static inline size_t panel_bytes(const Format *format, int depth)
{
    return depth / 32 * format->block_bytes + (depth + 255) / 256 * format->shared_bytes + format->tail_bytes;
}

/* Return what the 256 inputs of a block share. */
static inline const char *shared_at(const Format *format, const char *panel, int depth, int block)
{
    return panel + depth / 32 * format->block_bytes + block / 8 * format->shared_bytes;
}

static inline char *panel_at(const Matrix *matrix, int depth, long panel)
{
    return matrix->panels + (panel - matrix->first) * panel_bytes(matrix->format, depth);
}

/* Return the factors of a panel's 32 outputs; NULL: all are 1. */
static inline const float *scales_at(const Matrix *matrix, int depth, long panel)
{
    if (!matrix->format->scaled) return NULL;
    return (const float *)(panel_at(matrix, depth, panel) + depth / 32 * matrix->format->block_bytes);
}

typedef struct {
    Matrix matrices[MATRICES];
    Matrix more[2];                 /* the keys and values of QKV, if their formats differ */
    const Format *formats[FORMATS]; /* of the matrices */
    float *vectors[VECTORS]; /* NULL: this model has none */
    char *pages;             /* [block][kv head][K, V] */
    int group, rope;
} Layer;

/* A matrix product, rows × weightᵀ, and what is done with its result. */
enum { STORE, ADD, GATE, LOGITS };
typedef struct Product {
    const void *input; /* activations, `rows` × `depth` */
    const float *input_sums; /* [rows][depth / 16] of each 16 inputs, for formats with offsets */
    Matrix weight;
    const float *bias; /* in the order of the panels' outputs, or NULL */
    int rows, depth, panels;
    int kind;
    float *output; /* STORE, ADD, LOGITS: rows of `stride` floats */
    long stride;
    int columns; /* LOGITS: outputs that exist */
    float cap;   /* LOGITS */
    void *gated; /* GATE: activations, `rows` × `gated_depth` */
    int gated_depth, gelu;
} Product;

/* Rows of queries of one sequence. A row is a token and a head of the KV head's group: token · G + head. */
typedef struct {
    int first, count;            /* rows of the query buffer */
    int base, start;             /* the row of the sequence's first token in this step, and its position */
    int output;                  /* the row of the attention's result for the token of `first` */
    int chunk_first, chunk_last; /* chunks of keys to attend to, chunk_last excluded */
    int partial;                 /* index in `partials` of the first result to merge; −1: none */
    int tiled;                   /* enough rows for AMX tiles of queries */
    const int32_t *table;        /* the sequence's blocks */
} Task;

typedef struct {
    Task *tasks, *last_tasks;   /* for all layers but the last; for the last, with sampled tokens only */
    Task *merges, *last_merges; /* the partial results of chunk_first … chunk_last begin at `partial` */
    int task_count, last_task_count, merge_count, last_merge_count;
} Plan;

struct Kernels;

typedef struct {
    Shape shape;
    const struct Kernels *kernels;
    const Format *embedding_format, *head_format;
    Layer *layers;
    Matrix embedding, head;
    float *final_norm;
    float *frequencies[ROPES_AT_MOST]; /* radians a position by pair of channels */
    int blocks[GROUPS_AT_MOST];
    size_t element;    /* bytes of a number in activations, pages and rows to pack */
    size_t page_bytes; /* of K for a block and a KV head; V takes the same */
    char *weights_memory, *cache_memory, *work_memory;
    size_t weights_bytes, cache_bytes, work_bytes;

    /* Buffers between the layers. Rows of float32 unless they are activations. */
    float *stream;                   /* [T][Cp] the residual stream */
    float *sampled;                  /* [T][Cp] the rows of it that have logits */
    float *branch;                   /* [T][Cp] the result of attention or MLP, if it is normalized first */
    float *qkv;                      /* [T][(H + 2K)·D padded] */
    float *angles[ROPES_AT_MOST];    /* [T][2][rotated/2] cosine, then sine, of this step's tokens */
    void *normal, *attended, *gated; /* activations: normalized stream, attention's result, gated inner */
    float *input_sums;               /* [T][inputs / 16] of a product's input, for formats with offsets */
    void *queries;                   /* [K][T·G][Dp] */
    int *clear_from;                 /* [groups][T]: offset from which a token zeroes its value page; 16: none */
    char *scratch;                   /* by thread, SCRATCH_BYTES */
    float *partials;                 /* [partial][K][ROWS_AT_ONCE][16 + Dp], see attention.h; grows */
    size_t partials_room;
    Plan plans[GROUPS_AT_MOST];
    Task *tasks_memory;
    size_t tasks_room;
} Model;

/* The arguments of one step, named as in the engine's Step. */
typedef struct {
    int tokens, rows, samples;
    const int32_t *input_ids, *positions;        /* [T] */
    const int32_t *slot_mapping[GROUPS_AT_MOST]; /* [T] block · 16 + offset */
    const int32_t *query_starts;                 /* [B + 1] */
    const int32_t *sequence_lengths, *slots;     /* [B] */
    const int32_t *sample_tokens;                /* [S] ascending: indices of tokens, several of a row or none */
    const int32_t *tables[GROUPS_AT_MOST];       /* [table_rows][table_width] */
    int table_rows[GROUPS_AT_MOST], table_width[GROUPS_AT_MOST];
    float *logits; /* [S][logits_stride] */
    long logits_stride;
} Step;

enum { SCRATCH_BYTES = 512 * 1024 };

/* The arguments for choosing the next token of each row of logits. Arrays are by row. */
typedef struct {
    int rows, vocabulary;
    const float *logits;
    long stride;
    const float *temperatures; /* below `greedy_below`: choose the highest logit */
    float greedy_below;
    const int32_t *top_k;     /* 0 or less: off */
    const double *top_p;      /* 1: off */
    const float *least;       /* the logarithm of min_p */
    const double *numbers;    /* uniform random numbers, 0 to 1: a fraction of the distribution's sum */
    const uint32_t *masks;    /* bits of the allowed tokens, rows of whole words; NULL: no row has a mask */
    const int32_t *mask_rows; /* each row's mask; negative: all tokens are allowed */
    int64_t *tokens;
    float *highest; /* the highest allowed logit; NaN if one of those is NaN */
} Choice;

enum { RUN = 128 }; /* scores that share one sum and one maximum */

/* The kernels of an instruction set and dtype. `scratch`: SCRATCH_BYTES. */
typedef struct Kernels {
    const char *name;
    int dtype;
    int tiles;                    /* `attend_tiled` exists, for tasks of many rows */
    const Format *const *formats; /* that `multiply` and `embed` read; the last is NULL */
    void (*multiply)(const Product *, int first_panel, int last_panel, char *scratch);
    void (*sum_inputs)(const Product *, int row, float *sums); /* NULL: products use what formats unpack */
    void (*embed)(const Model *, int token_id, float *row);
    void (*normalize)(const float *row, const float *weight, float epsilon, int size, void *activations, int rows,
                      int index);
    void (*add_normalized)(float *row, const float *branch, const float *weight, float epsilon, int size);
    void (*split_heads)(const Model *, const Layer *, const Step *, int token);
    void (*attend)(const Model *, const Layer *, const Step *, const Task *, int kv_head, int rows, char *scratch);
    void (*attend_tiled)(const Model *, const Layer *, const Step *, const Task *, int kv_head, int rows,
                         char *scratch);
    void (*merge)(const Model *, const Task *, int kv_head, int rows, char *scratch);
    void (*choose_row)(const Choice *, int row, char *scratch); /* float32 only */
    void (*reset_thread)(void); /* resets a thread at the end of a step, before it runs other code */
} Kernels;

/* dispatch.c: the kernels that this processor can run. NULL if the name is unknown or not supported. */
const Kernels *find_kernels(int dtype, const char *name);
const Kernels *list_kernels(int dtype, int index);
const Format *find_format(const Kernels *, const char *name); /* NULL if these kernels do not read it */

/* memory.c */
void *map_memory(size_t bytes);
void unmap_memory(void *memory, size_t bytes);
void release_memory(char *memory, size_t bytes);

/* model.c: those that return int return 0, or −1 when out of memory. */
int lay_out_weights(Model *);
int lay_out_work(Model *);
int lay_out_cache(Model *, const int *blocks);
void release_blocks(Model *, int group, int first, int count);
void free_model(Model *);

/* tensors.c: finds a tensor of a checkpoint by its name; `layer` is −1 for those of the model. Returns 0 if the
 * model has no such tensor. The names end with NULL. Either `matrix.panels` or `vector` is NULL. */
enum { PLAIN = -1, GATE_HALF = 0, UP_HALF = 1 };
typedef struct {
    int rows, inputs; /* of a matrix; a vector has `rows` numbers and no inputs */
    int before;       /* the number of rows before it in a fused matrix or vector */
    int half;         /* gate and up: which half of each panel; rows are counted within it */
    Matrix matrix;
    float *vector;
} Tensor;
const char *tensor_name(int index);
int find_tensor(const Model *, int layer, const char *name, Tensor *);
/* Finds where the format of a matrix is noted, before memory is laid out. Returns 0 if the model has none such. */
int find_matrix_format(Model *, int layer, const char *name, const Format ***format);

/* The place of a row of a fused matrix or vector: the panel, the half of it, and the column in the half. */
typedef struct {
    long panel;
    int half, column;
} Position;

static inline Position position_of(int row, int half)
{
    if (half == PLAIN) return (Position){row / PANEL, row % PANEL / 16, row % 16};
    return (Position){row / 16, half, row % 16};
}

/* pack.c: copies `count` rows [count, inputs] of a matrix, from row `first` on, into panels of its format. Returns
 * −1, or the index of a number that is infinite or NaN. */
int64_t pack_matrix(const Model *, const Tensor *, const void *source, int first, int count);
size_t row_bytes(const Model *, const Tensor *); /* of a row of its source */
int64_t pack_vector(const Tensor *, const float *source);

/* check.c: 0 if a step is valid, else 1, with the fault as text in `reason`. */
int check_step(const Model *, const Step *, char *reason, size_t room);

/* plan.c: divides a checked step into tasks. −1: out of memory. */
int plan_step(Model *, const Step *);

/* choose.c: −1: out of memory. */
int choose_tokens(const Choice *, const Kernels *, int threads);

/* probe.c */
double read_rate(size_t bytes, int threads, int tries);

/* step.c: runs a checked and planned step. */
void run_step(Model *, const Step *);

#endif
