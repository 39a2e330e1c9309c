/* Memory layout of a model: its packed weights, its KV pages, and the buffers between its layers. */
#include "cpustep.h"

#include <stdlib.h>
#include <string.h>

static size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* A bump allocator: without memory it only counts bytes, with memory it allocates them. */
typedef struct {
    char *memory;
    size_t used;
} Arena;

static void *take(Arena *arena, size_t bytes)
{
    void *place = arena->memory ? arena->memory + arena->used : NULL;
    arena->used += aligned(bytes);
    return place;
}

/* Take memory for `outputs` outputs from panel `first` on. */
static Matrix take_matrix(Arena *arena, const Format *format, int outputs, int inputs, int first)
{
    int panels = padded(outputs) / PANEL;
    return (Matrix){format, take(arena, panels * panel_bytes(format, padded(inputs))), first, first + panels, NULL};
}

/* One matrix, or three that follow one another. Then each of them ends with a panel. */
static void take_qkv(Layer *layer, const Shape *s, Arena *arena)
{
    const Format *const *formats = layer->formats;
    int queries = s->heads * s->head_dim, keys = s->kv_heads * s->head_dim, hidden = s->hidden;
    Matrix *all = &layer->matrices[QKV], *more = layer->more;
    if (formats[QUERY_FORMAT] == formats[KEY_FORMAT] && formats[QUERY_FORMAT] == formats[VALUE_FORMAT]) {
        *all = take_matrix(arena, formats[QUERY_FORMAT], queries + 2 * keys, hidden, 0);
        return;
    }
    *all = take_matrix(arena, formats[QUERY_FORMAT], queries, hidden, 0);
    more[0] = take_matrix(arena, formats[KEY_FORMAT], keys, hidden, all->end);
    more[1] = take_matrix(arena, formats[VALUE_FORMAT], keys, hidden, more[0].end);
    all->next = &more[0];
    more[0].next = &more[1];
}

static void assign_weights(Model *model, Arena *arena)
{
    const Shape *s = &model->shape;
    int qkv = (s->heads + 2 * s->kv_heads) * s->head_dim, attended = s->heads * s->head_dim;
    int gate_up = 2 * padded(s->inner); /* padded, so that the product writes the padding of its result too */
    model->embedding = take_matrix(arena, model->embedding_format, s->vocabulary, s->hidden, 0);
    model->head = model->embedding;
    if (!s->tied) model->head = take_matrix(arena, model->head_format, s->vocabulary, s->hidden, 0);
    model->final_norm = take(arena, (size_t)padded(s->hidden) * sizeof(float));
    for (int l = 0; l < s->layers; l++) {
        Layer *layer = &model->layers[l];
        take_qkv(layer, s, arena);
        layer->matrices[OUTPUT] = take_matrix(arena, layer->formats[OUTPUT_FORMAT], s->hidden, attended, 0);
        layer->matrices[GATE_UP] = take_matrix(arena, layer->formats[GATE_UP_FORMAT], gate_up, s->hidden, 0);
        layer->matrices[DOWN] = take_matrix(arena, layer->formats[DOWN_FORMAT], s->hidden, s->inner, 0);
        int sizes[VECTORS] = {
            [ATTENTION_NORM] = s->hidden,
            [MLP_NORM] = s->hidden,
            [QUERY_NORM] = s->query_key_norm ? s->head_dim : 0,
            [KEY_NORM] = s->query_key_norm ? s->head_dim : 0,
            [POST_ATTENTION_NORM] = s->post_norms ? s->hidden : 0,
            [POST_MLP_NORM] = s->post_norms ? s->hidden : 0,
            [QKV_BIAS] = s->qkv_bias ? qkv : 0,
            [OUTPUT_BIAS] = s->output_bias ? s->hidden : 0,
            [GATE_UP_BIAS] = s->mlp_bias ? gate_up : 0,
            [DOWN_BIAS] = s->mlp_bias ? s->hidden : 0,
        };
        for (int v = 0; v < VECTORS; v++)
            if (sizes[v]) layer->vectors[v] = take(arena, (size_t)padded(sizes[v]) * sizeof(float));
    }
}

