/* The CPU kernels, compiled for AVX2 with FMA where the compiler can, and for the base
 * instruction set; `cpu_has_avx2` chooses at run time. Headers without a guard are included
 * once per instruction set: vector code has to be compiled under its target from the start. */
#ifndef OUTRIDER_CPU_KERNELS_H
#define OUTRIDER_CPU_KERNELS_H

#include "cpu_memory.h"
#include "cpu_types.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define OUTRIDER_AVX2 1
#include <immintrin.h>
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define ISA(name) outrider_##name##_avx2
#define FUSED_MULTIPLY_ADD
#include "cpu_vector.h"
#include "cpu_tile_avx2.h"
#include "cpu_matmul.h"
#include "cpu_attention.h"
#include "cpu_decoder.h"
#include "cpu_rates.h"
#undef ISA
#undef FUSED_MULTIPLY_ADD
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif
#define ISA(name) outrider_##name##_base
#include "cpu_vector.h"
#include "cpu_matmul.h"
#include "cpu_attention.h"
#include "cpu_decoder.h"
#include "cpu_rates.h"
#undef ISA

static int cpu_has_avx2(void)
{
#ifdef OUTRIDER_AVX2
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return 0;
#endif
}

#ifdef OUTRIDER_AVX2
#define BY_ISA(avx2, name) (avx2 ? outrider_##name##_avx2 : outrider_##name##_base)
#else
#define BY_ISA(avx2, name) outrider_##name##_base
#endif

static void cpu_matmul(int avx2, const packed_matrix *m, const float *x, int64_t ldx, int64_t rows,
                       float *out, int64_t ldo, int epilogue)
{
    BY_ISA(avx2, matmul)(m, x, ldx, rows, out, ldo, epilogue);
}

static float cpu_multiply_adds(int avx2, int64_t repeats)
{
    return BY_ISA(avx2, multiply_adds)(repeats);
}

static float cpu_read(int avx2, const float *data, int64_t size)
{
    return BY_ISA(avx2, read)(data, size);
}

static void cpu_rms_norm(int avx2, const float *x, const float *weight, int64_t rows, int64_t size,
                         float eps, float *out)
{
    BY_ISA(avx2, rms_norm)(x, weight, rows, size, eps, out);
}

static void cpu_attention(int avx2, const attention_args *args, const ragged_batch *batch,
                          const int32_t *slots)
{
    BY_ISA(avx2, attention)(args, batch, slots);
}

static void cpu_decoder_forward(int avx2, const decoder_model *model, const ragged_batch *batch,
                                const decoder_cache *cache, const decoder_scratch *scratch,
                                const int64_t *capture, int64_t num_capture, float *captured,
                                float *hidden)
{
    BY_ISA(avx2, decoder_forward)
    (model, batch, cache, scratch, capture, num_capture, captured, hidden);
}

static void cpu_draft_forward(int avx2, const decoder_model *model, const ragged_batch *batch,
                              const decoder_cache *cache, const decoder_scratch *scratch,
                              const float *hidden, float *recurrent, float *head_input)
{
    BY_ISA(avx2, draft_forward)(model, batch, cache, scratch, hidden, recurrent, head_input);
}

#endif
