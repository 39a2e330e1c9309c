/* Operations on one row or token, for one dtype: embedding, norms, and copying queries, keys and values from
 * the fused product to the query buffer and the KV pages. Included by kernels.h after product.h. */

/* The packed panels are the only copy of the embedding: a row is one column of a panel. The row's padding is
 * zero, whatever the format makes of the inputs that do not exist. */
static void NAME(embed)(const Model *model, int token_id, float *row)
{
    int hidden = model->shape.hidden, depth = padded(hidden), column = token_id % PANEL;
    const Format *format = model->embedding.format;
    const char *packed = panel_at(&model->embedding, depth, token_id / PANEL);
    const float *scales = scales_at(&model->embedding, depth, token_id / PANEL);
    float scale = model->shape.embedding_scale;
    if (scales) scale *= scales[column];
    NAME(number) room[2 * TILE] __attribute__((aligned(64)));
    for (int k = 0; k < depth; k += 32) {
        const NAME(number) *block = (const NAME(number) *)(packed + k / 32 * format->block_bytes);
        if (format->unpack) {
            format->unpack(format, packed, depth, k / 32, room);
            block = room;
        }
        for (int i = 0; i < 32; i++)
            row[k + i] = NAME(as_float)(block[NAME(index_in_block)(i, column / 16, column % 16)]) * scale;
    }
    memset(row + hidden, 0, (size_t)(depth - hidden) * sizeof *row);
}

/* Return the factor that gives x a root mean square of 1. The padding is zero and does not count. */
ALWAYS float NAME(inverse_rms)(const float *x, int size, int room, float epsilon)
{
    vf squares = {0};
    for (int i = 0; i < room; i += VW) {
        vf v = load(x + i);
        squares += v * v;
    }
    return 1.0f / sqrtf(total(squares) / (float)size + epsilon);
}

static void NAME(normalize)(const float *row, const float *weight, float epsilon, int size, void *activations, int rows,
                            int index)
{
    int depth = padded(size);
    float inverse_rms = NAME(inverse_rms)(row, size, depth, epsilon);
    for (int k = 0; k < depth; k += VW)
        NAME(put)(NAME(element_of)(activations, rows, depth, index, k), load(row + k) * inverse_rms * load(weight + k));
}

static void NAME(add_normalized)(float *row, const float *branch, const float *weight, float epsilon, int size)
{
    int depth = padded(size);
    float inverse_rms = NAME(inverse_rms)(branch, size, depth, epsilon);
    for (int k = 0; k < depth; k += VW)
        store(row + k, load(row + k) + load(branch + k) * inverse_rms * load(weight + k));
}

/* Copy a head's D channels from the fused row, normalize them if `weight` is given, and rotate them. */
ALWAYS void NAME(prepare_head)(const Model *model, const float *from, const float *weight, const float *angles,
                               int rotated, float *head)
{
    int D = model->shape.head_dim, room = padded(D), half = rotated / 2;
    memcpy(head, from, (size_t)D * sizeof *head);
    memset(head + D, 0, (size_t)(room - D) * sizeof *head);
    if (weight) {
        float inverse_rms = NAME(inverse_rms)(head, D, room, model->shape.epsilon);
        for (int i = 0; i < room; i += VW) store(head + i, load(head + i) * inverse_rms * load(weight + i));
    }
    const float *cosine = angles, *sine = angles + half;
    for (int i = 0; i < half; i++) {
        float a = head[i], b = head[half + i];
        head[i] = a * cosine[i] - b * sine[i];
        head[half + i] = b * cosine[i] + a * sine[i];
    }
}

ALWAYS void NAME(store_key)(NAME(number) *page, int offset, int room, const float *head)
{
#if BF16
    bf16 half[HEAD_AT_MOST];
    for (int i = 0; i < room; i += VW) store_bf16(half + i, load(head + i));
    for (int i = 0; i < room; i += 2) memcpy(page + i * BLOCK + 2 * offset, half + i, 2 * sizeof *half);
#else
    for (int i = 0; i < room; i++) page[i * BLOCK + offset] = head[i];
#endif
}

/* Also zero the value page from `clear_from` on: the block's previous content may have infinities, which a
 * weight of 0 turns into NaN. In a step, only a sequence's last token does this, if its block is new. */
ALWAYS void NAME(store_value)(NAME(number) *page, int offset, int room, const float *head, int clear_from)
{
#if BF16
    bf16 half[HEAD_AT_MOST];
    for (int i = 0; i < room; i += VW) store_bf16(half + i, load(head + i));
    bf16 *to = page + offset / 2 * 2 * room + (offset & 1);
    for (int i = 0; i < room; i++) to[2 * i] = half[i];
    for (int token = clear_from; token < BLOCK; token++)
        for (int i = 0; i < room; i++) page[token / 2 * 2 * room + 2 * i + (token & 1)] = 0;
#else
    memcpy(page + offset * room, head, (size_t)room * sizeof *head);
    if (clear_from < BLOCK) memset(page + clear_from * room, 0, (size_t)(BLOCK - clear_from) * room * sizeof *page);
#endif
}

/* A key is spread over all cache lines of its page: prefetch them while queries are prepared. */
ALWAYS void NAME(prefetch_keys)(const Model *model, const char *block)
{
    for (int k = 0; k < model->shape.kv_heads; k++, block += 2 * model->page_bytes)
        for (size_t line = 0; line < model->page_bytes; line += 64) __builtin_prefetch(block + line, 1);
}

static void NAME(split_heads)(const Model *model, const Layer *layer, const Step *step, int token)
{
    const Shape *shape = &model->shape;
    int H = shape->heads, K = shape->kv_heads, G = H / K, D = shape->head_dim, room = padded(D);
    const float *row = model->qkv + (long)token * padded((H + 2 * K) * D);
    int rotated = shape->rotated[layer->rope];
    const float *angles = model->angles[layer->rope] + (long)token * rotated;
    float head[HEAD_AT_MOST] __attribute__((aligned(64)));
    int slot = step->slot_mapping[layer->group][token], offset = slot % BLOCK;
    char *block = layer->pages + (size_t)(slot / BLOCK) * K * 2 * model->page_bytes;
    NAME(prefetch_keys)(model, block);
    for (int h = 0; h < H; h++) {
        NAME(prepare_head)(model, row + h * D, layer->vectors[QUERY_NORM], angles, rotated, head);
        long query_row = (long)(h / G) * step->tokens * G + (long)token * G + h % G;
        NAME(number) *to = (NAME(number) *)model->queries + query_row * room;
        for (int i = 0; i < room; i += VW) NAME(put)(to + i, load(head + i));
    }
    int clear_from = model->clear_from[layer->group * shape->tokens_at_most + token];
    for (int k = 0; k < K; k++, block += 2 * model->page_bytes) {
        NAME(prepare_head)(model, row + (H + k) * D, layer->vectors[KEY_NORM], angles, rotated, head);
        NAME(store_key)((NAME(number) *)block, offset, room, head);
        memcpy(head, row + (H + K + k) * D, (size_t)D * sizeof *head);
        memset(head + D, 0, (size_t)(room - D) * sizeof *head);
        NAME(store_value)((NAME(number) *)(block + model->page_bytes), offset, room, head, clear_from);
    }
}
