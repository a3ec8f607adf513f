/* The register blocks of the matmul for AVX-512, in assembly like those of cpu_tile_avx2.h and with
 * the same sums: acc[rows][panels][16] = x W^T over `panels` consecutive panels, every element as
 * one chain of multiply-adds over k. A vector holds the 16 columns of a panel, so a step costs one
 * multiply-add a row, and one byte shuffle widens its bfloat16 weights.
 *
 * zmm0..23: accumulators; zmm24..27: weights of a step, one a panel; zmm30: an activation; zmm31:
 * the shuffle. x is rows 0..2, y rows 3..5, z rows 6..8, u rows 9..11. */

#define BF16_STEP "32"
#define BF16_PAIR "64"
#define BF16_LOAD(at, panel, weight)                                                               \
    "vbroadcasti64x4 " at "(%[w]" panel "), %%zmm" weight "\n\t"                                   \
    "vpshufb %%zmm31, %%zmm" weight ", %%zmm" weight "\n\t"
#define F32_STEP "64"
#define F32_PAIR "128"
#define F32_LOAD(at, panel, weight) "vmovups " at "(%[w]" panel "), %%zmm" weight "\n\t"
#define I8_STEP "16"
#define I8_PAIR "32"
#define I8_LOAD(at, panel, weight)                                                                 \
    "vpmovsxbd " at "(%[w]" panel "), %%zmm" weight "\n\t"                                         \
    "vcvtdq2ps %%zmm" weight ", %%zmm" weight "\n\t"

#define P1 ",%[pb]"
#define P2 ",%[pb],2"
#define P3 ",%[pb3]"
#define LOAD_1(LOAD, b) LOAD(b, "", "24")
#define LOAD_2(LOAD, b) LOAD_1(LOAD, b) LOAD(b, P1, "25")
#define LOAD_4(LOAD, b) LOAD_2(LOAD, b) LOAD(b, P2, "26") LOAD(b, P3, "27")

/* acc of a row += weights * activation, for 1, 2 or 4 panels */
#define ROW_1(a, row, c0, c1, c2, c3)                                                              \
    "vfmadd231ps " a row "%{1to16%}, %%zmm24, %%zmm" c0 "\n\t"
#define ROW_2(a, row, c0, c1, c2, c3)                                                              \
    "vbroadcastss " a row ", %%zmm30\n\t"                                                          \
    "vfmadd231ps %%zmm30, %%zmm24, %%zmm" c0 "\n\t"                                                \
    "vfmadd231ps %%zmm30, %%zmm25, %%zmm" c1 "\n\t"
#define ROW_4(a, row, c0, c1, c2, c3)                                                              \
    ROW_2(a, row, c0, c1, c2, c3)                                                                  \
    "vfmadd231ps %%zmm30, %%zmm26, %%zmm" c2 "\n\t"                                                \
    "vfmadd231ps %%zmm30, %%zmm27, %%zmm" c3 "\n\t"

