/* Ragged attention over paged KV; included once per instruction set.
 *
 * A query's visible keys are numbered by rank: its position for plain rows, and for tree nodes
 * the earlier tokens followed by the node's ancestors. Keys are taken in blocks of 32 ranks that
 * start at rank 0, each block in one fixed order, so a token's output is bit-identical alone, in
 * any batch, chunked or not, in a tree or in a chain. */

#define KEY_BLOCK 32

/* Scores of 8 keys against one query; a key index past `last` repeats `last`. */
ALWAYS_INLINE v8f ISA(score8)(const float *query, const float *keys, const int32_t *slots,
                              int last, int64_t stride, int64_t head_dim)
{
    const float *key[8];
    v8f sum[8];
    for (int t = 0; t < 8; t++) {
        key[t] = keys + slots[t < last ? t : last] * stride;
        sum[t] = (v8f){0};
    }
    for (int64_t d = 0; d < head_dim; d += 8) {
        v8f q = ISA(load)(query + d);
#pragma GCC unroll 8
        for (int t = 0; t < 8; t++)
            sum[t] = q * ISA(load)(key[t] + d) + sum[t];
    }
    return ISA(transpose_sum)(sum);
}

/* out[8 * vectors] = alpha * out + sum over t in [first, count) of p[t] * values[slots[t]] */
ALWAYS_INLINE void ISA(weigh)(const int vectors, float *out, float alpha, const float *p,
                              const float *values, const int32_t *slots, int first, int count,
                              int64_t stride)
{
    v8f acc[8];
#pragma GCC unroll 8
    for (int i = 0; i < vectors; i++)
        acc[i] = ISA(load)(out + 8 * i) * alpha;
    for (int t = first; t < count; t++) {
        const float *value = values + slots[t] * stride;
#pragma GCC unroll 8
        for (int i = 0; i < vectors; i++)
            acc[i] = ISA(load)(value + 8 * i) * p[t] + acc[i];
    }
#pragma GCC unroll 8
    for (int i = 0; i < vectors; i++)
        ISA(store)(out + 8 * i, acc[i]);
}

/* Fold ranks [first, count) of one block, whose slots are given, into a query head's result. */
static void ISA(attend_block)(const float *query, const float *keys, const float *values,
                              const int32_t *slots, int first, int count, int64_t stride,
                              int64_t head_dim, float scale, softmax_state *state, float *out)
{
    float p[KEY_BLOCK] __attribute__((aligned(32)));
    v8f score[KEY_BLOCK / 8];
    v8f best = ISA(splat)(-__builtin_inff());
    const v8i lane = {0, 1, 2, 3, 4, 5, 6, 7};
    int groups = (count + 7) / 8;
    for (int g = first / 8; g < groups; g++) {
        v8i rank = lane + 8 * g;
        v8i valid = (rank >= first) & (rank < count);
        score[g] = ISA(score8)(query, keys, slots + 8 * g, count - 1 - 8 * g, stride, head_dim);
        score[g] = ISA(select)(valid, score[g] * scale, ISA(splat)(-__builtin_inff()));
        best = ISA(maximum)(score[g], best);
    }
    float block_max = ISA(max8)(best);
    float new_max = block_max > state->max ? block_max : state->max;
    float alpha = ISA(exp8)(ISA(splat)(state->max - new_max))[0];
    v8f sum = state->sum * alpha;
    for (int g = first / 8; g < groups; g++) {
        v8i rank = lane + 8 * g;
        v8i valid = (rank >= first) & (rank < count);
        v8f weight = ISA(exp8)(score[g] - new_max);
        weight = ISA(select)(valid, weight, (v8f){0});
        sum = sum + weight;
        ISA(store)(p + 8 * g, weight);
    }
    state->max = new_max;
    state->sum = sum;
    int64_t d = 0;
    for (; d + 64 <= head_dim; d += 64)
        ISA(weigh)(8, out + d, alpha, p, values + d, slots, first, count, stride);
    for (; d < head_dim; d += 8)
        ISA(weigh)(1, out + d, alpha, p, values + d, slots, first, count, stride);
}

