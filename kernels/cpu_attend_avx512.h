/* One block of attention for AVX-512: a vector holds 8 lanes of each of two query heads, which read
 * the same keys and values. Every lane does what cpu_attention.h does, in the same order. Included
 * by it where AVX-512 code is compiled. */

/* Dot products of 8 keys with the query heads at `heads`, 2 for each of 1 or 2 results. */
ALWAYS_INLINE void ISA(score_pairs)(const int pairs, const ISA(query_head) * heads,
                                    const float *const key[8], int64_t head_dim, float *p,
                                    float *q)
{
    v16f first[8], second[8];
#pragma GCC unroll 8
    for (int t = 0; t < 8; t++)
        first[t] = second[t] = (v16f){0};
    for (int64_t d = 0; d < head_dim; d += 8) {
        v16f a = ISA(both)(ISA(load)(heads[0].query + d), ISA(load)(heads[1].query + d)), b = a;
        if (pairs == 2)
            b = ISA(both)(ISA(load)(heads[2].query + d), ISA(load)(heads[3].query + d));
#pragma GCC unroll 8
        for (int t = 0; t < 8; t++) {
            v16f k = ISA(twice)(key[t] + d);
            first[t] = a * k + first[t];
            if (pairs == 2)
                second[t] = b * k + second[t];
        }
    }
    ISA(store16)(p, ISA(transpose_sum16)(first));
    if (pairs == 2)
        ISA(store16)(q, ISA(transpose_sum16)(second));
}

/* As soften, for two heads whose scores alternate by 8 in p. */
ALWAYS_INLINE void ISA(soften_pair)(ISA(query_head) * heads, float *p, float scale)
{
    const v16i lane = {0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7};
    const v16f none = ISA(splat16)(-__builtin_inff());
    const v8i zero = {0};
    ISA(query_head) *a = &heads[0], *b = &heads[1];
    v16i first = (v16i)ISA(both)((v8f)(zero + a->first), (v8f)(zero + b->first));
    v16i count = (v16i)ISA(both)((v8f)(zero + a->count), (v8f)(zero + b->count));
    int begin = (a->first < b->first ? a->first : b->first) / 8 * 8;
    int end = a->count > b->count ? a->count : b->count;
    v16f before = ISA(both)(ISA(splat)(a->state->max), ISA(splat)(b->state->max)), best = before;
    for (int g = begin; g < end; g += 8) {
        __mmask16 valid = _mm512_cmpge_epi32_mask((__m512i)(lane + g), (__m512i)first) &
                          _mm512_cmplt_epi32_mask((__m512i)(lane + g), (__m512i)count);
        v16f score = ISA(load16)(p + 2 * g) * scale;
        score = (v16f)_mm512_mask_mov_ps((__m512)none, valid, (__m512)score);
        best = ISA(maximum16)(best, score);
        ISA(store16)(p + 2 * g, score);
    }
    best = ISA(max16)(best);
    v16f alpha = ISA(exp16)(before - best);
    v16f sum = ISA(both)(a->state->sum, b->state->sum) * alpha;
    for (int g = begin; g < end; g += 8) {
        v16f score = ISA(load16)(p + 2 * g);
        __mmask16 seen = _mm512_cmp_ps_mask((__m512)score, (__m512)none, _CMP_GT_OQ);
        v16f weight = (v16f)_mm512_maskz_mov_ps(seen, (__m512)ISA(exp16)(score - best));
        sum = sum + weight;
        ISA(store16)(p + 2 * g, weight);
    }
    a->state->sum = __builtin_shufflevector(sum, sum, 0, 1, 2, 3, 4, 5, 6, 7);
    b->state->sum = __builtin_shufflevector(sum, sum, 8, 9, 10, 11, 12, 13, 14, 15);
    a->state->max = best[0];
    b->state->max = best[8];
    a->alpha = alpha[0];
    b->alpha = alpha[8];
}

/* out[h][16 * vectors] += sum over t in [first, count) of weight[h][t] * values[slots[t]], where
 * a head's weights are by 8, every other 8 its own. */
