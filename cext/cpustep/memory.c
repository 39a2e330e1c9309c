/* Large zeroed mappings, which the system backs with memory only when they are touched. */
#define _GNU_SOURCE
#include "cpustep.h"

#include <sys/mman.h>
#include <unistd.h>

enum { HUGE_PAGE = 2 << 20 };

static size_t mapped_bytes(size_t bytes) { return (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE; }

/* Map memory that begins on a huge page boundary, so that huge pages can back it from the first byte. */
void *map_memory(size_t bytes)
{
    size_t wanted = mapped_bytes(bytes);
    if (bytes == 0 || wanted < bytes || wanted + HUGE_PAGE < wanted) return NULL;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_NORESERVE
    flags |= MAP_NORESERVE;
#endif
    char *memory = mmap(NULL, wanted + HUGE_PAGE, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED) return NULL;
    size_t before = (HUGE_PAGE - (uintptr_t)memory % HUGE_PAGE) % HUGE_PAGE;
    if (before) munmap(memory, before);
    munmap(memory + before + wanted, HUGE_PAGE - before);
#ifdef MADV_HUGEPAGE
    madvise(memory + before, wanted, MADV_HUGEPAGE);
#endif
    return memory + before;
}

/* Return the whole pages of a range to the system: they read as zero and are allocated again on write. */
void release_memory(char *memory, size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uintptr_t from = ((uintptr_t)memory + page - 1) / page * page;
    uintptr_t to = ((uintptr_t)memory + bytes) / page * page;
    if (from < to) madvise((void *)from, to - from, MADV_DONTNEED);
}

void unmap_memory(void *memory, size_t bytes)
{
    if (memory) munmap(memory, mapped_bytes(bytes));
}