static void assign_work(Model *model, Arena *arena)
{
    const Shape *s = &model->shape;
    size_t hidden = padded(s->hidden), attended = padded(s->heads * s->head_dim), inner = padded(s->inner);
    size_t qkv = padded((s->heads + 2 * s->kv_heads) * s->head_dim);
    size_t rows = (size_t)(s->tokens_at_most + 15) / 16 * 16; /* activations are in whole tiles */
    model->stream = take(arena, rows * hidden * sizeof(float));
    model->sampled = take(arena, rows * hidden * sizeof(float));
    model->branch = take(arena, rows * hidden * sizeof(float));
    model->qkv = take(arena, rows * qkv * sizeof(float));
    for (int r = 0; r < s->ropes; r++) model->angles[r] = take(arena, rows * s->rotated[r] * sizeof(float));
    model->normal = take(arena, rows * hidden * model->element);
    model->attended = take(arena, rows * attended * model->element);
    model->gated = take(arena, rows * inner * model->element);
    size_t deepest = inner > attended ? inner : attended;
    model->input_sums = take(arena, rows * (deepest > hidden ? deepest : hidden) / 16 * sizeof(float));
    /* Tiles of queries are read whole, and the last one may have fewer rows. */
    size_t queries = rows * s->heads * padded(s->head_dim) + (size_t)ROWS_AT_ONCE * padded(s->head_dim);
    model->queries = take(arena, queries * model->element);
    model->clear_from = take(arena, (size_t)s->groups * s->tokens_at_most * sizeof(int));
    model->scratch = take(arena, (size_t)s->threads * SCRATCH_BYTES);
}

/* Call `assign` twice: first to count the bytes, then to assign memory of that size. */
static int lay_out(Model *model, void (*assign)(Model *, Arena *), char **memory, size_t *bytes)
{
    Arena arena = {0};
    assign(model, &arena);
    *bytes = arena.used;
    arena = (Arena){.memory = *memory = map_memory(*bytes)};
    if (!arena.memory) return -1;
    assign(model, &arena);
    return 0;
}

int lay_out_weights(Model *model)
{
    return lay_out(model, assign_weights, &model->weights_memory, &model->weights_bytes);
}

int lay_out_work(Model *model) { return lay_out(model, assign_work, &model->work_memory, &model->work_bytes); }

int lay_out_cache(Model *model, const int *blocks)
{
    const Shape *s = &model->shape;
    size_t bytes = 0, block_bytes = (size_t)s->kv_heads * 2 * model->page_bytes;
    for (int l = 0; l < s->layers; l++) bytes += blocks[model->layers[l].group] * block_bytes;
    char *memory = map_memory(bytes);
    if (!memory) return -1;
    unmap_memory(model->cache_memory, model->cache_bytes);
    model->cache_memory = memory;
    model->cache_bytes = bytes;
    for (int l = 0; l < s->layers; l++) {
        model->layers[l].pages = memory;
        memory += blocks[model->layers[l].group] * block_bytes;
    }
    memcpy(model->blocks, blocks, s->groups * sizeof *blocks);
    return 0;
}

/* Return the memory of `count` blocks of a group, from block `first` on, to the system. */
void release_blocks(Model *model, int group, int first, int count)
{
    size_t block_bytes = (size_t)model->shape.kv_heads * 2 * model->page_bytes;
    for (int l = 0; l < model->shape.layers; l++)
        if (model->layers[l].group == group)
            release_memory(model->layers[l].pages + first * block_bytes, count * block_bytes);
}

void free_model(Model *model)
{
    unmap_memory(model->weights_memory, model->weights_bytes);
    unmap_memory(model->cache_memory, model->cache_bytes);
    unmap_memory(model->work_memory, model->work_bytes);
    for (int r = 0; r < ROPES_AT_MOST; r++) free(model->frequencies[r]);
    free(model->partials);
    free(model->tasks_memory);
    free(model->layers);
    memset(model, 0, sizeof *model);
}
