/* Attention of some rows of queries over the pages of their sequence, for one dtype. Included by kernels.h.
 *
 * Keys are processed in chunks of CHUNK positions, counted from position 0 on. Each chunk has its own softmax
 * (maximum, sum, weighted values), and the chunks are merged in order. So a row's result does not depend on
 * other rows, nor on whether several threads share its keys. A masked key weighs exactly 0. */

enum { NAME(together) = VW == 16 ? 8 : VW == 8 ? 4 : 2 }; /* rows with sums that fit in registers */

/* A row's running state: [0] the maximum, [1] the sum, [16 …] the weighted values so far. */
#undef STATE
#undef NOTHING
#define STATE(room) ((room) + 16)
#define NOTHING -1e30f /* the maximum of no scores: finite, so that it can be subtracted from itself */

/* Compute the scores of R rows against the `N` pages of keys at `pages`, and prefetch the next N pages of
 * keys and what is `ahead` bytes after these: their pages of values. */
ALWAYS void NAME(score)(const int R, const int N, const NAME(number) *q, int room, int channels,
                        const char *const *pages, long ahead, float *scores)
{
    vf sums[NAME(together)][2][PIECES];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int n = 0; n < N; n++)
#pragma GCC unroll 4
            for (int j = 0; j < PIECES; j++) sums[r][n][j] = (vf){0};
#if BF16
    for (int d = 0; d < channels; d += 2) {
#pragma GCC unroll 2
        for (int n = 0; n < N; n++) {
            const bf16 *line = (const bf16 *)pages[n] + d * BLOCK;
            __builtin_prefetch((const char *)line + ahead);
            __builtin_prefetch((const char *)pages[N + n] + d * BLOCK * 2);
#pragma GCC unroll 4
            for (int j = 0; j < PIECES; j++) {
                vu keys = load_pairs(line + j * 2 * VW);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) sums[r][n][j] = dot_pairs(sums[r][n][j], keys, load_pair(q + r * room + d));
            }
        }
    }
#else
    for (int d = 0; d < channels; d++) {
#pragma GCC unroll 2
        for (int n = 0; n < N; n++) {
            const float *line = (const float *)pages[n] + d * BLOCK;
            __builtin_prefetch((const char *)line + ahead);
            __builtin_prefetch((const char *)pages[N + n] + d * BLOCK * 4);
#pragma GCC unroll 4
            for (int j = 0; j < PIECES; j++) {
                vf keys = load(line + j * VW);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) sums[r][n][j] += q[r * room + d] * keys;
            }
        }
    }
#endif
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int n = 0; n < N; n++)
#pragma GCC unroll 4
            for (int j = 0; j < PIECES; j++) store(scores + r * CHUNK + n * BLOCK + j * VW, sums[r][n][j]);
}

/* Compute the weighted values of R rows, `W` vectors of channels from `channel` on. */
ALWAYS void NAME(weight_values)(const int R, const int W, const NAME(number) *weights, int room, int channel,
                                const char *const *pages, int count, long values, float *states)
{
    vf sums[NAME(together)][4];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int w = 0; w < W; w++) sums[r][w] = (vf){0};
    for (int n = 0; n < count; n++) {
        const NAME(number) *page = (const NAME(number) *)(pages[n] + values);
#if BF16
        page += channel * 2;
        for (int t = 0; t < BLOCK; t += 2) {
#pragma GCC unroll 4
            for (int w = 0; w < W; w++) {
                vu pairs = load_pairs(page + t * room + w * 2 * VW);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++)
                    sums[r][w] = dot_pairs(sums[r][w], pairs, load_pair(weights + r * CHUNK + n * BLOCK + t));
            }
        }
#else
        page += channel;
        for (int t = 0; t < BLOCK; t++) {
#pragma GCC unroll 4
            for (int w = 0; w < W; w++) {
                vf v = load(page + t * room + w * VW);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) sums[r][w] += weights[r * CHUNK + n * BLOCK + t] * v;
            }
        }
#endif
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int w = 0; w < W; w++) store(states + r * STATE(room) + 16 + channel + w * VW, sums[r][w]);
}

/* Turn a row's scores into softmax weights, and write the chunk's maximum and sum to `state`. `first`: the
 * position of the first score; the row attends to low ≤ position ≤ high. */
