/* The register blocks of the matmul for AVX2 with FMA, in assembly: twelve accumulators, two
 * weights, one activation and one mask fill all sixteen registers, and compilers given the same
 * loop in C keep some of them in memory, at half the speed. Included where AVX2 code is compiled.
 *
 * Each function computes acc[rows][2 * panels][8] = x W^T over `panels` consecutive panels, every
 * element as one chain of multiply-adds over k. ymm12, ymm13: weights of a step; ymm14: an
 * activation; ymm15: the mask of the high halves. x is rows 0..2, y rows 3..5. */

#define BF16_STEP "32"
#define BF16_PAIR "64"
#define BF16_LOAD(at, panel)                                                                       \
    "vmovdqu " at "(%[w]" panel "), %%ymm13\n\t"                                                   \
    "vpslld $16, %%ymm13, %%ymm12\n\t"                                                             \
    "vpand %%ymm15, %%ymm13, %%ymm13\n\t"
#define F32_STEP "64"
#define F32_PAIR "128"
#define F32_LOAD(at, panel)                                                                        \
    "vmovups " at "(%[w]" panel "), %%ymm12\n\t"                                                   \
    "vmovups 32+" at "(%[w]" panel "), %%ymm13\n\t"
#define I8_STEP "16"
#define I8_PAIR "32"
#define I8_LOAD(at, panel)                                                                         \
    "vpmovsxbd " at "(%[w]" panel "), %%ymm12\n\t"                                                 \
    "vpmovsxbd 8+" at "(%[w]" panel "), %%ymm13\n\t"                                               \
    "vcvtdq2ps %%ymm12, %%ymm12\n\t"                                                               \
    "vcvtdq2ps %%ymm13, %%ymm13\n\t"

/* acc[lo], acc[hi] += weights * activation */
#define ROW(at, row, lo, hi)                                                                       \
    "vbroadcastss " at row ", %%ymm14\n\t"                                                         \
    "vfmadd231ps %%ymm14, %%ymm12, %%ymm" lo "\n\t"                                                \
    "vfmadd231ps %%ymm14, %%ymm13, %%ymm" hi "\n\t"
#define X0 "(%[x])"
#define X1 "(%[x],%[ld])"
#define X2 "(%[x],%[ld],2)"
#define Y0 "(%[y])"
#define Y1 "(%[y],%[ld])"
#define Y2 "(%[y],%[ld],2)"
#define P1 ",%[pb]"
#define P2 ",%[pb],2"
#define P3 ",%[pb3]"

/* One k step: x displaced by `a`, w by `b`; LOAD widens the weights of a panel. */
#define STEP_1x1(LOAD, a, b) LOAD(b, "") ROW(a, X0, "0", "1")
#define STEP_2x1(LOAD, a, b) STEP_1x1(LOAD, a, b) ROW(a, X1, "2", "3")
#define STEP_3x1(LOAD, a, b) STEP_2x1(LOAD, a, b) ROW(a, X2, "4", "5")
#define STEP_4x1(LOAD, a, b) STEP_3x1(LOAD, a, b) ROW(a, Y0, "6", "7")
#define STEP_5x1(LOAD, a, b) STEP_4x1(LOAD, a, b) ROW(a, Y1, "8", "9")
#define STEP_6x1(LOAD, a, b) STEP_5x1(LOAD, a, b) ROW(a, Y2, "10", "11")
#define STEP_2x2(LOAD, a, b)                                                                       \
    LOAD(b, "") ROW(a, X0, "0", "1") ROW(a, X1, "4", "5")                                          \
    LOAD(b, P1) ROW(a, X0, "2", "3") ROW(a, X1, "6", "7")
#define STEP_3x2(LOAD, a, b)                                                                       \
    LOAD(b, "") ROW(a, X0, "0", "1") ROW(a, X1, "4", "5") ROW(a, X2, "8", "9")                     \
    LOAD(b, P1) ROW(a, X0, "2", "3") ROW(a, X1, "6", "7") ROW(a, X2, "10", "11")
#define STEP_1x4(LOAD, a, b)                                                                       \
    LOAD(b, "") ROW(a, X0, "0", "1") LOAD(b, P1) ROW(a, X0, "2", "3")                              \
    LOAD(b, P2) ROW(a, X0, "4", "5") LOAD(b, P3) ROW(a, X0, "6", "7")

#define FETCH(at, panel) "prefetcht0 " at "(%[fetch]" panel ")\n\t"
#define FETCH_1(at) FETCH(at, "")
#define FETCH_2(at) FETCH_1(at) FETCH(at, P1)
#define FETCH_4(at) FETCH_2(at) FETCH(at, P2) FETCH(at, P3)
#define BF16_FETCH(panels) FETCH_##panels("0")
#define I8_FETCH(panels) FETCH_##panels("0")
#define F32_FETCH(panels) FETCH_##panels("0") FETCH_##panels("64")

