/* Vector helpers; included once per instruction set (no guard), see cpu_kernels.h. */

ALWAYS_INLINE v8f ISA(load)(const float *p) { return *(const v8f_unaligned *)p; }

ALWAYS_INLINE void ISA(store)(float *p, v8f value) { *(v8f_unaligned *)p = value; }

ALWAYS_INLINE v8f ISA(splat)(float value) { return value - (v8f){0}; }

#ifdef FUSED_MULTIPLY_ADD
ALWAYS_INLINE v8f ISA(select)(v8i mask, v8f yes, v8f no)
{
    return (v8f)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)mask);
}

ALWAYS_INLINE v8f ISA(maximum)(v8f a, v8f b) { return (v8f)_mm256_max_ps((__m256)a, (__m256)b); }
#else
ALWAYS_INLINE v8f ISA(select)(v8i mask, v8f yes, v8f no)
{
    return (v8f)(((v8i)yes & mask) | ((v8i)no & ~mask));
}

ALWAYS_INLINE v8f ISA(maximum)(v8f a, v8f b) { return ISA(select)(a > b, a, b); }
#endif

/* Sums and maxima reduce in one fixed tree, whatever surrounds them. */
ALWAYS_INLINE float ISA(sum8)(v8f a)
{
    return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
}

/* The largest lane, in every lane. */
ALWAYS_INLINE v8f ISA(max8)(v8f a)
{
    a = ISA(maximum)(a, __builtin_shufflevector(a, a, 4, 5, 6, 7, 0, 1, 2, 3));
    a = ISA(maximum)(a, __builtin_shufflevector(a, a, 2, 3, 0, 1, 6, 7, 4, 5));
    return ISA(maximum)(a, __builtin_shufflevector(a, a, 1, 0, 3, 2, 5, 4, 7, 6));
}

/* Lane t of the result is the sum of the lanes of a[t]. */
ALWAYS_INLINE v8f ISA(transpose_sum)(const v8f a[8])
{
    v8f b[4], c[2];
    for (int i = 0; i < 4; i++)
        b[i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13) +
               __builtin_shufflevector(a[2 * i], a[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    for (int i = 0; i < 2; i++)
        c[i] = __builtin_shufflevector(b[2 * i], b[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
               __builtin_shufflevector(b[2 * i], b[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    return __builtin_shufflevector(c[0], c[1], 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(c[0], c[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

/* exp to about 1 ulp: 2^n times a degree-6 polynomial on [-ln2/2, ln2/2]. Arguments are clamped
 * to [-87, 88], so nothing overflows and exp(-inf) is 1.6e-38 instead of 0. Adding 1.5 * 2^23
 * rounds to an integer. */
#define DEFINE_EXP(NAME, FLOATS, INTS, SPLAT, MAXIMUM)                                             \
    ALWAYS_INLINE FLOATS NAME(FLOATS x)                                                            \
    {                                                                                              \
        const FLOATS magic = SPLAT(12582912.0f);                                                   \
        x = MAXIMUM(x, SPLAT(-87.0f));                                                             \
        x = -MAXIMUM(-x, SPLAT(-88.0f));                                                           \
        FLOATS shifted = x * 1.44269504f + magic;                                                  \
        FLOATS n = shifted - magic;                                                                \
        FLOATS r = x - n * 0.693359375f;                                                           \
        r = r + n * 2.12194440e-4f;                                                                \
        FLOATS p = r * 1.3981999507e-3f + 8.3334519073e-3f;                                        \
        p = p * r + 4.1665795894e-2f;                                                              \
        p = p * r + 1.6666665459e-1f;                                                              \
        p = p * r + 5.0000001201e-1f;                                                              \
        p = p * (r * r) + r + 1.0f;                                                                \
        INTS exponent = ((INTS)shifted - (INTS)magic + 127) << 23;                                 \
        return p * (FLOATS)exponent;                                                               \
    }
DEFINE_EXP(ISA(exp8), v8f, v8i, ISA(splat), ISA(maximum))

ALWAYS_INLINE v8f ISA(silu8)(v8f x) { return x / (1.0f + ISA(exp8)(-x)); }

#ifdef HAS_AVX512
/* Vectors of two queries, 8 lanes each: every lane does what it does in a vector of 8. */
ALWAYS_INLINE v16f ISA(load16)(const float *p) { return *(const v16f_unaligned *)p; }

ALWAYS_INLINE void ISA(store16)(float *p, v16f value) { *(v16f_unaligned *)p = value; }

ALWAYS_INLINE v16f ISA(splat16)(float value) { return value - (v16f){0}; }

ALWAYS_INLINE v16f ISA(maximum16)(v16f a, v16f b)
{
    return (v16f)_mm512_max_ps((__m512)a, (__m512)b);
}

ALWAYS_INLINE v16f ISA(both)(v8f a, v8f b)
{
    return (v16f)_mm512_insertf32x8(_mm512_castps256_ps512((__m256)a), (__m256)b, 1);
}

ALWAYS_INLINE v16f ISA(twice)(const float *p)
{
    return (v16f)_mm512_broadcast_f32x8(_mm256_loadu_ps(p));
}

DEFINE_EXP(ISA(exp16), v16f, v16i, ISA(splat16), ISA(maximum16))

/* The largest lane of each half, in every lane of it. */
ALWAYS_INLINE v16f ISA(max16)(v16f a)
{
    a = ISA(maximum16)(a, (v16f)_mm512_shuffle_f32x4((__m512)a, (__m512)a, 0xb1));
    a = ISA(maximum16)(a, (v16f)_mm512_permute_ps((__m512)a, 0x4e));
    return ISA(maximum16)(a, (v16f)_mm512_permute_ps((__m512)a, 0xb1));
}

/* transpose_sum of both halves. */
ALWAYS_INLINE v16f ISA(transpose_sum16)(const v16f a[8])
{
    v16f b[4], c[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        b[i] = (v16f)_mm512_unpacklo_ps((__m512)a[2 * i], (__m512)a[2 * i + 1]) +
               (v16f)_mm512_unpackhi_ps((__m512)a[2 * i], (__m512)a[2 * i + 1]);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        c[i] = (v16f)_mm512_unpacklo_pd((__m512d)b[2 * i], (__m512d)b[2 * i + 1]) +
               (v16f)_mm512_unpackhi_pd((__m512d)b[2 * i], (__m512d)b[2 * i + 1]);
    return __builtin_shufflevector(c[0], c[1], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26,
                                   27) +
           __builtin_shufflevector(c[0], c[1], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29,
                                   30, 31);
}
#endif
#undef DEFINE_EXP