ALWAYS void NAME(softmax)(const Shape *shape, float *scores, NAME(number) *weights, int first, int count, int low,
                          int high, float *state)
{
    vf top = splat(-INFINITY), sum = {0}, scale = splat(shape->attention_scale * LOG2_E);
    float cap = shape->attention_cap;
    for (int i = 0; i < count; i += VW) {
        vf s = load(scores + i);
        s = cap > 0 ? capped(s * shape->attention_scale, cap) * LOG2_E : s * scale;
        if (first + i < low || first + i + VW > high + 1) s = visible(s, first + i, low, high + 1);
        store(scores + i, s);
        top = greater(top, s);
    }
    float highest_score = highest(top) > NOTHING ? highest(top) : NOTHING;
    for (int i = 0; i < count; i += VW) {
        vf weight = power_of_two(load(scores + i) - highest_score);
        sum += weight;
        NAME(put)(weights + i, weight);
    }
    state[0] = highest_score;
    state[1] = total(sum);
}

/* Merge `part`, of the keys that follow, into `state`. */
ALWAYS void NAME(merge_states)(float *state, const float *part, int room)
{
    float top = state[0] > part[0] ? state[0] : part[0];
    float keep = power_of_two(splat(state[0] - top))[0], take = power_of_two(splat(part[0] - top))[0];
    state[0] = top;
    state[1] = state[1] * keep + part[1] * take;
    for (int i = 16; i < STATE(room); i += VW) store(state + i, load(state + i) * keep + load(part + i) * take);
}

/* Write a row's values, divided by their sum, to their place in the output projection's input. */
ALWAYS void NAME(write_output)(const Model *model, const float *state, int kv_head, int row, int group_head, int rows)
{
    const Shape *shape = &model->shape;
    int D = shape->head_dim, depth = padded(shape->heads * D);
    int channel = (kv_head * (shape->heads / shape->kv_heads) + group_head) * D;
    vf share = splat(1.0f / state[1]);
    if (D % 16 == 0) {
        for (int i = 0; i < D; i += VW)
            NAME(put)(NAME(element_of)(model->attended, rows, depth, row, channel + i), load(state + 16 + i) * share);
        return;
    }
    for (int i = 0; i < D; i++) { /* a vector would overlap the next head, which another thread may write */
        float value = state[16 + i] * share[0];
#if BF16
        *NAME(element_of)(model->attended, rows, depth, row, channel + i) = to_bf16(value);
#else
        *NAME(element_of)(model->attended, rows, depth, row, channel + i) = value;
#endif
    }
}

#define CASE(R, N) \
    case R: NAME(score)(R, N, q, room, channels, pages, ahead, scores); break;
static void NAME(score_rows)(int rows, const NAME(number) *q, int room, int channels, const char *const *pages,
                             long ahead, float *scores)
{
    switch (rows) {
        CASE(1, 2)
        CASE(2, VW == 16 ? 2 : 1)
#if VW >= 8
        CASE(3, VW == 16 ? 2 : 1)
        CASE(4, VW == 16 ? 2 : 1)
#endif
#if VW == 16
        CASE(5, 1)
        CASE(6, 1)
        CASE(7, 1)
        CASE(8, 1)
#endif
    }
}
#undef CASE
enum { NAME(pages_together_1) = 2, NAME(pages_together_4) = VW == 16 ? 2 : 1 };

#define CASE(R, W) \
    case R: \
        for (int c = 0; c < room; c += W * VW) \
            NAME(weight_values)(R, W, weights, room, c, pages, count, values, states); \
        break;
static void NAME(weight_rows)(int rows, const NAME(number) *weights, int room, const char *const *pages, int count,
                              long values, float *states)
{
    switch (rows) {
        CASE(1, 2)
        CASE(2, 2)
#if VW >= 8
        CASE(3, 2)
        CASE(4, 2)
#endif
#if VW == 16
        CASE(5, 2)
        CASE(6, 2)
        CASE(7, 2)
        CASE(8, 2)
#endif
    }
}
#undef CASE

