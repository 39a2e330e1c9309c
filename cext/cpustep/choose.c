/* Chooses the next tokens of all rows, on several threads. */
#include "cpustep.h"

#include <stdlib.h>

#ifdef _OPENMP
#include <omp.h>
#endif

/* For each thread: two rows of scores, padded to whole runs, and the maximum and sum of each run. */
static size_t scratch_bytes(int vocabulary)
{
    size_t runs = ((size_t)vocabulary + RUN - 1) / RUN;
    size_t bytes = 2 * runs * RUN * sizeof(float) + (runs + 1) * sizeof(float) + runs * sizeof(double);
    return (bytes + 127) / 64 * 64;
}

int choose_tokens(const Choice *choice, const Kernels *kernels, int threads)
{
    int drawn = 0;
    for (int row = 0; row < choice->rows; row++) drawn |= choice->temperatures[row] >= choice->greedy_below;
    if (choice->rows == 0) return 0;
    if (threads > choice->rows) threads = choice->rows;
    size_t bytes = scratch_bytes(choice->vocabulary);
    char *scratch = NULL;
    if (drawn && !(scratch = aligned_alloc(64, bytes * threads))) return -1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int thread = 0;
#ifdef _OPENMP
        thread = omp_get_thread_num();
#endif
#pragma omp for schedule(dynamic, 1)
        for (int row = 0; row < choice->rows; row++)
            kernels->choose_row(choice, row, scratch ? scratch + thread * bytes : NULL);
    }
    free(scratch);
    return 0;
}
