/* Divides a step into attention tasks. Layers of one KV cache group share a window and so the tasks.
 *
 * A task is some rows of queries of one sequence for one KV head. With few tasks and long contexts the keys
 * are divided too and the partial results merged afterwards, which changes no result (see attention.h). */
#include "cpustep.h"

#include <stdlib.h>
#include <string.h>

enum {
    TILED_FROM = 16 /* rows of queries from which tiles are faster */
};

typedef struct {
    const Model *model;
    const Step *step;
    int group, heads_of_group;
    int split;   /* whether the keys of long contexts are divided */
    int partial; /* the next free index in `partials` */
} Planner;

static Task make_task(Planner *planner, int row, int first, int count, int output)
{
    const Step *step = planner->step;
    int G = planner->heads_of_group, window = planner->model->shape.windows[planner->group];
    int tokens = step->query_starts[row + 1] - step->query_starts[row];
    Task task = {
        .first = first,
        .count = count,
        .base = step->query_starts[row] * G,
        .start = step->sequence_lengths[row] - tokens,
        .output = output,
        .partial = -1,
        .table = step->tables[planner->group] + (long)step->slots[row] * step->table_width[planner->group],
    };
    int low = task.start + (first - task.base) / G, high = task.start + (first + count - 1 - task.base) / G;
    low = window && low >= window ? low - window + 1 : 0;
    task.chunk_first = low / CHUNK;
    task.chunk_last = high / CHUNK + 1;
    return task;
}

/* Add the tasks of `count` rows of queries from `first` on. Tiles round otherwise than vectors do, so they are only for
 * prompts: `tiled` is whether tiles may be used. */
static void add_tasks(Planner *planner, int row, int first, int count, int output, int tiled, Task *tasks,
                      int *task_count, Task *merges, int *merge_count)
{
    int G = planner->heads_of_group;
    tiled = tiled && planner->model->kernels->tiles && count >= TILED_FROM && count > G;
    for (int done = 0, size; done < count; done += size) {
        size = count - done < ROWS_AT_ONCE ? count - done : ROWS_AT_ONCE;
        int output_row = output + (first + done) / G - first / G;
        Task task = make_task(planner, row, first + done, size, output_row);
        task.tiled = tiled;
        int chunks = task.chunk_last - task.chunk_first;
        if (!planner->split || tiled || chunks < 2) {
            tasks[(*task_count)++] = task;
            continue;
        }
        task.partial = planner->partial;
        merges[(*merge_count)++] = task;
        for (int chunk = task.chunk_first; chunk < merges[*merge_count - 1].chunk_last; chunk++) {
            task.partial = planner->partial++;
            task.chunk_first = chunk;
            task.chunk_last = chunk + 1;
            tasks[(*task_count)++] = task;
        }
    }
}

/* Return the maximum number of tasks in each of a group's four lists. */
static size_t bound_tasks(const Step *step, int G, int split)
{
    size_t bound = 0, of_token = G / ROWS_AT_ONCE + 1;
    for (int row = 0; row < step->rows; row++) {
        size_t tokens = (size_t)(step->query_starts[row + 1] - step->query_starts[row]);
        size_t pieces = tokens * G / ROWS_AT_ONCE + 2, samples = (size_t)step->samples;
        if (samples > tokens) samples = tokens;
        bound += (pieces + samples * of_token) * (split ? (size_t)(step->sequence_lengths[row] / CHUNK + 2) : 1);
    }
    return bound;
}

/* Add the tasks of all rows of the step; with `last`, of the tokens to sample. What a row computes after its first
 * sample is computed as if each token were a step of its own. */
static int add_rows(Planner *planner, int last, Task *tasks, Task *merges, int *merge_count)
{
    const Step *step = planner->step;
    int G = planner->heads_of_group, count = 0;
    planner->partial = 0;
    *merge_count = 0;
    if (last) {
        for (int s = 0, row = 0; s < step->samples; s++) {
            int token = step->sample_tokens[s];
            while (step->query_starts[row + 1] <= token) row++;
            add_tasks(planner, row, token * G, G, s, 0, tasks, &count, merges, merge_count);
        }
        return count;
    }
    int sample = step->samples;
    for (int row = step->rows - 1; row >= 0; row--) { /* prefills are last in a step and take longest */
        int first = step->query_starts[row], end = step->query_starts[row + 1], then = end;
        while (sample > 0 && step->sample_tokens[sample - 1] >= first) then = step->sample_tokens[--sample] + 1;
        add_tasks(planner, row, first * G, (then - first) * G, first, 1, tasks, &count, merges, merge_count);
        add_tasks(planner, row, then * G, (end - then) * G, then, 0, tasks, &count, merges, merge_count);
    }
    return count;
}

int plan_step(Model *model, const Step *step)
{
    const Shape *shape = &model->shape;
    int G = shape->heads / shape->kv_heads;
    /* With few sequences, threads would wait for the longest one. */
    int split = shape->threads > 1 && (long)step->rows * shape->kv_heads < 8L * shape->threads;
    size_t bound = bound_tasks(step, G, split), room = bound * 4 * shape->groups;
    if (room > model->tasks_room) {
        Task *memory = realloc(model->tasks_memory, room * sizeof *memory);
        if (!memory) return -1;
        model->tasks_memory = memory;
        model->tasks_room = room;
    }
    int partials = 0;
    for (int g = 0; g < shape->groups; g++) {
        Plan *plan = &model->plans[g];
        Task *memory = model->tasks_memory + (size_t)g * 4 * bound;
        Planner planner = {.model = model, .step = step, .group = g, .heads_of_group = G, .split = split};
        plan->tasks = memory;
        plan->merges = memory + bound;
        plan->last_tasks = memory + 2 * bound;
        plan->last_merges = memory + 3 * bound;
        plan->task_count = add_rows(&planner, 0, plan->tasks, plan->merges, &plan->merge_count);
        if (planner.partial > partials) partials = planner.partial;
        plan->last_task_count = add_rows(&planner, 1, plan->last_tasks, plan->last_merges, &plan->last_merge_count);
        if (planner.partial > partials) partials = planner.partial;
    }
    size_t floats = (size_t)partials * shape->kv_heads * ROWS_AT_ONCE * (padded(shape->head_dim) + 16);
    if (floats > model->partials_room) {
        free(model->partials);
        model->partials_room = 0;
        if (!(model->partials = aligned_alloc(64, floats * sizeof *model->partials))) return -1;
        model->partials_room = floats;
    }
    for (int g = 0; g < shape->groups; g++)
        for (int row = 0; row < step->rows; row++) {
            int *clear_from = model->clear_from + (long)g * shape->tokens_at_most;
            int first = step->query_starts[row], last = step->query_starts[row + 1] - 1;
            int offset = step->slot_mapping[g][last] % BLOCK;
            for (int t = first; t <= last; t++) clear_from[t] = BLOCK;
            if (offset <= last - first) clear_from[last] = offset + 1;
        }
    return 0;
}
