/* The tensors of a checkpoint: their names and shapes, and where their rows are packed. */
#include "cpustep.h"

#include <string.h>

enum { EMBEDDING, FINAL_NORM, HEAD };                                          /* of the model */
enum { NO_INPUTS, HIDDEN, INNER, QUERIES, KEYS, CHANNELS, VOCABULARY, SIZES }; /* numbers of rows and inputs */

/* `index`: of a matrix or vector in the layer, or one of the model's above. Queries, keys and values are one
 * matrix. `before` selects the rows before this tensor: 0 none, 1 the queries, 2 the queries and keys. */
static const struct {
    const char *name;
    int by_layer, index, rows, inputs, before, half;
} known[] = {
    {"embedding", 0, EMBEDDING, VOCABULARY, HIDDEN, 0, PLAIN}, /* in the order in which they are listed */
    {"norm", 0, FINAL_NORM, HIDDEN, NO_INPUTS, 0, PLAIN},
    {"head", 0, HEAD, VOCABULARY, HIDDEN, 0, PLAIN},
    {"query", 1, QKV, QUERIES, HIDDEN, 0, PLAIN},
    {"key", 1, QKV, KEYS, HIDDEN, 1, PLAIN},
    {"value", 1, QKV, KEYS, HIDDEN, 2, PLAIN},
    {"output", 1, OUTPUT, HIDDEN, QUERIES, 0, PLAIN},
    {"gate", 1, GATE_UP, INNER, HIDDEN, 0, GATE_HALF},
    {"up", 1, GATE_UP, INNER, HIDDEN, 0, UP_HALF},
    {"down", 1, DOWN, HIDDEN, INNER, 0, PLAIN},
    {"attention_norm", 1, ATTENTION_NORM, HIDDEN, NO_INPUTS, 0, PLAIN},
    {"mlp_norm", 1, MLP_NORM, HIDDEN, NO_INPUTS, 0, PLAIN},
    {"query_bias", 1, QKV_BIAS, QUERIES, NO_INPUTS, 0, PLAIN},
    {"key_bias", 1, QKV_BIAS, KEYS, NO_INPUTS, 1, PLAIN},
    {"value_bias", 1, QKV_BIAS, KEYS, NO_INPUTS, 2, PLAIN},
    {"output_bias", 1, OUTPUT_BIAS, HIDDEN, NO_INPUTS, 0, PLAIN},
    {"gate_bias", 1, GATE_UP_BIAS, INNER, NO_INPUTS, 0, GATE_HALF},
    {"up_bias", 1, GATE_UP_BIAS, INNER, NO_INPUTS, 0, UP_HALF},
    {"down_bias", 1, DOWN_BIAS, HIDDEN, NO_INPUTS, 0, PLAIN},
    {"query_norm", 1, QUERY_NORM, CHANNELS, NO_INPUTS, 0, PLAIN},
    {"key_norm", 1, KEY_NORM, CHANNELS, NO_INPUTS, 0, PLAIN},
    {"post_attention_norm", 1, POST_ATTENTION_NORM, HIDDEN, NO_INPUTS, 0, PLAIN},
    {"post_mlp_norm", 1, POST_MLP_NORM, HIDDEN, NO_INPUTS, 0, PLAIN},
};

int find_matrix_format(Model *model, int layer, const char *name, const Format ***format)
{
    static const struct {
        const char *name;
        int index;
    } parts[] = {{"query", QUERY_FORMAT}, {"key", KEY_FORMAT},    {"value", VALUE_FORMAT}, {"output", OUTPUT_FORMAT},
                 {"gate", GATE_UP_FORMAT}, {"up", GATE_UP_FORMAT}, {"down", DOWN_FORMAT}};
    if (layer < 0) {
        *format = strcmp(name, "head") ? &model->embedding_format : &model->head_format;
        return !strcmp(name, "embedding") || (!strcmp(name, "head") && !model->shape.tied);
    }
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *format = &model->layers[layer].formats[parts[i].index];
        if (!strcmp(parts[i].name, name)) return 1;
    }
    return 0;
}

const char *tensor_name(int index) { return index < (int)(sizeof known / sizeof *known) ? known[index].name : NULL; }

int find_tensor(const Model *model, int layer, const char *name, Tensor *tensor)
{
    const Shape *s = &model->shape;
    int queries = s->heads * s->head_dim, keys = s->kv_heads * s->head_dim, index = 0;
    int sizes[SIZES] = {0, s->hidden, s->inner, queries, keys, s->head_dim, s->vocabulary};
    while (tensor_name(index) && strcmp(tensor_name(index), name)) index++;
    if (!tensor_name(index) || known[index].by_layer != (layer >= 0)) return 0;
    *tensor = (Tensor){
        .rows = sizes[known[index].rows],
        .inputs = sizes[known[index].inputs],
        .before = (known[index].before > 0) * queries + (known[index].before > 1) * keys,
        .half = known[index].half,
    };
    if (layer >= 0 && tensor->inputs) {
        const Matrix *matrix = &model->layers[layer].matrices[known[index].index];
        while (matrix->next && tensor->before >= matrix->end * PANEL) matrix = matrix->next;
        tensor->matrix = *matrix;
        tensor->before -= matrix->first * PANEL;
    } else if (layer >= 0) {
        tensor->vector = model->layers[layer].vectors[known[index].index];
    } else if (known[index].index == FINAL_NORM) {
        tensor->vector = model->final_norm;
    } else if (known[index].index == EMBEDDING) {
        tensor->matrix = model->embedding;
    } else if (!s->tied) {
        tensor->matrix = model->head;
    }
    return tensor->matrix.panels || tensor->vector;
}
