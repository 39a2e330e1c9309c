/* Runs a step: all layers in one parallel region, with barriers between the parts of a layer. */
#define _GNU_SOURCE
#include "cpustep.h"
#include "team.h"

#include <math.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif

/* The context of a thread: the model, the step and the thread's number. */
typedef struct {
    Model *model;
    const Step *step;
    Team *team;
    int thread, threads;
    char *scratch;
} Worker;

/* Each thread has a fixed share of the rows, which all cost the same. */
#define FOR_SHARE(worker, index, count) \
    for (int index = (int)((long)(count) * (worker)->thread / (worker)->threads), \
             end_of_##index = (int)((long)(count) * ((worker)->thread + 1) / (worker)->threads); \
         index < end_of_##index; index++)

/* Return how many panels a thread takes at a time. Small pieces balance threads that are delayed; large ones
 * read the input less often if it has many rows. */
static int choose_grain(int panels, int threads, int rows)
{
    if (threads == 1) return panels;
    if (rows <= 64) return panels / (threads * 6) + 1;
    int best = 0, most = 0;
    for (int pieces = 3; pieces >= 2; pieces--) { /* of each thread; the busiest thread determines the time */
        int grain = (panels + threads * pieces - 1) / (threads * pieces);
        if (best && grain * pieces >= most) continue;
        best = grain;
        most = grain * pieces;
    }
    return best;
}

/* Multiply the panels of each part of the matrix by the kernel of its format. */
static void multiply_panels(const Worker *worker, const Product *product, int first, int last)
{
    for (const Matrix *part = &product->weight; part; part = part->next) {
        int from = first > part->first ? first : part->first, to = last < part->end ? last : part->end;
        Product piece = *product;
        piece.weight = *part;
        if (from < to) worker->model->kernels->multiply(&piece, from, to, worker->scratch);
    }
}

/* Return whether a format of the matrix has offsets, which are multiplied by sums of the input. */
static int needs_input_sums(const Kernels *kernels, const Product *product)
{
    int needs = 0;
    for (const Matrix *part = &product->weight; part; part = part->next) needs |= part->format->offsets;
    return needs && kernels->sum_inputs;
}

static void multiply(const Worker *worker, const Product *product)
{
    if (needs_input_sums(worker->model->kernels, product)) {
        FOR_SHARE(worker, r, product->rows)
        worker->model->kernels->sum_inputs(product, r, worker->model->input_sums + (long)r * (product->depth / 16));
        wait_for_all(worker->team, worker->thread);
    }
    if (product->rows) {
        int grain = choose_grain(product->panels, worker->threads, product->rows);
        for (int panel; (panel = take_work(worker->team, grain)) < product->panels;) {
            int end = panel + grain < product->panels ? panel + grain : product->panels;
            multiply_panels(worker, product, panel, end);
        }
    }
    wait_for_all(worker->team, worker->thread);
}

static void compute_angles(const Worker *worker, int token)
{
    const Model *model = worker->model;
    for (int r = 0; r < model->shape.ropes; r++) {
        int half = model->shape.rotated[r] / 2;
        float *cosine = model->angles[r] + (long)token * 2 * half, *sine = cosine + half;
        float position = (float)worker->step->positions[token], scale = model->shape.rope_scale[r];
        for (int i = 0; i < half; i++) {
            float angle = position * model->frequencies[r][i];
            cosine[i] = cosf(angle) * scale;
            sine[i] = sinf(angle) * scale;
        }
    }
}

static void embed_tokens(const Worker *worker)
{
    const Model *model = worker->model;
    const Shape *shape = &model->shape;
    long pitch = padded(shape->hidden);
    FOR_SHARE(worker, t, worker->step->tokens)
    {
        float *row = model->stream + t * pitch;
        model->kernels->embed(model, worker->step->input_ids[t], row);
        compute_angles(worker, t);
        model->kernels->normalize(row, model->layers[0].vectors[ATTENTION_NORM], shape->epsilon, shape->hidden,
                                  model->normal, worker->step->tokens, t);
    }
    wait_for_all(worker->team, worker->thread);
}

/* With `post`, add the normalized result of attention or MLP. Then normalize the stream for the next part. */
static void normalize_rows(const Worker *worker, float *stream, int rows, const float *post, const float *weight)
{
    const Model *model = worker->model;
    const Shape *shape = &model->shape;
    long pitch = padded(shape->hidden);
    FOR_SHARE(worker, r, rows)
    {
        float *row = stream + r * pitch;
        if (post) model->kernels->add_normalized(row, model->branch + r * pitch, post, shape->epsilon, shape->hidden);
        model->kernels->normalize(row, weight, shape->epsilon, shape->hidden, model->normal, rows, r);
    }
    wait_for_all(worker->team, worker->thread);
}

static void attend(const Worker *worker, const Layer *layer, const Task *tasks, int count, const Task *merges,
                   int merge_count, int rows)
{
    Model *model = worker->model;
    const Kernels *kernels = model->kernels;
    int K = model->shape.kv_heads;
    for (int work; (work = take_work(worker->team, 1)) < count * K;) {
        const Task *task = &tasks[work / K];
        if (task->tiled)
            kernels->attend_tiled(model, layer, worker->step, task, work % K, rows, worker->scratch);
        else
            kernels->attend(model, layer, worker->step, task, work % K, rows, worker->scratch);
    }
    wait_for_all(worker->team, worker->thread);
    if (!merge_count) return;
    for (int work; (work = take_work(worker->team, 1)) < merge_count * K;)
        kernels->merge(model, &merges[work / K], work % K, rows, worker->scratch);
    wait_for_all(worker->team, worker->thread);
}

/* Return the product of `rows` rows of `input` with a matrix of a layer. The caller sets where the result goes. */
static Product product_of(const Model *model, const Layer *layer, int matrix, const void *input, int rows, int depth,
                          int outputs)
{
    return (Product){
        .input = input,
        .input_sums = model->input_sums,
        .weight = layer->matrices[matrix],
        .bias = layer->vectors[QKV_BIAS + matrix],
        .rows = rows,
        .depth = depth,
        .panels = outputs / PANEL,
        .stride = outputs,
    };
}

/* Run a layer after its attention, for `rows` rows of `stream`: output projection, MLP and the next norm. */
static void finish_layer(const Worker *worker, const Layer *layer, float *stream, int rows, const float *next_norm)
{
    const Model *model = worker->model;
    const Shape *shape = &model->shape;
    int post = shape->post_norms, hidden = padded(shape->hidden), inner = padded(shape->inner);
    int attended = padded(shape->heads * shape->head_dim);
    Product output = product_of(model, layer, OUTPUT, model->attended, rows, attended, hidden);
    Product gate_up = product_of(model, layer, GATE_UP, model->normal, rows, hidden, 2 * inner);
    Product down = product_of(model, layer, DOWN, model->gated, rows, inner, hidden);
    output.kind = down.kind = post ? STORE : ADD;
    output.output = down.output = post ? model->branch : stream;
    gate_up.kind = GATE;
    gate_up.gated = model->gated;
    gate_up.gated_depth = inner;
    gate_up.gelu = shape->gelu;
    multiply(worker, &output);
    normalize_rows(worker, stream, rows, layer->vectors[POST_ATTENTION_NORM], layer->vectors[MLP_NORM]);
    multiply(worker, &gate_up);
    multiply(worker, &down);
    normalize_rows(worker, stream, rows, layer->vectors[POST_MLP_NORM], next_norm);
}

/* Heads write only their own channels of attention's result. The padding is multiplied by weights of 0, but
 * it may be infinite: with another number of rows, this memory held other numbers. */
static void clear_padding(const Model *model, int rows)
{
    int attended = model->shape.heads * model->shape.head_dim, depth = padded(attended);
    if (attended != depth) memset(model->attended, 0, (size_t)((rows + 15) / 16 * 16) * depth * model->element);
}

static void run_layer(const Worker *worker, int index)
{
    const Model *model = worker->model;
    const Shape *shape = &model->shape;
    const Step *step = worker->step;
    const Layer *layer = &model->layers[index];
    const Plan *plan = &model->plans[layer->group];
    int last = index == shape->layers - 1, hidden = padded(shape->hidden);
    int qkv = padded((shape->heads + 2 * shape->kv_heads) * shape->head_dim);
    Product product = product_of(model, layer, QKV, model->normal, step->tokens, hidden, qkv);
    product.kind = STORE;
    product.output = model->qkv;
    multiply(worker, &product);
    FOR_SHARE(worker, t, step->tokens) model->kernels->split_heads(model, layer, step, t);
    if (worker->thread == 0 && (index == 0 || last)) clear_padding(model, last ? step->samples : step->tokens);
    if (!last) {
        wait_for_all(worker->team, worker->thread);
        attend(worker, layer, plan->tasks, plan->task_count, plan->merges, plan->merge_count, step->tokens);
        finish_layer(worker, layer, model->stream, step->tokens, model->layers[index + 1].vectors[ATTENTION_NORM]);
        return;
    }
    /* After the last keys and values, only the tokens that are sampled after are needed. */
    FOR_SHARE(worker, s, step->samples)
    {
        const float *stream = model->stream + (long)step->sample_tokens[s] * hidden;
        memcpy(model->sampled + (long)s * hidden, stream, hidden * sizeof(float));
    }
    wait_for_all(worker->team, worker->thread);
    if (!step->samples) return;
    attend(worker, layer, plan->last_tasks, plan->last_task_count, plan->last_merges, plan->last_merge_count,
           step->samples);
    finish_layer(worker, layer, model->sampled, step->samples, model->final_norm);
}

static void run_worker(const Worker *worker)
{
    const Model *model = worker->model;
    const Shape *shape = &model->shape;
    embed_tokens(worker);
    for (int l = 0; l < shape->layers; l++) run_layer(worker, l);
    Product logits = {
        .input = model->normal,
        .input_sums = model->input_sums,
        .weight = model->head,
        .rows = worker->step->samples,
        .depth = padded(shape->hidden),
        .panels = padded(shape->vocabulary) / PANEL,
        .kind = LOGITS,
        .output = worker->step->logits,
        .stride = worker->step->logits_stride,
        .columns = shape->vocabulary,
        .cap = shape->logit_cap,
    };
    multiply(worker, &logits);
    if (model->kernels->reset_thread) model->kernels->reset_thread();
}

void run_step(Model *model, const Step *step)
{
    Team team = {.threads = 0};
    for (int t = 0; t < model->shape.threads; t++) atomic_init(&team.processors[t], -1);
#ifdef _OPENMP
#pragma omp parallel num_threads(model->shape.threads)
    {
        /* There may be fewer threads than requested. */
#pragma omp single
        team.threads = omp_get_num_threads();
        int thread = omp_get_thread_num();
        char *scratch = model->scratch + (size_t)thread * SCRATCH_BYTES;
        Worker worker = {model, step, &team, thread, team.threads, scratch};
        run_worker(&worker);
    }
#else
    team.threads = 1;
    Worker worker = {model, step, &team, 0, 1, model->scratch};
    run_worker(&worker);
#endif
}
