/* Attention of up to 32 rows of queries in AMX tiles. Pages of keys and of values, of 16 tokens each, are
 * stored as right operands. The softmax is computed online, KEYS keys at a time. */

enum { KEYS = 128 };

/* Tiles 0…3: sums; 4 and 6: queries and keys, of 32 channels; 5 and 7: weights and values, of 16 tokens. */
static void shape_attention_tiles(void)
{
    TileShapes shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shapes.row_bytes[tile] = tile == 5 ? 32 : 64;
        shapes.rows[tile] = tile == 7 ? 8 : 16;
    }
    _tile_loadconfig(&shapes);
}

typedef struct {
    float scores[ROWS_AT_ONCE][KEYS];
    float values[ROWS_AT_ONCE][HEAD_AT_MOST]; /* weighted sums so far; rows are `room` apart */
    bf16 weights[ROWS_AT_ONCE][KEYS];
    float top[ROWS_AT_ONCE], sum[ROWS_AT_ONCE], keep[ROWS_AT_ONCE];
} __attribute__((aligned(64))) Front;

_Static_assert(sizeof(Front) <= SCRATCH_BYTES, "a thread's scratch is too small");

/* Compute the scores of 32 rows against one page. */
ALWAYS void score_page(const bf16 *q, int room, const bf16 *page, float *scores)
{
    _tile_zero(0);
    _tile_zero(1);
    for (int d = 0; d < room; d += 32) {
        _tile_loadd(6, page + d * BLOCK, 64);
        _tile_loadd(4, q + d, room * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(4, q + 16 * room + d, room * 2);
        _tile_dpbf16ps(1, 4, 6);
    }
    _tile_stored(0, scores, KEYS * 4);
    _tile_stored(1, scores + 16 * KEYS, KEYS * 4);
}

/* Add the weighted values of 32 rows, for 32 channels from `channel` on. */
ALWAYS void weight_pages(Front *front, int room, int channel, const char *const *pages, int count, long values)
{
    float *sums = front->values[0] + channel;
    _tile_loadd(0, sums, room * 4);
    _tile_loadd(1, sums + 16, room * 4);
    _tile_loadd(2, sums + 16 * room, room * 4);
    _tile_loadd(3, sums + 16 * room + 16, room * 4);
    for (int n = 0; n < count; n++) {
        const bf16 *page = (const bf16 *)(pages[n] + values) + channel * 2;
        const bf16 *weights = front->weights[0] + n * BLOCK;
        _tile_loadd(5, weights, KEYS * 2);
        _tile_loadd(7, page, room * 4);
        _tile_dpbf16ps(0, 5, 7);
        _tile_loadd(7, page + 32, room * 4);
        _tile_dpbf16ps(1, 5, 7);
        _tile_loadd(5, weights + 16 * KEYS, KEYS * 2);
        _tile_dpbf16ps(3, 5, 7);
        _tile_loadd(7, page, room * 4);
        _tile_dpbf16ps(2, 5, 7);
    }
    _tile_stored(0, sums, room * 4);
    _tile_stored(1, sums + 16, room * 4);
    _tile_stored(2, sums + 16 * room, room * 4);
    _tile_stored(3, sums + 16 * room + 16, room * 4);
}

/* Turn scores of `count` keys from position `first` on into weights. Row r attends to low[r] … high[r]. */
static void softmax_front(const Shape *shape, Front *front, int rows, int first, int count, const int *low,
                          const int *high)
{
    float cap = shape->attention_cap, factor = shape->attention_scale * LOG2_E;
    int hidden = first < low[rows - 1] || first + count - 1 > high[0], moved = 0;
    for (int r = 0; r < rows; r++) {
        float *scores = front->scores[r];
        vf top = splat(-INFINITY);
        if (cap > 0 || hidden) {
            for (int i = 0; i < count; i += VW) {
                vf s = load(scores + i);
                s = cap > 0 ? capped(s * shape->attention_scale, cap) * LOG2_E : s * factor;
                s = visible(s, first + i, low[r], high[r] + 1);
                store(scores + i, s);
                top = greater(top, s);
            }
        } else {
            for (int i = 0; i < count; i += VW) top = greater(top, load(scores + i));
            top *= factor;
        }
        float now = highest(top) > front->top[r] ? highest(top) : front->top[r];
        moved |= now > front->top[r];
        front->keep[r] = front->top[r] - now;
        front->top[r] = now;
    }
    if (moved)
        for (int r = 0; r < ROWS_AT_ONCE; r += VW) store(front->keep + r, power_of_two(load(front->keep + r)));
    __m512 scale = _mm512_set1_ps(cap > 0 || hidden ? 1.0f : factor);
    int room = padded(shape->head_dim);
    for (int r = 0; r < rows; r++) {
        const float *scores = front->scores[r];
        __m512 top = _mm512_set1_ps(front->top[r]), sum = _mm512_setzero_ps();
        for (int i = 0; i < count; i += 32) {
            __m512 a = (__m512)rough_power_of_two((vf)_mm512_fmsub_ps(_mm512_load_ps(scores + i), scale, top));
            __m512 b = (__m512)rough_power_of_two((vf)_mm512_fmsub_ps(_mm512_load_ps(scores + i + 16), scale, top));
            if (i + 16 >= count) b = _mm512_setzero_ps();
            sum = _mm512_add_ps(sum, _mm512_add_ps(a, b));
            _mm512_store_si512(front->weights[r] + i, (__m512i)_mm512_cvtne2ps_pbh(b, a));
        }
        float keep = moved ? front->keep[r] : 1.0f;
        front->sum[r] = front->sum[r] * keep + _mm512_reduce_add_ps(sum);
        if (keep != 1.0f)
            for (int i = 0; i < room; i += VW) {
                float *value = front->values[0] + r * room + i;
                store(value, load(value) * keep);
            }
    }
}

static void attend_tiles(const Model *model, const Layer *layer, const Step *step, const Task *task, int kv_head,
                         int rows, char *scratch)
{
    const Shape *shape = &model->shape;
    Front *front = (Front *)scratch;
    int G = shape->heads / shape->kv_heads, room = padded(shape->head_dim), window = shape->windows[layer->group];
    const bf16 *q = (const bf16 *)model->queries + ((long)kv_head * step->tokens * G + task->first) * room;
    size_t block_bytes = (size_t)shape->kv_heads * 2 * model->page_bytes;
    int low[ROWS_AT_ONCE], high[ROWS_AT_ONCE];
    for (int r = 0; r < task->count; r++) {
        high[r] = task->start + (task->first + r - task->base) / G;
        low[r] = window && high[r] >= window ? high[r] - window + 1 : 0;
    }
    for (int r = 0; r < ROWS_AT_ONCE; r++) {
        front->top[r] = NOTHING;
        front->sum[r] = front->keep[r] = 0;
    }
    memset(front->values, 0, (size_t)ROWS_AT_ONCE * room * sizeof(float));
    shape_attention_tiles();
    int last_block = high[task->count - 1] / BLOCK;
    for (int block = low[0] / BLOCK; block <= last_block; block += KEYS / BLOCK) {
        int count = last_block - block + 1 < KEYS / BLOCK ? last_block - block + 1 : KEYS / BLOCK;
        const char *pages[KEYS / BLOCK];
        for (int n = 0; n < count; n++) {
            pages[n] = layer->pages + task->table[block + n] * block_bytes + (size_t)kv_head * 2 * model->page_bytes;
            score_page(q, room, (const bf16 *)pages[n], front->scores[0] + n * BLOCK);
        }
        softmax_front(shape, front, task->count, block * BLOCK, count * BLOCK, low, high);
        for (int channel = 0; channel < room; channel += 32)
            weight_pages(front, room, channel, pages, count, (long)model->page_bytes);
    }
    for (int r = 0; r < task->count; r++) {
        float state[16 + HEAD_AT_MOST] __attribute__((aligned(64)));
        state[1] = front->sum[r];
        memcpy(state + 16, front->values[0] + r * room, room * sizeof(float));
        NAME(write_output)(model, state, kv_head, task->output + (task->first + r) / G - task->first / G,
                           (task->first + r) % G, rows);
    }
}
