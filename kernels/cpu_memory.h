/* Packing weights and the memory they live in. */
#ifndef OUTRIDER_CPU_MEMORY_H
#define OUTRIDER_CPU_MEMORY_H

#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "cpu_types.h"

#define HUGE_PAGE ((size_t)2 << 20)

/* Zeroed memory; large blocks on huge pages, which spare a weight stream its TLB misses. */
static inline void *cpu_allocate(size_t bytes)
{
    size_t align = bytes >= HUGE_PAGE ? HUGE_PAGE : 64;
    void *memory = NULL;
    bytes = (bytes + align - 1) / align * align;
    if (posix_memalign(&memory, align, bytes))
        return NULL;
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (align == HUGE_PAGE)
        madvise(memory, bytes, MADV_HUGEPAGE);
#endif
    memset(memory, 0, bytes);
    return memory;
}

/* Source row of a panel's column, or -1. Pairs interleave the two halves of the rows (gate and
 * up), 8 columns each, so that a panel holds both factors of its products. */
static inline int64_t cpu_source_row(int64_t n, int pairs, int64_t panel, int64_t column)
{
    int64_t row = pairs ? panel * 8 + column % 8 : panel * PANEL + column;
    if (row >= (pairs ? n / 2 : n))
        return -1;
    return pairs && column >= 8 ? n / 2 + row : row;
}

static inline void cpu_pack_bf16(const uint16_t *source, int64_t n, int64_t k_size,
                                 int64_t panels, int pairs, uint16_t *packed)
{
    for (int64_t p = 0; p < panels; p++)
        for (int64_t c = 0; c < PANEL; c++) {
            int64_t row = cpu_source_row(n, pairs, p, c);
            uint16_t *column = packed + p * k_size * PANEL + c % 8 * 2 + c / 8;
            for (int64_t k = 0; row >= 0 && k < k_size; k++)
                column[k * PANEL] = source[row * k_size + k];
        }
}

static inline void cpu_pack_f32(const float *source, int64_t n, int64_t k_size, int64_t panels,
                                int pairs, float *packed)
{
    for (int64_t p = 0; p < panels; p++)
        for (int64_t c = 0; c < PANEL; c++) {
            int64_t row = cpu_source_row(n, pairs, p, c);
            float *column = packed + p * k_size * PANEL + c;
            for (int64_t k = 0; row >= 0 && k < k_size; k++)
                column[k * PANEL] = source[row * k_size + k];
        }
}

#endif