ALWAYS_INLINE void ISA(accumulate16)(const int heads, const int vectors, float *const *out,
                                     const float *const *weights, const float *values,
                                     const int32_t *slots, int64_t stride, int first, int count)
{
    v16f acc[4][4];
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++)
            acc[h][i] = ISA(load16)(out[h] + 16 * i);
    for (int t = first; t < count; t++) {
        const float *value = values + slots[t] * stride;
        int at = (t & ~7) + t;
        v16f v[4];
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++)
            v[i] = ISA(load16)(value + 16 * i);
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) {
            v16f weight = ISA(splat16)(weights[h][at]);
#pragma GCC unroll 4
            for (int i = 0; i < vectors; i++)
                acc[h][i] = v[i] * weight + acc[h][i];
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++)
            ISA(store16)(out[h] + 16 * i, acc[h][i]);
}

/* Ranks [first, count) of `used` query heads, a multiple of 16 of their elements. */
ALWAYS_INLINE void ISA(weigh16)(const int used, const ISA(query_head) * heads,
                                const float *const *weights, const float *values,
                                const int32_t *slots, int64_t stride, int64_t dim, int first,
                                int count)
{
    float *out[4];
    int64_t d = 0;
    if (first >= count)
        return;
#pragma GCC unroll 4
    for (int h = 0; h < used; h++)
        out[h] = heads[h].out;
    for (; d < dim; d += d + 64 <= dim ? 64 : 16) {
        if (d + 64 <= dim)
            ISA(accumulate16)(used, 4, out, weights, values + d, slots, stride, first, count);
        else
            ISA(accumulate16)(used, 1, out, weights, values + d, slots, stride, first, count);
#pragma GCC unroll 4
        for (int h = 0; h < used; h++)
            out[h] += d + 64 <= dim ? 64 : 16;
    }
}

/* `used` query heads: the ranks that all see together, the others before and after. */
ALWAYS_INLINE void ISA(weigh_heads)(const int used, const ISA(query_head) * heads, const float *p,
                                    const float *values, const int32_t *slots, int64_t stride,
                                    int64_t dim)
{
    const float *weights[4];
    int first = heads[0].first, count = heads[0].count;
#pragma GCC unroll 4
    for (int h = 0; h < used; h++) {
        weights[h] = p + h / 2 * 2 * KEY_BLOCK + h % 2 * 8;
        first = heads[h].first > first ? heads[h].first : first;
        count = heads[h].count < count ? heads[h].count : count;
    }
    count = count > first ? count : first;
    for (int h = 0; h < used; h++)
        ISA(weigh16)(1, heads + h, weights + h, values, slots, stride, dim, heads[h].first,
                     first < heads[h].count ? first : heads[h].count);
    ISA(weigh16)(used, heads, weights, values, slots, stride, dim, first, count);
    for (int h = 0; h < used; h++)
        ISA(weigh16)(1, heads + h, weights + h, values, slots, stride, dim, count, heads[h].count);
}

/* As attend_block, of an even number of heads and a head_dim that is a multiple of 16. */
static void ISA(attend_pairs)(const attention_args *a, int64_t kv_head, ISA(query_head) * heads,
                              int num_heads, const int32_t *slots, int count)
{
    float p[HEAD_TILE / 2][2 * KEY_BLOCK] __attribute__((aligned(64)));
    int64_t stride = a->kv_heads * a->head_dim, dim = a->head_dim;
    const float *keys = a->keys + kv_head * dim, *values = a->values + kv_head * dim;
    int h;
    for (int g = 0; g < count; g += 8) {
        const float *key[8];
        for (int t = 0; t < 8; t++) {
            int64_t offset = slots[g + t < count ? g + t : count - 1] * stride;
            key[t] = keys + offset;
            for (int64_t line = 0; line < dim; line += 16)
                __builtin_prefetch(values + offset + line);
        }
        for (h = 0; h + 4 <= num_heads; h += 4)
            ISA(score_pairs)(2, heads + h, key, dim, p[h / 2] + 2 * g, p[h / 2 + 1] + 2 * g);
        if (h < num_heads)
            ISA(score_pairs)(1, heads + h, key, dim, p[h / 2] + 2 * g, NULL);
    }
    for (h = 0; h < num_heads; h += 2)
        ISA(soften_pair)(heads + h, p[h / 2], a->scale);
    for (h = 0; h < num_heads; h++)
        if (heads[h].alpha != 1.0f)
            for (int64_t d = 0; d < dim; d += 16)
                ISA(store16)(heads[h].out + d, ISA(load16)(heads[h].out + d) * heads[h].alpha);
    for (h = 0; h + 4 <= num_heads; h += 4)
        ISA(weigh_heads)(4, heads + h, p[h / 2], values, slots, stride, dim);
    if (h < num_heads)
        ISA(weigh_heads)(2, heads + h, p[h / 2], values, slots, stride, dim);
}