/* Rows 1, 2, ... of a k step: x displaced by `a`. Accumulators of a row stand side by side. */
#define R0 "(%[x])"
#define R1 "(%[x],%[ld])"
#define R2 "(%[x],%[ld],2)"
#define R3 "(%[y])"
#define R4 "(%[y],%[ld])"
#define R5 "(%[y],%[ld],2)"
#define R6 "(%[z])"
#define R7 "(%[z],%[ld])"
#define R8 "(%[z],%[ld],2)"
#define R9 "(%[u])"
#define R10 "(%[u],%[ld])"
#define R11 "(%[u],%[ld],2)"
#define ROWS_1x1(a) ROW_1(a, R0, "0", , , )
#define ROWS_2x1(a) ROWS_1x1(a) ROW_1(a, R1, "1", , , )
#define ROWS_3x1(a) ROWS_2x1(a) ROW_1(a, R2, "2", , , )
#define ROWS_4x1(a) ROWS_3x1(a) ROW_1(a, R3, "3", , , )
#define ROWS_5x1(a) ROWS_4x1(a) ROW_1(a, R4, "4", , , )
#define ROWS_6x1(a) ROWS_5x1(a) ROW_1(a, R5, "5", , , )
#define ROWS_7x1(a) ROWS_6x1(a) ROW_1(a, R6, "6", , , )
#define ROWS_8x1(a) ROWS_7x1(a) ROW_1(a, R7, "7", , , )
#define ROWS_9x1(a) ROWS_8x1(a) ROW_1(a, R8, "8", , , )
#define ROWS_10x1(a) ROWS_9x1(a) ROW_1(a, R9, "9", , , )
#define ROWS_11x1(a) ROWS_10x1(a) ROW_1(a, R10, "10", , , )
#define ROWS_12x1(a) ROWS_11x1(a) ROW_1(a, R11, "11", , , )
#define ROWS_1x2(a) ROW_2(a, R0, "0", "1", , )
#define ROWS_2x2(a) ROWS_1x2(a) ROW_2(a, R1, "2", "3", , )
#define ROWS_3x2(a) ROWS_2x2(a) ROW_2(a, R2, "4", "5", , )
#define ROWS_4x2(a) ROWS_3x2(a) ROW_2(a, R3, "6", "7", , )
#define ROWS_5x2(a) ROWS_4x2(a) ROW_2(a, R4, "8", "9", , )
#define ROWS_6x2(a) ROWS_5x2(a) ROW_2(a, R5, "10", "11", , )
#define ROWS_7x2(a) ROWS_6x2(a) ROW_2(a, R6, "12", "13", , )
#define ROWS_8x2(a) ROWS_7x2(a) ROW_2(a, R7, "14", "15", , )
#define ROWS_9x2(a) ROWS_8x2(a) ROW_2(a, R8, "16", "17", , )
#define ROWS_10x2(a) ROWS_9x2(a) ROW_2(a, R9, "18", "19", , )
#define ROWS_11x2(a) ROWS_10x2(a) ROW_2(a, R10, "20", "21", , )
#define ROWS_12x2(a) ROWS_11x2(a) ROW_2(a, R11, "22", "23", , )
#define ROWS_1x4(a) ROW_4(a, R0, "0", "1", "2", "3")
#define ROWS_2x4(a) ROWS_1x4(a) ROW_4(a, R1, "4", "5", "6", "7")
#define ROWS_3x4(a) ROWS_2x4(a) ROW_4(a, R2, "8", "9", "10", "11")

#define STEP(TYPE, ROWS, PANELS, a, b) LOAD_##PANELS(TYPE##_LOAD, b) ROWS_##ROWS##x##PANELS(a)

#define FETCH(at, panel) "prefetcht0 " at "(%[fetch]" panel ")\n\t"
#define FETCH_1(at) FETCH(at, "")
#define FETCH_2(at) FETCH_1(at) FETCH(at, P1)
#define FETCH_4(at) FETCH_2(at) FETCH(at, P2) FETCH(at, P3)
#define BF16_FETCH(panels) FETCH_##panels("0")
#define I8_FETCH(panels) FETCH_##panels("0")
#define F32_FETCH(panels) FETCH_##panels("0") FETCH_##panels("64")

#define ZERO(r) "vpxord %%zmm" r ", %%zmm" r ", %%zmm" r "\n\t"
#define SAVE(r, at) "vmovups %%zmm" r ", " at "(%[acc])\n\t"
#define SAVE_12                                                                                    \
    SAVE("0", "0") SAVE("1", "64") SAVE("2", "128") SAVE("3", "192") SAVE("4", "256")              \
    SAVE("5", "320") SAVE("6", "384") SAVE("7", "448") SAVE("8", "512") SAVE("9", "576")           \
    SAVE("10", "640") SAVE("11", "704")
#define SAVE_24                                                                                    \
    SAVE_12 SAVE("12", "768") SAVE("13", "832") SAVE("14", "896") SAVE("15", "960")                \
    SAVE("16", "1024") SAVE("17", "1088") SAVE("18", "1152") SAVE("19", "1216")                    \
    SAVE("20", "1280") SAVE("21", "1344") SAVE("22", "1408") SAVE("23", "1472")

/* Bytes that widen a step: low halves of the words for columns 0..7, high halves for 8..15. */
static const uint32_t widen_bf16[16] __attribute__((aligned(64))) = {
    0x0100ffff, 0x0504ffff, 0x0908ffff, 0x0d0cffff, 0x0100ffff, 0x0504ffff, 0x0908ffff, 0x0d0cffff,
    0x0302ffff, 0x0706ffff, 0x0b0affff, 0x0f0effff, 0x0302ffff, 0x0706ffff, 0x0b0affff, 0x0f0effff,
};

