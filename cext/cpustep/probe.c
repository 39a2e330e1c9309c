/* Measures the memory bandwidth of this machine, which a step's time is compared with. */
#define _GNU_SOURCE
#include "cpustep.h"

#include <string.h>
#include <time.h>

static double now_s(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Return the best of `tries` passes over new memory, in bytes per second; 0 when out of memory. */
double read_rate(size_t bytes, int threads, int tries)
{
    size_t share = bytes / (size_t)threads / 256 * 256;
    char *memory = map_memory(bytes);
    double best = 0;
    if (!memory) return 0;
    memset(memory, 1, bytes);
    for (int attempt = 0; attempt < tries; attempt++) {
        uint64_t sum = 0;
        double start = now_s();
#pragma omp parallel for num_threads(threads) reduction(+ : sum)
        for (int thread = 0; thread < threads; thread++) {
            const char *from = memory + (size_t)thread * share;
            for (size_t i = 0; i < share; i += 256) {
                uint64_t words[32];
                for (int line = 0; line < 4; line++) __builtin_prefetch(from + i + 2048 + line * 64);
                memcpy(words, from + i, sizeof words);
                for (int word = 0; word < 32; word++) sum += words[word];
            }
        }
        double rate = (double)share * threads / (now_s() - start);
        if (sum && rate > best) best = rate;
    }
    unmap_memory(memory, bytes);
    return best;
}