#define ZERO(r) "vxorps %%ymm" r ", %%ymm" r ", %%ymm" r "\n\t"
#define SAVE(r, at) "vmovups %%ymm" r ", " at "(%[acc])\n\t"

#define DEFINE_TILE(TYPE, ROWS, PANELS)                                                            \
    ALWAYS_INLINE void ISA(tile_##TYPE##_##ROWS##x##PANELS)(                                       \
        const float *x, int64_t ldx, const char *w, int64_t panel_bytes, int64_t k, int64_t ahead, \
        float *acc)                                                                                \
    {                                                                                              \
        const float *y = x + 3 * ldx;                                                              \
        const char *fetch = w + ahead;                                                             \
        int64_t fetch_step = ahead ? 2 * TYPE##_BYTES : 0, pairs = k / 2;                          \
        __asm__ volatile("vpcmpeqd %%ymm15, %%ymm15, %%ymm15\n\t"                                  \
                         "vpslld $16, %%ymm15, %%ymm15\n\t"                                        \
                         ZERO("0") ZERO("1") ZERO("2") ZERO("3") ZERO("4") ZERO("5")               \
                         ZERO("6") ZERO("7") ZERO("8") ZERO("9") ZERO("10") ZERO("11")             \
                         "testq %[pairs], %[pairs]\n\t"                                            \
                         "jz 2f\n\t"                                                               \
                         ".p2align 4\n"                                                            \
                         "1:\n\t"                                                                  \
                         TYPE##_FETCH(PANELS)                                                      \
                         STEP_##ROWS##x##PANELS(TYPE##_LOAD, "0", "0")                             \
                         STEP_##ROWS##x##PANELS(TYPE##_LOAD, "4", TYPE##_STEP)                     \
                         "addq $8, %[x]\n\t"                                                       \
                         "addq $8, %[y]\n\t"                                                       \
                         "addq $" TYPE##_PAIR ", %[w]\n\t"                                         \
                         "addq %[fetch_step], %[fetch]\n\t"                                        \
                         "decq %[pairs]\n\t"                                                       \
                         "jnz 1b\n"                                                                \
                         "2:\n\t"                                                                  \
                         "testq $1, %[k]\n\t"                                                      \
                         "jz 3f\n\t"                                                               \
                         STEP_##ROWS##x##PANELS(TYPE##_LOAD, "0", "0")                             \
                         "3:\n\t"                                                                  \
                         SAVE("0", "0") SAVE("1", "32") SAVE("2", "64") SAVE("3", "96")            \
                         SAVE("4", "128") SAVE("5", "160") SAVE("6", "192") SAVE("7", "224")       \
                         SAVE("8", "256") SAVE("9", "288") SAVE("10", "320") SAVE("11", "352")     \
                         : [x] "+r"(x), [y] "+r"(y), [w] "+r"(w), [fetch] "+r"(fetch),             \
                           [pairs] "+r"(pairs)                                                     \
                         : [ld] "r"(4 * ldx), [pb] "r"(panel_bytes), [pb3] "r"(3 * panel_bytes),   \
                           [fetch_step] "r"(fetch_step), [k] "r"(k), [acc] "r"(acc)                \
                         : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", \
                           "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14",    \
                           "xmm15");                                                               \
    }

#define BF16_BYTES 32
#define F32_BYTES 64
#define I8_BYTES 16
#define DEFINE_TILES(ROWS, PANELS)                                                                 \
    DEFINE_TILE(BF16, ROWS, PANELS) DEFINE_TILE(F32, ROWS, PANELS) DEFINE_TILE(I8, ROWS, PANELS)
DEFINE_TILES(1, 1)
DEFINE_TILES(1, 4)
DEFINE_TILES(2, 1)
DEFINE_TILES(2, 2)
DEFINE_TILES(3, 1)
DEFINE_TILES(3, 2)
DEFINE_TILES(4, 1)
DEFINE_TILES(5, 1)
DEFINE_TILES(6, 1)
#undef BF16_STEP
#undef BF16_PAIR
#undef BF16_LOAD
#undef BF16_FETCH
#undef BF16_BYTES
#undef I8_STEP
#undef I8_PAIR
#undef I8_LOAD
#undef I8_FETCH
#undef I8_BYTES
#undef F32_STEP
#undef F32_PAIR
#undef F32_LOAD
#undef F32_FETCH
#undef F32_BYTES
#undef P1
#undef P2
#undef P3
#undef FETCH
#undef FETCH_1
#undef FETCH_2
#undef FETCH_4
#undef ZERO
#undef SAVE
#undef DEFINE_TILE
#undef DEFINE_TILES
