"""The types and functions of cpustep.h that the module uses. The header explains them."""

from libc.stdint cimport int32_t, int64_t, uint32_t

cdef extern from "cpustep/cpustep.h" nogil:
    enum: BLOCK, HEAD_AT_MOST, GROUPS_AT_MOST, ROPES_AT_MOST, THREADS_AT_MOST
    enum: FLOAT32, BFLOAT16

    int padded(int size)

    ctypedef struct Layout "struct Layout":
        pass

    ctypedef struct Format:
        const char *name
        const Layout *stored

    ctypedef struct Matrix:
        const Format *format

    ctypedef struct Kernels:
        const char *name
        const Format *const *formats

    ctypedef struct Shape:
        int dtype
        int vocabulary, hidden, inner, layers, heads, kv_heads, head_dim
        int tied, qkv_bias, output_bias, mlp_bias, query_key_norm, post_norms, gelu
        float epsilon, embedding_scale, attention_scale, attention_cap, logit_cap
        int groups, ropes
        int windows[8]
        int rotated[8]
        float rope_scale[8]
        int threads, tokens_at_most

    enum: FORMATS

    ctypedef struct Layer:
        int group, rope
        const Format *formats[6]

    ctypedef struct Model:
        Shape shape
        const Kernels *kernels
        const Format *embedding_format
        const Format *head_format
        Layer *layers
        float *frequencies[8]
        int blocks[8]
        size_t element, page_bytes
        char *cache_memory
        size_t weights_bytes, cache_bytes, work_bytes

    ctypedef struct Tensor:
        int rows, inputs
        Matrix matrix

    ctypedef struct Step:
        int tokens, rows, samples
        const int32_t *input_ids
        const int32_t *positions
        const int32_t *slot_mapping[8]
        const int32_t *query_starts
        const int32_t *sequence_lengths
        const int32_t *slots
        const int32_t *sample_tokens
        const int32_t *tables[8]
        int table_rows[8]
        int table_width[8]
        float *logits
        long logits_stride

    ctypedef struct Choice:
        int rows, vocabulary
        const float *logits
        long stride
        const float *temperatures
        float greedy_below
        const int32_t *top_k
        const double *top_p
        const float *least
        const double *numbers
        const uint32_t *masks
        const int32_t *mask_rows
        int64_t *tokens
        float *highest

    const Kernels *find_kernels(int dtype, const char *name)
    const Kernels *list_kernels(int dtype, int index)
    const Format *find_format(const Kernels *, const char *name)
    int lay_out_weights(Model *)
    int lay_out_work(Model *)
    int lay_out_cache(Model *, const int *blocks)
    void release_blocks(Model *, int group, int first, int count)
    void free_model(Model *)
    const char *tensor_name(int index)
    int find_tensor(const Model *, int layer, const char *name, Tensor *)
    int find_matrix_format(Model *, int layer, const char *name, const Format ***format)
    size_t row_bytes(const Model *, const Tensor *)
    int64_t pack_matrix(const Model *, const Tensor *, const void *source, int first, int count)
    int64_t pack_vector(const Tensor *, const float *source)
    int check_step(const Model *, const Step *, char *reason, size_t room)
    int plan_step(Model *, const Step *)
    void run_step(Model *, const Step *)
    int choose_tokens(const Choice *, const Kernels *, int threads)
    double c_read_rate "read_rate" (size_t bytes, int threads, int tries)
