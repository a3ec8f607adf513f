/* The machine's two limits, measured; included once per instruction set. */

/* repeats x 12 independent vector multiply-adds: 16 operations each. */
static __attribute__((noinline)) float ISA(multiply_adds)(int64_t repeats)
{
    v8f sum[12], factor = ISA(splat)(0.999f), term = ISA(splat)(0.001f), total = {0};
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++)
        sum[i] = ISA(splat)((float)i);
    for (int64_t r = 0; r < repeats; r++) {
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++)
            sum[i] = sum[i] * factor + term;
        __asm__ volatile("" ::: "memory");
    }
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++)
        total = total + sum[i];
    return ISA(sum8)(total);
}

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
