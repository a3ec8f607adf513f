/* Packing weights and the memory they live in. */
#ifndef OUTRIDER_CPU_MEMORY_H
#define OUTRIDER_CPU_MEMORY_H

#include <math.h>
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

static inline float cpu_source_weight(const void *source, int is_float32, int64_t index)
{
    uint32_t bits;
    float value;
    if (is_float32)
        return ((const float *)source)[index];
    bits = (uint32_t)((const uint16_t *)source)[index] << 16;
    memcpy(&value, &bits, 4);
    return value;
}

/* Rows of float32 or bfloat16 as -127..127 times a scale of each. */
static inline void cpu_pack_i8(const void *source, int is_float32, int64_t n, int64_t k_size,
                               int64_t panels, int pairs, int8_t *packed, float *scales)
{
    for (int64_t p = 0; p < panels; p++)
        for (int64_t c = 0; c < PANEL; c++) {
            int64_t row = cpu_source_row(n, pairs, p, c);
            float most = 0.0f;
            int8_t *column = packed + p * k_size * PANEL + c;
            for (int64_t k = 0; row >= 0 && k < k_size; k++) {
                float size = fabsf(cpu_source_weight(source, is_float32, row * k_size + k));
                most = size > most ? size : most;
            }
            scales[p * PANEL + c] = most / 127.0f;
            for (int64_t k = 0; most > 0.0f && k < k_size; k++) {
                float weight = cpu_source_weight(source, is_float32, row * k_size + k);
                column[k * PANEL] = (int8_t)lrintf(weight / most * 127.0f);
            }
        }
}

#endif
