/* out = x W^T for packed W; included once per instruction set.
 *
 * Every output element is one chain of multiply-adds over k = 0, 1, ..., K - 1 that starts from
 * zero, whatever the number of rows and wherever the row stands: results are bit-identical for
 * every batch shape. The register block changes with the rows, the chain does not. */

#ifdef HAS_AVX512
#define MAX_ROWS 12
#define TILE_FLOATS (24 * 16)
#else
#define MAX_ROWS 6
#define TILE_FLOATS (12 * 8)
#endif
/* Bytes before its use that a panel is fetched; measured, flat around these values. */
#define AHEAD_FOUR 1024
#define AHEAD_TWO 2048
#define AHEAD_ONE 8192
#define NEXT_BLOCK 16384 /* beside the present one, this much of the next fits the first cache */

#ifndef FUSED_MULTIPLY_ADD
/* The register block in C, see cpu_tile_avx2.h: acc[rows][2 * panels][8]. */
ALWAYS_INLINE void ISA(tile)(const int rows, const int panels, const int type, const float *x,
                             int64_t ldx, const char *w, int64_t panel_bytes,
                             int64_t k_size, float *acc)
{
    const int64_t step_bytes = cpu_weight_bytes(type) * PANEL;
    v8f sum[12];
    for (int i = 0; i < 2 * rows * panels; i++)
        sum[i] = (v8f){0};
    for (int64_t k = 0; k < k_size; k++)
        for (int p = 0; p < panels; p++) {
            const char *step = w + p * panel_bytes + k * step_bytes;
            v8f lo, hi;
            if (type == WEIGHTS_I8) {
                lo = __builtin_convertvector(*(const v8c *)step, v8f);
                hi = __builtin_convertvector(*(const v8c *)(step + 8), v8f);
            } else if (type == WEIGHTS_F32) {
                lo = ISA(load)((const float *)step);
                hi = ISA(load)((const float *)step + 8);
            } else {
                v8u pair = *(const v8u_unaligned *)step;
                lo = (v8f)(pair << 16);
                hi = (v8f)(pair & 0xffff0000u);
            }
            for (int r = 0; r < rows; r++) {
                v8f *pair_of_sums = &sum[2 * (r * panels + p)];
                pair_of_sums[0] = lo * x[r * ldx + k] + pair_of_sums[0];
                pair_of_sums[1] = hi * x[r * ldx + k] + pair_of_sums[1];
            }
        }
    for (int i = 0; i < 2 * rows * panels; i++)
        ISA(store)(acc + 8 * i, sum[i]);
}
#endif

ALWAYS_INLINE void ISA(write_panel)(const packed_matrix *m, int64_t panel, const float *acc,
                                    float *out, int epilogue)
{
    v8f lo = ISA(load)(acc), hi = ISA(load)(acc + 8);
    if (m->type == WEIGHTS_I8) {
        lo = lo * ISA(load)(m->scales + panel * PANEL);
        hi = hi * ISA(load)(m->scales + panel * PANEL + 8);
    }
    if (m->bias) {
        lo = lo + ISA(load)(m->bias + panel * PANEL);
        hi = hi + ISA(load)(m->bias + panel * PANEL + 8);
    }
    if (epilogue == EPILOGUE_SILU_MUL) {
        ISA(store)(out + panel * 8, ISA(silu8)(lo) * hi);
        return;
    }
    out += panel * PANEL;
    int64_t valid = m->n - panel * PANEL;
    if (valid >= PANEL) {
        if (epilogue == EPILOGUE_ADD) {
            lo = lo + ISA(load)(out);
            hi = hi + ISA(load)(out + 8);
        }
        ISA(store)(out, lo);
        ISA(store)(out + 8, hi);
        return;
    }
    float last[PANEL];
    ISA(store)(last, lo);
    ISA(store)(last + 8, hi);
    for (int64_t c = 0; c < valid; c++)
        out[c] = epilogue == EPILOGUE_ADD ? last[c] + out[c] : last[c];
}

