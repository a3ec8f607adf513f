/* out = x W^T for packed W; included once per instruction set.
 *
 * Every output element is one chain of multiply-adds over k = 0, 1, ..., K - 1 that starts from
 * zero, whatever the number of rows and wherever the row stands: results are bit-identical for
 * every batch shape. The register block changes with the rows, the chain does not. */

#define MAX_ROWS 6
/* Bytes before its use that a panel is fetched; measured on Zen 3, flat around these values. */
#define AHEAD_FEW 1024
#define AHEAD_MANY 8192

/* Widen one k step of a panel: columns 0..7 to lo, 8..15 to hi. */
ALWAYS_INLINE void ISA(widen)(const char *step, const int is_float32, v8f *lo, v8f *hi)
{
    if (is_float32) {
        *lo = ISA(load)((const float *)step);
        *hi = ISA(load)((const float *)step + 8);
    } else {
        v8u pair = *(const v8u_unaligned *)step;
        *lo = (v8f)(pair << 16);
        *hi = (v8f)(pair & 0xffff0000u);
    }
}

/* acc += w * x. Left to itself the compiler picks forms that overwrite a factor, and then runs
 * out of registers in the widest block. */
#undef MULTIPLY_ADD
#ifdef FUSED_MULTIPLY_ADD
#define MULTIPLY_ADD(acc, w, x) __asm__("vfmadd231ps %2, %1, %0" : "+x"(acc) : "x"(w), "x"(x))
#else
#define MULTIPLY_ADD(acc, w, x) acc = (w) * (x) + acc
#endif

/* One k step of a register block. */
ALWAYS_INLINE void ISA(step)(const int rows, const int panels, const int is_float32,
                             const float *x, int64_t ldx, const char *w, int64_t panel_bytes,
                             v8f sum[MAX_ROWS][8])
{
#pragma GCC unroll 4
    for (int p = 0; p < panels; p++) {
        v8f lo, hi;
        ISA(widen)(w + p * panel_bytes, is_float32, &lo, &hi);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            v8f value = ISA(splat)(x[r * ldx]);
            MULTIPLY_ADD(sum[r][2 * p], lo, value);
            MULTIPLY_ADD(sum[r][2 * p + 1], hi, value);
        }
        /* Fences keep the scheduler from mixing steps, which would spill the accumulators. */
        if (rows > 1)
            __asm__ volatile("" ::: "memory");
    }
}

/* acc[row][2 * panel + half] over `panels` consecutive panels; rows and panels are constants.
 * `ahead`: how far before its use a panel is fetched, or 0 when it is in the cache already. */
ALWAYS_INLINE void ISA(tile)(const int rows, const int panels, const int is_float32,
                             const float *x, int64_t ldx, const char *w, int64_t panel_bytes,
                             int64_t k_size, int64_t ahead, v8f acc[MAX_ROWS][8])
{
    const int step_bytes = is_float32 ? 4 * PANEL : 2 * PANEL;
    const char *fetch = w + ahead;
    int64_t fetch_step = ahead ? 2 * step_bytes : 0, k = 0;
    v8f sum[MAX_ROWS][8];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < 2 * panels; c++)
            sum[r][c] = (v8f){0};
#pragma GCC unroll 2
    for (; k + 2 <= k_size; k += 2, w += 2 * step_bytes, x += 2, fetch += fetch_step) {
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            __builtin_prefetch(fetch + p * panel_bytes);
            if (is_float32)
                __builtin_prefetch(fetch + p * panel_bytes + 64);
        }
        ISA(step)(rows, panels, is_float32, x, ldx, w, panel_bytes, sum);
        ISA(step)(rows, panels, is_float32, x + 1, ldx, w + step_bytes, panel_bytes, sum);
    }
    if (k < k_size)
        ISA(step)(rows, panels, is_float32, x, ldx, w, panel_bytes, sum);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < 2 * panels; c++)
            acc[r][c] = sum[r][c];
}

ALWAYS_INLINE void ISA(write_panel)(const packed_matrix *m, int64_t panel, const v8f acc[2],
                                    float *out, int epilogue)
{
    v8f lo = acc[0], hi = acc[1];
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

/* One register block: `rows` rows against `panels` panels from `panel` on. */
ALWAYS_INLINE void ISA(block)(const int rows, const int panels, const packed_matrix *m,
                              int64_t panel, const float *x, int64_t ldx, float *out, int64_t ldo,
                              int epilogue, int64_t ahead)
{
    int64_t panel_bytes = m->k * PANEL * (m->is_float32 ? 4 : 2);
    const char *w = (const char *)m->data + panel * panel_bytes;
    v8f acc[MAX_ROWS][8];
    if (m->is_float32)
        ISA(tile)(rows, panels, 1, x, ldx, w, panel_bytes, m->k, ahead, acc);
    else
        ISA(tile)(rows, panels, 0, x, ldx, w, panel_bytes, m->k, ahead, acc);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
            ISA(write_panel)(m, panel + p, &acc[r][2 * p], out + r * ldo, epilogue);
}

#define DEFINE_BLOCK(ROWS, PANELS)                                                                 \
    static __attribute__((noinline)) void ISA(block_##ROWS##x##PANELS)(                            \
        const packed_matrix *m, int64_t panel, const float *x, int64_t ldx, float *out,            \
        int64_t ldo, int epilogue, int64_t ahead)                                                  \
    {                                                                                              \
        ISA(block)(ROWS, PANELS, m, panel, x, ldx, out, ldo, epilogue, ahead);                     \
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
