/* Copies rows of a checkpoint's matrix into panels (see cpustep.h), with all threads. Infinite numbers and NaN are
 * rejected, because they would spoil the results of every sequence. */
#include "ggml.h"

#include <math.h>

size_t row_bytes(const Model *model, const Tensor *tensor)
{
    const Layout *stored = tensor->matrix.format->stored;
    if (stored) return (size_t)tensor->inputs / stored->elements * stored->bytes;
    return tensor->inputs * model->element;
}

int64_t pack_matrix(const Model *model, const Tensor *tensor, const void *source, int first, int count)
{
    int64_t bad = INT64_MAX;
    int pieces = (count + 15) / 16, inputs = tensor->inputs;
    const Matrix *matrix = &tensor->matrix;
#pragma omp parallel for num_threads(model->shape.threads) schedule(static) reduction(min : bad)
    for (int piece = 0; piece < pieces; piece++) {
        int row = piece * 16, rows = count - row < 16 ? count - row : 16, to = tensor->before + first + row;
        int64_t start = (int64_t)row * inputs;
        const char *from = (const char *)source + row * row_bytes(model, tensor);
        int64_t found = matrix->format->pack(matrix->format, matrix->panels, from, rows, inputs, to, tensor->half);
        if (found >= 0 && start + found < bad) bad = start + found;
    }
    return bad == INT64_MAX ? -1 : bad;
}

int64_t pack_vector(const Tensor *tensor, const float *source)
{
    for (int i = 0; i < tensor->rows; i++) {
        if (!isfinite(source[i])) return i;
        Position position = position_of(tensor->before + i, tensor->half);
        tensor->vector[position.panel * PANEL + position.half * 16 + position.column] = source[i];
    }
    return -1;
}