#ifdef FUSED_MULTIPLY_ADD
#define TILE(TYPE, ROWS, PANELS)                                                                   \
    ISA(tile_##TYPE##_##ROWS##x##PANELS)(x, ldx, w, panel_bytes, m->k, ahead, acc)
#else
#define TILE(TYPE, ROWS, PANELS)                                                                   \
    ISA(tile)(ROWS, PANELS, WEIGHTS_##TYPE, x, ldx, w, panel_bytes, m->k, acc)
#endif

/* One register block: ROWS rows against PANELS panels from `panel` on, fetching `ahead` bytes. */
#define DEFINE_BLOCK(ROWS, PANELS)                                                                 \
    static __attribute__((noinline)) void ISA(block_##ROWS##x##PANELS)(                            \
        const packed_matrix *m, int64_t panel, const float *x, int64_t ldx, float *out,            \
        int64_t ldo, int epilogue, int64_t ahead)                                                  \
    {                                                                                              \
        int64_t panel_bytes = m->k * PANEL * cpu_weight_bytes(m->type);                            \
        const char *w = (const char *)m->data + panel * panel_bytes;                               \
        float acc[TILE_FLOATS];                                                                    \
        (void)ahead;                                                                               \
        if (m->type == WEIGHTS_BF16)                                                               \
            TILE(BF16, ROWS, PANELS);                                                              \
        else if (m->type == WEIGHTS_F32)                                                           \
            TILE(F32, ROWS, PANELS);                                                               \
        else                                                                                       \
            TILE(I8, ROWS, PANELS);                                                                \
        for (int r = 0; r < ROWS; r++)                                                             \
            for (int p = 0; p < PANELS; p++)                                                       \
                ISA(write_panel)(m, panel + p, acc + 16 * (r * PANELS + p), out + r * ldo,         \
                                 epilogue);                                                        \
    }

DEFINE_BLOCK(1, 1)
DEFINE_BLOCK(1, 4)
DEFINE_BLOCK(2, 1)
DEFINE_BLOCK(3, 1)
DEFINE_BLOCK(4, 1)
DEFINE_BLOCK(5, 1)
DEFINE_BLOCK(6, 1)
#ifdef HAS_AVX512
DEFINE_BLOCK(2, 4)
DEFINE_BLOCK(3, 4)
DEFINE_BLOCK(4, 2)
DEFINE_BLOCK(5, 2)
DEFINE_BLOCK(6, 2)
DEFINE_BLOCK(7, 1)
DEFINE_BLOCK(7, 2)
DEFINE_BLOCK(8, 1)
DEFINE_BLOCK(8, 2)
DEFINE_BLOCK(9, 1)
DEFINE_BLOCK(9, 2)
DEFINE_BLOCK(10, 1)
DEFINE_BLOCK(10, 2)
DEFINE_BLOCK(11, 1)
DEFINE_BLOCK(11, 2)
DEFINE_BLOCK(12, 1)
DEFINE_BLOCK(12, 2)
#else
DEFINE_BLOCK(2, 2)
DEFINE_BLOCK(3, 2)
#endif
#undef DEFINE_BLOCK
#undef TILE

/* The block of a number of rows that takes the most panels at a time, and that of one panel. */
typedef void (*ISA(block))(const packed_matrix *, int64_t, const float *, int64_t, float *, int64_t,
                           int, int64_t);
typedef struct {
    ISA(block) wide, narrow;
    int panels;
} ISA(blocks);

#define BLOCKS(ROWS, PANELS) {ISA(block_##ROWS##x##PANELS), ISA(block_##ROWS##x1), PANELS}
static const ISA(blocks) ISA(blocks_of)[MAX_ROWS + 1] = {
    {NULL, NULL, 0},
    BLOCKS(1, 4),
#ifdef HAS_AVX512
    BLOCKS(2, 4), BLOCKS(3, 4), BLOCKS(4, 2), BLOCKS(5, 2), BLOCKS(6, 2), BLOCKS(7, 2),
    BLOCKS(8, 2), BLOCKS(9, 2), BLOCKS(10, 2), BLOCKS(11, 2), BLOCKS(12, 2),
#else
    BLOCKS(2, 2), BLOCKS(3, 2), BLOCKS(4, 1), BLOCKS(5, 1), BLOCKS(6, 1),
#endif
};
#undef BLOCKS

/* How far ahead a block of panels is fetched. Small blocks are computed while all of the next one is
 * fetched: within a panel, the first lines of every panel would come too late. */
ALWAYS_INLINE int64_t ISA(ahead)(int panels, int64_t panel_bytes)
{
    if (panels > 2)
        return AHEAD_FOUR;
    if (panels * panel_bytes <= NEXT_BLOCK)
        return panels * panel_bytes;
    return panels > 1 ? AHEAD_TWO : AHEAD_ONE;
}

/* All panels for at most MAX_ROWS rows, several panels at a time where rows are few. */
static void ISA(matmul_few)(const packed_matrix *m, const float *x, int64_t ldx, int64_t rows,
                            float *out, int64_t ldo, int epilogue)
{
    const ISA(blocks) *of = &ISA(blocks_of)[rows];
    int64_t panel = 0, panel_bytes = m->k * PANEL * cpu_weight_bytes(m->type);
    int64_t ahead = ISA(ahead)(of->panels, panel_bytes);
    for (; panel + of->panels <= m->panels; panel += of->panels)
        of->wide(m, panel, x, ldx, out, ldo, epilogue, ahead);
    for (; panel < m->panels; panel++)
        of->narrow(m, panel, x, ldx, out, ldo, epilogue, ahead);
}

/* out[rows, ldo] (op)= x[rows, ldx] W^T. SILU_MUL writes panels * 8 columns, ADD and STORE n. */
static void ISA(matmul)(const packed_matrix *m, const float *x, int64_t ldx, int64_t rows,
                        float *out, int64_t ldo, int epilogue)
{
    if (rows <= MAX_ROWS) {
        if (rows > 0)
            ISA(matmul_few)(m, x, ldx, rows, out, ldo, epilogue);
        return;
    }
    /* The rows of a tile stay in the second-level cache while the panels stream past. */
    int64_t tile_rows = (256 * 1024 / 4) / m->k / MAX_ROWS * MAX_ROWS;
    if (tile_rows < 4 * MAX_ROWS)
        tile_rows = 4 * MAX_ROWS;
    for (int64_t begin = 0; begin < rows;) {
        int64_t left = rows - begin;
        int64_t tile = left <= tile_rows + MAX_ROWS ? left : tile_rows;
        int64_t blocks = (tile + MAX_ROWS - 1) / MAX_ROWS;
        for (int64_t panel = 0; panel < m->panels; panel++) {
            int64_t row = begin, ahead = AHEAD_ONE;
            for (int64_t b = 0; b < blocks; b++) {
                int64_t count = (tile + b) / blocks; /* sizes differ by at most one */
                ISA(blocks_of)
                [count].narrow(m, panel, x + row * ldx, ldx, out + row * ldo, ldo, epilogue, ahead);
                row += count;
                ahead = 0;
            }
        }
        begin += tile;
    }
}
#undef MAX_ROWS
#undef TILE_FLOATS