/* Ranks from `begin` (a block boundary) to `visible` of the query heads of one group. */
static void ISA(attend_range)(const attention_args *a, int64_t token, int64_t kv_head,
                              const int32_t *slots, int64_t begin, int64_t end, int64_t visible,
                              softmax_state *states)
{
    int64_t group = a->heads / a->kv_heads, stride = a->kv_heads * a->head_dim;
    int64_t low = a->window && visible > a->window ? visible - a->window : 0;
    const float *keys = a->keys + kv_head * a->head_dim;
    const float *values = a->values + kv_head * a->head_dim;
    if (begin < low / KEY_BLOCK * KEY_BLOCK) {
        slots += low / KEY_BLOCK * KEY_BLOCK - begin;
        begin = low / KEY_BLOCK * KEY_BLOCK;
    }
    for (; begin < end; begin += KEY_BLOCK, slots += KEY_BLOCK) {
        int count = end - begin < KEY_BLOCK ? (int)(end - begin) : KEY_BLOCK;
        int first = low > begin ? (int)(low - begin) : 0;
        for (int64_t h = 0; h < group; h++) {
            int64_t offset = (token * a->heads + kv_head * group + h) * a->head_dim;
            ISA(attend_block)(a->query + offset, keys, values, slots, first, count, stride,
                              a->head_dim, a->scale, &states[h], a->out + offset);
        }
    }
}

/* The keys of a tree node after the last block that all nodes share: gathered, then attended. */
static void ISA(attend_tree_tail)(const attention_args *a, int64_t token, int64_t kv_head,
                                  const int32_t *slots, int64_t shared, int64_t start,
                                  uint64_t bits, softmax_state *states)
{
    int64_t count = 0;
    for (int64_t i = shared; i < start; i++)
        a->gathered[count++] = slots[i];
    for (int node = 0; bits; node++, bits >>= 1)
        if (bits & 1)
            a->gathered[count++] = slots[start + node];
    ISA(attend_range)(a, token, kv_head, a->gathered, shared, shared + count, shared + count,
                      states);
}

static void ISA(attend_row)(const attention_args *a, const ragged_batch *batch, int64_t row,
                            const int32_t *slots)
{
    int64_t group = a->heads / a->kv_heads;
    int64_t first = batch->cu_q[row], count = batch->cu_q[row + 1] - first;
    int64_t kv_len = batch->kv_lens[row], start = kv_len - count;
    int tree = batch->is_tree[row];
    int64_t shared = tree ? start / KEY_BLOCK * KEY_BLOCK : kv_len;
    for (int64_t g = 0; g < a->kv_heads; g++) {
        for (int64_t i = 0; i < count; i++) {
            for (int64_t h = 0; h < group; h++)
                a->states[i * group + h] = (softmax_state){{0}, -__builtin_inff()};
            float *out = a->out + ((first + i) * a->heads + g * group) * a->head_dim;
            for (int64_t d = 0; d < group * a->head_dim; d++)
                out[d] = 0.0f;
        }
        /* Block by block, so that a block's keys and values serve all queries from the cache. */
        for (int64_t begin = 0; begin < shared; begin += KEY_BLOCK)
            for (int64_t i = 0; i < count; i++) {
                int64_t visible = tree ? start + __builtin_popcountll(batch->tree_bits[first + i])
                                       : start + i + 1;
                int64_t end = begin + KEY_BLOCK < visible ? begin + KEY_BLOCK : visible;
                ISA(attend_range)(a, first + i, g, slots + begin, begin, end, visible,
                                  a->states + i * group);
            }
        for (int64_t i = 0; i < count; i++) {
            if (tree)
                ISA(attend_tree_tail)(a, first + i, g, slots, shared, start,
                                      (uint64_t)batch->tree_bits[first + i],
                                      a->states + i * group);
            for (int64_t h = 0; h < group; h++) {
                float *out = a->out + ((first + i) * a->heads + g * group + h) * a->head_dim;
                float inverse = 1.0f / ISA(sum8)(a->states[i * group + h].sum);
                for (int64_t d = 0; d < a->head_dim; d += 8)
                    ISA(store)(out + d, ISA(load)(out + d) * inverse);
            }
        }
    }
}

/* slots: the rows' slot lists, one after another. */
static void ISA(attention)(const attention_args *a, const ragged_batch *batch,
                           const int32_t *slots)
{
    for (int64_t row = 0; row < batch->num_rows; row++) {
        ISA(attend_row)(a, batch, row, slots);
        slots += batch->kv_lens[row];
    }
}
