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
 * to [-87, 88], so nothing overflows and exp(-inf) is 1.6e-38 instead of 0. */
ALWAYS_INLINE v8f ISA(exp8)(v8f x)
{
    const v8f magic = ISA(splat)(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    x = ISA(maximum)(x, ISA(splat)(-87.0f));
    x = -ISA(maximum)(-x, ISA(splat)(-88.0f));
    v8f shifted = x * 1.44269504f + magic;
    v8f n = shifted - magic;
    v8f r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    v8f p = r * 1.3981999507e-3f + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    v8i exponent = ((v8i)shifted - (v8i)magic + 127) << 23;
    return p * (v8f)exponent;
}

ALWAYS_INLINE v8f ISA(silu8)(v8f x) { return x / (1.0f + ISA(exp8)(-x)); }
