/* The CPU kernels, compiled for AVX-512 and for AVX2 with FMA where the compiler can, and for the
 * base instruction set; `cpu_best_isa` chooses at run time. Headers without a guard are included
 * once per instruction set: vector code has to be compiled under its target from the start. */
#ifndef OUTRIDER_CPU_KERNELS_H
#define OUTRIDER_CPU_KERNELS_H

#include "cpu_memory.h"
#include "cpu_types.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define OUTRIDER_X86 1
#include <immintrin.h>
#define FUSED_MULTIPLY_ADD

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define ISA(name) outrider_##name##_avx2
#include "cpu_vector.h"
#include "cpu_tile_avx2.h"
#include "cpu_matmul.h"
#include "cpu_attention.h"
#include "cpu_decoder.h"
#include "cpu_rates.h"
#undef ISA
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(                                                                      \
    __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif
#define ISA(name) outrider_##name##_avx512
#define HAS_AVX512
#include "cpu_vector.h"
#include "cpu_tile_avx512.h"
#include "cpu_matmul.h"
#include "cpu_attention.h"
#include "cpu_decoder.h"
#include "cpu_rates.h"
#undef ISA
#undef HAS_AVX512
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

enum { ISA_BASE = 0, ISA_AVX2 = 1, ISA_AVX512 = 2 };

/* The best of them that this machine runs, the operating system included. */
static int cpu_best_isa(void)
{
#ifdef OUTRIDER_X86
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return ISA_BASE;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return ISA_AVX512;
    return ISA_AVX2;
#else
    return ISA_BASE;
#endif
}

#ifdef OUTRIDER_X86
#define BY_ISA(isa, name)                                                                          \
    (isa == ISA_AVX512 ? outrider_##name##_avx512                                                  \
                       : isa == ISA_AVX2 ? outrider_##name##_avx2 : outrider_##name##_base)
#else
#define BY_ISA(isa, name) outrider_##name##_base
#endif

static void cpu_matmul(int isa, const packed_matrix *m, const float *x, int64_t ldx, int64_t rows,
                       float *out, int64_t ldo, int epilogue)
{
    BY_ISA(isa, matmul)(m, x, ldx, rows, out, ldo, epilogue);
}

static float cpu_multiply_adds(int isa, int64_t repeats)
{
    return BY_ISA(isa, multiply_adds)(repeats);
}

static float cpu_read(int isa, const float *data, int64_t size)
{
    return BY_ISA(isa, read)(data, size);
}

static void cpu_rms_norm(int isa, const float *x, const float *weight, int64_t rows, int64_t size,
                         float eps, float *out)
{
    BY_ISA(isa, rms_norm)(x, weight, rows, size, eps, out);
}

static void cpu_attention(int isa, const attention_args *args, const ragged_batch *batch,
                          const int32_t *slots)
{
    BY_ISA(isa, attention)(args, batch, slots);
}

static void cpu_decoder_forward(int isa, const decoder_model *model, const ragged_batch *batch,
                                const decoder_cache *cache, const decoder_scratch *scratch,
                                const int64_t *capture, int64_t num_capture, float *captured,
                                float *hidden)
{
    BY_ISA(isa, decoder_forward)
    (model, batch, cache, scratch, capture, num_capture, captured, hidden);
}

static void cpu_draft_forward(int isa, const decoder_model *model, const ragged_batch *batch,
                              const ragged_batch *asked, const decoder_cache *cache,
                              const decoder_scratch *scratch, const float *hidden,
                              float *recurrent, float *head_input)
{
    BY_ISA(isa, draft_forward)(model, batch, asked, cache, scratch, hidden, recurrent, head_input);
}

#endif
