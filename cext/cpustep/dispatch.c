/* Selects the kernels that this processor can run, the fastest first. */
#define _GNU_SOURCE
#include "cpustep.h"

#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

extern const Kernels portable_f32, portable_bf16;
#if defined(__x86_64__)
extern const Kernels avx2_f32, avx2_bf16, avx512_f32, avx512_bf16, avx512bf16_bf16, amx_bf16;

/* The operating system must save the registers too: XCR0 has bits 5 to 7 for AVX-512, 17 and 18 for AMX. */
static uint64_t saved_registers(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
    __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    return (uint64_t)d << 32 | a;
}

static int has_bits(uint64_t value, uint64_t bits) { return (value & bits) == bits; }

static int has_avx2(void)
{
    return has_bits(saved_registers(), 0x6) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}

static int has_avx512(void)
{
    return has_avx2() && has_bits(saved_registers(), 0xe6) && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq");
}

static int has_avx512bf16(void)
{
    unsigned a, b, c, d;
    return has_avx512() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1 << 5);
}

/* The system must permit the tile state, 8 KiB a thread, once for the process and all its threads. */
static int has_amx(void)
{
    unsigned a, b, c, d;
    if (!has_avx512bf16() || !has_bits(saved_registers(), 3 << 17)) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !has_bits(d, 1 << 22 | 1 << 24)) return 0;
#if defined(__linux__)
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
#else
    return 0;
#endif
}
#endif

static int always(void) { return 1; }

static const struct {
    const Kernels *kernels;
    int (*runs)(void);
} known[] = {
#if defined(__x86_64__)
    {&amx_bf16, has_amx}, /* the fastest first */
    {&avx512bf16_bf16, has_avx512bf16},
    {&avx512_bf16, has_avx512},
    {&avx512_f32, has_avx512},
    {&avx2_bf16, has_avx2},
    {&avx2_f32, has_avx2},
#endif
    {&portable_bf16, always},
    {&portable_f32, always},
};

/* Return the `index`th of the kernels that run here; NULL when there are no more. */
const Kernels *list_kernels(int dtype, int index)
{
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].kernels->dtype == dtype && known[i].runs() && index-- == 0) return known[i].kernels;
    return NULL;
}

const Format *find_format(const Kernels *kernels, const char *name)
{
    for (int i = 0; kernels->formats[i]; i++)
        if (!strcmp(name, kernels->formats[i]->name)) return kernels->formats[i];
    return NULL;
}

const Kernels *find_kernels(int dtype, const char *name)
{
    const Kernels *kernels;
    for (int i = 0; (kernels = list_kernels(dtype, i)); i++)
        if (!name || !strcmp(name, kernels->name)) return kernels;
    return NULL;
}
