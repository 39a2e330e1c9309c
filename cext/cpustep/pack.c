/* Copies rows of a checkpoint's matrix into panels (see cpustep.h). Infinite numbers and NaN are rejected, because
 * they would spoil the results of every sequence. */
#include "cpustep.h"

#include <math.h>
#include <string.h>

/* The place of a row of the fused matrix: the panel, the half of it, and the column in the half. */
typedef struct {
    long panel;
    int half, column;
} Position;

static Position position_of(int row, int half)
{
    if (half == PLAIN) return (Position){row / PANEL, row % PANEL / 16, row % 16};
    return (Position){row / 16, half, row % 16};
}

static int64_t pack_rows_bf16(bf16 *matrix, const bf16 *source, int rows, int inputs, int first_row, int half)
{
    long blocks = padded(inputs) / 32;
    for (int block = 0; block < blocks; block++) { /* all rows of a tile are written before the next tile */
        int start = block * 32, count = inputs - start < 32 ? inputs - start : 32;
        for (int i = 0; i < rows; i++) {
            const bf16 *from = source + (long)i * inputs + start;
            Position position = position_of(first_row + i, half);
            bf16 *tile = matrix + ((position.panel * blocks + block) * 2 + position.half) * TILE + position.column * 2;
            int bad = 0;
            for (int k = 0; k < count; k++) {
                tile[k / 2 * 32 + k % 2] = from[k];
                bad |= (from[k] & 0x7f80) == 0x7f80;
            }
            for (int k = 0; bad && k < count; k++)
                if ((from[k] & 0x7f80) == 0x7f80) return (int64_t)i * inputs + start + k;
        }
    }
    return -1;
}

static int64_t pack_rows_f32(float *matrix, const float *source, int rows, int inputs, int first_row, int half)
{
    long depth = padded(inputs);
    for (int k = 0; k < inputs; k++) {
        for (int i = 0; i < rows; i++) {
            Position position = position_of(first_row + i, half);
            float value = source[(long)i * inputs + k];
            if (!isfinite(value)) return (int64_t)i * inputs + k;
            matrix[(position.panel * depth + k) * PANEL + position.half * 16 + position.column] = value;
        }
    }
    return -1;
}

static float number_at(const void *source, int64_t index, int dtype)
{
    if (dtype == FLOAT32) return ((const float *)source)[index];
    uint32_t bits = (uint32_t)((const bf16 *)source)[index] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Return the index of input `k` of an output within its panel of 8-bit weights. */
static long index_in_panel(Position position, int k, int dtype)
{
    if (dtype == FLOAT32) return (long)k * PANEL + position.half * 16 + position.column;
    return ((long)(k / 32) * 2 + position.half) * TILE + k % 32 / 2 * 32 + k % 2 * 16 + position.column;
}

/* Symmetric quantization: 0 stays 0, and an output's largest weight becomes ±127. */
static int64_t pack_rows_int8(int8_t *matrix, float *scales, const void *source, int64_t start, int dtype, int rows,
                              int inputs, int first_row, int half)
{
    for (int i = 0; i < rows; i++, start += inputs) {
        Position position = position_of(first_row + i, half);
        float largest = 0;
        for (int k = 0; k < inputs; k++) {
            float size = fabsf(number_at(source, start + k, dtype));
            if (!isfinite(size)) return start + k;
            if (size > largest) largest = size;
        }
        float scale = largest / 127;
        /* Weights too small for a scale become 0. */
        float factor = scale >= 1e-37f ? 1 / scale : 0;
        for (int k = 0; k < inputs; k++) {
            int8_t *to = matrix + position.panel * padded(inputs) * PANEL + index_in_panel(position, k, dtype);
            *to = (int8_t)lrintf(number_at(source, start + k, dtype) * factor);
        }
        scales[position.panel * PANEL + position.half * 16 + position.column] = scale;
    }
    return -1;
}

int64_t pack_matrix(const Model *model, const Tensor *tensor, const void *source, int first, int count)
{
    int64_t bad = INT64_MAX;
    int pieces = (count + 15) / 16, inputs = tensor->inputs, half = tensor->half, dtype = model->shape.dtype;
#pragma omp parallel for num_threads(model->shape.threads) schedule(static) reduction(min : bad)
    for (int piece = 0; piece < pieces; piece++) {
        int row = piece * 16, rows = count - row < 16 ? count - row : 16, to = tensor->before + first + row;
        int64_t start = (int64_t)row * inputs, found;
        if (tensor->scales) {
            found = pack_rows_int8(tensor->matrix, tensor->scales, source, start, dtype, rows, inputs, to, half);
            if (found >= 0) found -= start;
        } else if (dtype == BFLOAT16)
            found = pack_rows_bf16(tensor->matrix, (const bf16 *)source + start, rows, inputs, to, half);
        else
            found = pack_rows_f32(tensor->matrix, (const float *)source + start, rows, inputs, to, half);
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
