/* out = x W^T for packed W; included once per instruction set.
 *
 * Every output element is one chain of multiply-adds over k = 0, 1, ..., K - 1 that starts from
 * zero, whatever the number of rows and wherever the row stands: results are bit-identical for
 * every batch shape. The register block changes with the rows, the chain does not. */

#define MAX_ROWS 6
#define TILE_FLOATS (12 * 8)
/* Bytes before its use that a panel is fetched; measured on Zen 3, flat around these values. */
#define AHEAD_FEW 1024
#define AHEAD_MANY 8192

#ifndef FUSED_MULTIPLY_ADD
/* The register block in C, see cpu_tile_avx2.h: acc[rows][2 * panels][8]. */
ALWAYS_INLINE void ISA(tile)(const int rows, const int panels, const int is_float32,
                             const float *x, int64_t ldx, const char *w, int64_t panel_bytes,
                             int64_t k_size, float *acc)
{
    const int step_bytes = is_float32 ? 4 * PANEL : 2 * PANEL;
    v8f sum[12];
    for (int i = 0; i < 2 * rows * panels; i++)
        sum[i] = (v8f){0};
    for (int64_t k = 0; k < k_size; k++)
        for (int p = 0; p < panels; p++) {
            const char *step = w + p * panel_bytes + k * step_bytes;
            v8f lo, hi;
            if (is_float32) {
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
#define TILE(TYPE, IS_F32, ROWS, PANELS)                                                           \
    tile_##TYPE##_##ROWS##x##PANELS(x, ldx, w, panel_bytes, m->k, ahead, acc)
#else
#define TILE(TYPE, IS_F32, ROWS, PANELS)                                                           \
    ISA(tile)(ROWS, PANELS, IS_F32, x, ldx, w, panel_bytes, m->k, acc)
#endif

/* One register block: ROWS rows against PANELS panels from `panel` on, fetching `ahead` bytes. */
#define DEFINE_BLOCK(ROWS, PANELS)                                                                 \
    static __attribute__((noinline)) void ISA(block_##ROWS##x##PANELS)(                            \
        const packed_matrix *m, int64_t panel, const float *x, int64_t ldx, float *out,            \
        int64_t ldo, int epilogue, int64_t ahead)                                                  \
    {                                                                                              \
        int64_t panel_bytes = m->k * PANEL * (m->is_float32 ? 4 : 2);                              \
        const char *w = (const char *)m->data + panel * panel_bytes;                               \
        float acc[TILE_FLOATS];                                                                    \
        (void)ahead;                                                                               \
        if (m->is_float32)                                                                         \
            TILE(F32, 1, ROWS, PANELS);                                                            \
        else                                                                                       \
            TILE(BF16, 0, ROWS, PANELS);                                                           \
        for (int r = 0; r < ROWS; r++)                                                             \
            for (int p = 0; p < PANELS; p++)                                                       \
                ISA(write_panel)(m, panel + p, acc + 16 * (r * PANELS + p), out + r * ldo,         \
                                 epilogue);                                                        \
    }

DEFINE_BLOCK(1, 1)
DEFINE_BLOCK(1, 4)
DEFINE_BLOCK(2, 1)
DEFINE_BLOCK(2, 2)
DEFINE_BLOCK(3, 1)
DEFINE_BLOCK(3, 2)
DEFINE_BLOCK(4, 1)
DEFINE_BLOCK(5, 1)
DEFINE_BLOCK(6, 1)
#undef DEFINE_BLOCK
#undef TILE

/* All panels for at most MAX_ROWS rows, several panels at a time where rows are few. */
static void ISA(matmul_few)(const packed_matrix *m, const float *x, int64_t ldx, int64_t rows,
                            float *out, int64_t ldo, int epilogue)
{
    int64_t panel = 0;
    if (rows == 1) {
        for (; panel + 4 <= m->panels; panel += 4)
            ISA(block_1x4)(m, panel, x, ldx, out, ldo, epilogue, AHEAD_FEW);
        for (; panel < m->panels; panel++)
            ISA(block_1x1)(m, panel, x, ldx, out, ldo, epilogue, AHEAD_FEW);
    } else if (rows == 2) {
        for (; panel + 2 <= m->panels; panel += 2)
            ISA(block_2x2)(m, panel, x, ldx, out, ldo, epilogue, AHEAD_FEW);
        for (; panel < m->panels; panel++)
            ISA(block_2x1)(m, panel, x, ldx, out, ldo, epilogue, AHEAD_FEW);
    } else {
        for (; panel + 2 <= m->panels; panel += 2)
            ISA(block_3x2)(m, panel, x, ldx, out, ldo, epilogue, AHEAD_FEW);
        for (; panel < m->panels; panel++)
            ISA(block_3x1)(m, panel, x, ldx, out, ldo, epilogue, AHEAD_FEW);
    }
}

/* out[rows, ldo] (op)= x[rows, ldx] W^T. SILU_MUL writes panels * 8 columns, ADD and STORE n. */
static void ISA(matmul)(const packed_matrix *m, const float *x, int64_t ldx, int64_t rows,
                        float *out, int64_t ldo, int epilogue)
{
    if (rows <= 3) {
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
            int64_t row = begin, ahead = AHEAD_MANY;
            for (int64_t b = 0; b < blocks; b++) {
                int64_t count = (tile + b) / blocks; /* sizes differ by at most one */
                const float *xb = x + row * ldx;
                float *ob = out + row * ldo;
                switch (count) {
                case 6: ISA(block_6x1)(m, panel, xb, ldx, ob, ldo, epilogue, ahead); break;
                case 5: ISA(block_5x1)(m, panel, xb, ldx, ob, ldo, epilogue, ahead); break;
                case 4: ISA(block_4x1)(m, panel, xb, ldx, ob, ldo, epilogue, ahead); break;
                default: ISA(block_3x1)(m, panel, xb, ldx, ob, ldo, epilogue, ahead);
                }
                row += count;
                ahead = 0;
            }
        }
        begin += tile;
    }
}
