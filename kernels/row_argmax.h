/* Largest element of a float row in one pass; the lanes are plain arrays so that any compiler
   vectorises them, and x86 builds pick the widest unit at run time. */
#ifndef OUTRIDER_ROW_ARGMAX_H
#define OUTRIDER_ROW_ARGMAX_H

#include <math.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__) && defined(__linux__)
#define OUTRIDER_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define OUTRIDER_CLONES
#endif

#define OUTRIDER_LANES 32

/* Index of the first largest element of x[0..n), or -1 if any element is NaN or infinite. */
OUTRIDER_CLONES
static int64_t outrider_row_argmax(const float *x, int64_t n)
{
    float best[OUTRIDER_LANES], bad[OUTRIDER_LANES];
    float top, sum = 0.0f;
    int64_t i;
    int j;
    for (j = 0; j < OUTRIDER_LANES; j++) {
        best[j] = -INFINITY;
        bad[j] = 0.0f;
    }
    for (i = 0; i + OUTRIDER_LANES <= n; i += OUTRIDER_LANES)
        for (j = 0; j < OUTRIDER_LANES; j++) {
            best[j] = x[i + j] > best[j] ? x[i + j] : best[j];
            bad[j] += x[i + j] * 0.0f; /* NaN from NaN and from infinity */
        }
    for (; i < n; i++) {
        best[0] = x[i] > best[0] ? x[i] : best[0];
        bad[0] += x[i] * 0.0f;
    }
    top = best[0];
    for (j = 0; j < OUTRIDER_LANES; j++) {
        top = best[j] > top ? best[j] : top;
        sum += bad[j];
    }
    if (sum != 0.0f || n < 1)
        return -1;
    for (i = 0; i + OUTRIDER_LANES <= n; i += OUTRIDER_LANES) {
        int hits = 0;
        for (j = 0; j < OUTRIDER_LANES; j++)
            hits |= x[i + j] == top;
        if (hits)
            break;
    }
    while (x[i] != top)
        i++;
    return i;
}

#endif