/* Attend to a chunk of keys with up to `together` rows, row r to low[r] … high[r]; write to `states`. */
static void NAME(attend_chunk)(const Model *model, const Layer *layer, const Task *task, int kv_head, int chunk,
                               const NAME(number) *q, int rows, const int *low, const int *high, char *scratch,
                               float *states)
{
    const Shape *shape = &model->shape;
    int room = padded(shape->head_dim), channels = shape->head_dim;
    int first_block = chunk * (CHUNK / BLOCK), last_block = first_block + CHUNK / BLOCK;
    /* The first row has the lowest position, the last row the highest. */
    if (first_block < low[0] / BLOCK) first_block = low[0] / BLOCK;
    if (last_block > high[rows - 1] / BLOCK + 1) last_block = high[rows - 1] / BLOCK + 1;
    int count = last_block - first_block;
    float *scores = (float *)scratch;
#if BF16
    bf16 *weights = (bf16 *)(scores + CHUNK * NAME(together));
#else
    float *weights = scores;
#endif
    const char *pages[CHUNK / BLOCK + 4];
    size_t block_bytes = (size_t)shape->kv_heads * 2 * model->page_bytes;
    for (int n = 0; n < count; n++)
        pages[n] = layer->pages + task->table[first_block + n] * block_bytes + (size_t)kv_head * 2 * model->page_bytes;
    if (count <= 0) {
        for (int r = 0; r < rows; r++) {
            float *state = states + r * STATE(room);
            memset(state, 0, STATE(room) * sizeof *state);
            state[0] = NOTHING;
        }
        return;
    }
    for (int n = count; n < CHUNK / BLOCK + 4; n++) pages[n] = pages[count - 1];
    int at_once = rows == 1 ? NAME(pages_together_1) : rows <= 4 ? NAME(pages_together_4) : 1;
    for (int n = 0; n < count; n += at_once)
        NAME(score_rows)(rows, q, room, channels, pages + n, (long)model->page_bytes, scores + n * BLOCK);
    for (int r = 0; r < rows; r++)
        NAME(softmax)(shape, scores + r * CHUNK, weights + r * CHUNK, first_block * BLOCK, count * BLOCK, low[r],
                      high[r], states + r * STATE(room));
    NAME(weight_rows)(rows, weights, room, pages, count, (long)model->page_bytes, states);
}

static void NAME(attend)(const Model *model, const Layer *layer, const Step *step, const Task *task, int kv_head,
                         int rows, char *scratch)
{
    const Shape *shape = &model->shape;
    int G = shape->heads / shape->kv_heads, room = padded(shape->head_dim), window = shape->windows[layer->group];
    float *states = (float *)scratch, *parts = states + STATE(room) * NAME(together);
    char *rest = (char *)(parts + STATE(room) * NAME(together));
    const NAME(number) *queries = (const NAME(number) *)model->queries + (long)kv_head * step->tokens * G * room;
    for (int done = 0, count; done < task->count; done += count) {
        count = task->count - done < NAME(together) ? task->count - done : NAME(together);
        int first = task->first + done, low[NAME(together)], high[NAME(together)];
        for (int r = 0; r < count; r++) {
            high[r] = task->start + (first + r - task->base) / G;
            low[r] = window && high[r] >= window ? high[r] - window + 1 : 0;
        }
        const NAME(number) *q = queries + (long)first * room;
        for (int chunk = task->chunk_first; chunk < task->chunk_last; chunk++) {
            if (task->partial >= 0) {
                long part = (long)(task->partial + chunk - task->chunk_first) * shape->kv_heads + kv_head;
                float *to = model->partials + (part * ROWS_AT_ONCE + done) * STATE(room);
                NAME(attend_chunk)(model, layer, task, kv_head, chunk, q, count, low, high, rest, to);
                continue;
            }
            float *to = chunk == task->chunk_first ? states : parts;
            NAME(attend_chunk)(model, layer, task, kv_head, chunk, q, count, low, high, rest, to);
            if (to == parts)
                for (int r = 0; r < count; r++)
                    NAME(merge_states)(states + r * STATE(room), parts + r * STATE(room), room);
        }
        if (task->partial >= 0) continue;
        for (int r = 0; r < count; r++)
            NAME(write_output)(model, states + r * STATE(room), kv_head,
                               task->output + (first + r) / G - task->first / G, (first + r) % G, rows);
    }
}

static void NAME(merge)(const Model *model, const Task *task, int kv_head, int rows, char *scratch)
{
    (void)scratch;
    const Shape *shape = &model->shape;
    int G = shape->heads / shape->kv_heads, room = padded(shape->head_dim);
    long pitch = (long)shape->kv_heads * ROWS_AT_ONCE * STATE(room);
    float *first = model->partials + ((long)task->partial * shape->kv_heads + kv_head) * ROWS_AT_ONCE * STATE(room);
    for (int r = 0; r < task->count; r++) {
        float *state = first + r * STATE(room);
        for (int chunk = 1; chunk < task->chunk_last - task->chunk_first; chunk++)
            NAME(merge_states)(state, state + chunk * pitch, room);
        NAME(write_output)(model, state, kv_head, task->output + (task->first + r) / G - task->first / G,
                           (task->first + r) % G, rows);
    }
}