#define DEFINE_TILE(TYPE, ROWS, PANELS, SAVED)                                                     \
    ALWAYS_INLINE void ISA(tile_##TYPE##_##ROWS##x##PANELS)(                                       \
        const float *x, int64_t ldx, const char *w, int64_t panel_bytes, int64_t k, int64_t ahead, \
        float *acc)                                                                                \
    {                                                                                              \
        const float *y = x + 3 * ldx, *z = x + 6 * ldx, *u = x + 9 * ldx;                          \
        const char *fetch = w + ahead;                                                             \
        int64_t fetch_step = ahead ? 2 * TYPE##_BYTES : 0, pairs = k / 2;                          \
        __asm__ volatile("vmovdqa64 %[widen], %%zmm31\n\t"                                         \
                         ZERO("0") ZERO("1") ZERO("2") ZERO("3") ZERO("4") ZERO("5")               \
                         ZERO("6") ZERO("7") ZERO("8") ZERO("9") ZERO("10") ZERO("11")             \
                         ZERO("12") ZERO("13") ZERO("14") ZERO("15") ZERO("16") ZERO("17")         \
                         ZERO("18") ZERO("19") ZERO("20") ZERO("21") ZERO("22") ZERO("23")         \
                         "testq %[pairs], %[pairs]\n\t"                                            \
                         "jz 2f\n\t"                                                               \
                         ".p2align 5\n"                                                            \
                         "1:\n\t"                                                                  \
                         TYPE##_FETCH(PANELS)                                                      \
                         STEP(TYPE, ROWS, PANELS, "0", "0")                                        \
                         STEP(TYPE, ROWS, PANELS, "4", TYPE##_STEP)                                \
                         "addq $8, %[x]\n\t"                                                       \
                         "addq $8, %[y]\n\t"                                                       \
                         "addq $8, %[z]\n\t"                                                       \
                         "addq $8, %[u]\n\t"                                                       \
                         "addq $" TYPE##_PAIR ", %[w]\n\t"                                         \
                         "addq %[fetch_step], %[fetch]\n\t"                                        \
                         "decq %[pairs]\n\t"                                                       \
                         "jnz 1b\n"                                                                \
                         "2:\n\t"                                                                  \
                         "testb $1, %b[k]\n\t"                                                     \
                         "jz 3f\n\t"                                                               \
                         STEP(TYPE, ROWS, PANELS, "0", "0")                                        \
                         "3:\n\t"                                                                  \
                         SAVED                                                                     \
                         : [x] "+r"(x), [y] "+r"(y), [z] "+r"(z), [u] "+r"(u), [w] "+r"(w),        \
                           [fetch] "+r"(fetch), [pairs] "+r"(pairs)                                \
                         : [ld] "r"(4 * ldx), [pb] "r"(panel_bytes), [pb3] "r"(3 * panel_bytes),   \
                           [fetch_step] "r"(fetch_step), [k] "q"((int)k), [acc] "r"(acc),          \
                           [widen] "m"(widen_bf16)                                                 \
                         : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", \
                           "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14",    \
                           "xmm15", "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", \
                           "xmm23", "xmm24", "xmm25", "xmm26", "xmm27", "xmm30", "xmm31");         \
    }

#define BF16_BYTES 32
#define F32_BYTES 64
#define I8_BYTES 16
#define DEFINE_TILES(ROWS, PANELS, SAVED)                                                          \
    DEFINE_TILE(BF16, ROWS, PANELS, SAVED)                                                         \
    DEFINE_TILE(F32, ROWS, PANELS, SAVED)                                                          \
    DEFINE_TILE(I8, ROWS, PANELS, SAVED)
DEFINE_TILES(1, 1, SAVE_12)
DEFINE_TILES(2, 1, SAVE_12)
DEFINE_TILES(3, 1, SAVE_12)
DEFINE_TILES(4, 1, SAVE_12)
DEFINE_TILES(5, 1, SAVE_12)
DEFINE_TILES(6, 1, SAVE_12)
DEFINE_TILES(7, 1, SAVE_12)
DEFINE_TILES(8, 1, SAVE_12)
DEFINE_TILES(9, 1, SAVE_12)
DEFINE_TILES(10, 1, SAVE_12)
DEFINE_TILES(11, 1, SAVE_12)
DEFINE_TILES(12, 1, SAVE_12)
DEFINE_TILES(1, 4, SAVE_12)
DEFINE_TILES(2, 4, SAVE_12)
DEFINE_TILES(3, 4, SAVE_12)
DEFINE_TILES(4, 2, SAVE_12)
DEFINE_TILES(5, 2, SAVE_12)
DEFINE_TILES(6, 2, SAVE_12)
DEFINE_TILES(7, 2, SAVE_24)
DEFINE_TILES(8, 2, SAVE_24)
DEFINE_TILES(9, 2, SAVE_24)
DEFINE_TILES(10, 2, SAVE_24)
DEFINE_TILES(11, 2, SAVE_24)
DEFINE_TILES(12, 2, SAVE_24)
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
