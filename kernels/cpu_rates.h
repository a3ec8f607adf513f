/* The machine's two limits, measured; included once per instruction set. */

#ifdef HAS_AVX512
#define WIDE v16f
#define LANES 16
#else
#define WIDE v8f
#define LANES 8
#endif

/* repeats x 12 x 8 multiply-adds on 12 independent vectors. */
static __attribute__((noinline)) float ISA(multiply_adds)(int64_t repeats)
{
    WIDE sum[12], factor = 0.999f - (WIDE){0}, term = 0.001f - (WIDE){0}, total = {0};
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++)
        sum[i] = (float)i - (WIDE){0};
    for (int64_t r = 0; r < repeats; r += LANES / 8) {
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++)
            sum[i] = sum[i] * factor + term;
        __asm__ volatile("" ::: "memory");
    }
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++)
        total = total + sum[i];
    return total[0] + total[LANES - 1];
}
#undef WIDE
#undef LANES

/* Read size floats (a multiple of 32) once. */
static __attribute__((noinline)) float ISA(read)(const float *data, int64_t size)
{
    v8f sum[4] = {{0}, {0}, {0}, {0}};
    for (int64_t i = 0; i < size; i += 32)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++)
            sum[j] = sum[j] + ISA(load)(data + i + 8 * j);
    return ISA(sum8)((sum[0] + sum[1]) + (sum[2] + sum[3]));
}
