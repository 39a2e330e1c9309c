/* The threads of a step: their barrier, and the counter by which they divide work. For step.c only. */
#ifndef FAIRLEAD_TEAM_H
#define FAIRLEAD_TEAM_H

#include "cpustep.h"

#include <sched.h>
#include <stdatomic.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* The barrier and the work counter of the threads. A thread that waits for long sleeps, so that another
 * can move to the sleeper's core if another process occupies its own. */
typedef struct {
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_int generation;
    atomic_int sleepers;
    _Alignas(64) atomic_int next;
    int threads;
    _Alignas(64) atomic_int processors[THREADS_AT_MOST]; /* where each was last seen */
} Team;

enum { SPINS = 4000 };

static inline void pause_briefly(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Take the next `count` pieces of work; return the first of them. */
static int take_work(Team *team, int count)
{
    return atomic_fetch_add_explicit(&team->next, count, memory_order_relaxed);
}

#if defined(__linux__)
static void record_processor(Team *team, int thread)
{
    int processor = sched_getcpu();
    if (atomic_load_explicit(&team->processors[thread], memory_order_relaxed) != processor)
        atomic_store_explicit(&team->processors[thread], processor, memory_order_relaxed);
}

/* Return whether another thread may be waiting for this processor. Spinning would block it: with one busy
 * process beside it on two cores, a step took three times as long. */
static int shares_processor(const Team *team, int thread)
{
    int processor = atomic_load_explicit(&team->processors[thread], memory_order_relaxed);
    for (int t = 0; t < team->threads; t++)
        if (t != thread && atomic_load_explicit(&team->processors[t], memory_order_relaxed) == processor) return 1;
    return 0;
}
#else
static void record_processor(Team *team, int thread) { (void)team, (void)thread; }
static int shares_processor(const Team *team, int thread) { return (void)team, (void)thread, 0; }
#endif

/* Wait for all threads. All writes before it are visible after it; the work counter restarts at 0. */
static void wait_for_all(Team *team, int thread)
{
    int generation = atomic_load(&team->generation);
    record_processor(team, thread);
    if (atomic_fetch_add(&team->arrived, 1) == team->threads - 1) {
        atomic_store(&team->arrived, 0);
        atomic_store(&team->next, 0);
        atomic_fetch_add(&team->generation, 1);
#if defined(__linux__)
        if (atomic_load(&team->sleepers))
            syscall(SYS_futex, &team->generation, FUTEX_WAKE_PRIVATE, team->threads, NULL, NULL, 0);
#endif
        return;
    }
    for (int spin = shares_processor(team, thread) ? SPINS : 0; spin < SPINS; spin++) {
        if (atomic_load_explicit(&team->generation, memory_order_acquire) != generation) return;
        pause_briefly();
    }
    while (atomic_load(&team->generation) == generation) {
#if defined(__linux__)
        atomic_fetch_add(&team->sleepers, 1);
        syscall(SYS_futex, &team->generation, FUTEX_WAIT_PRIVATE, generation, NULL, NULL, 0);
        atomic_fetch_sub(&team->sleepers, 1);
        record_processor(team, thread);
#else
        sched_yield();
#endif
    }
}

#endif
