/* Ragged attention over paged KV; included once per instruction set.
 *
 * A query's visible keys are numbered by rank: its position for plain rows, and for tree nodes
 * the earlier tokens followed by the node's ancestors. Keys are taken in blocks of 64 ranks that
 * start at rank 0, each block in one fixed order, so a token's output is bit-identical alone, in
 * any batch, chunked or not, in a tree or in a chain. */

#define KEY_BLOCK 64
#define HEAD_TILE 16 /* query heads that share a block's keys and values while these are in L1 */

/* One query head and the ranks [first, count) of the current block that it sees. */
typedef struct {
    const float *query;
    float *out;
    softmax_state *state;
    int first, count;
    float alpha;
} ISA(query_head);

/* Dot products of 8 / queries keys with each query, in the lanes of the result by query. The sum
 * of a product does not depend on `queries`. */
ALWAYS_INLINE v8f ISA(score)(const int queries, const float *first, const float *second,
                             const float *const *key, int64_t head_dim)
{
    const int keys = 8 / queries;
    const float *k0 = key[0], *k1 = key[1], *k2 = key[2], *k3 = key[3];
    v8f sum[8];
    for (int t = 0; t < 8; t++)
        sum[t] = (v8f){0};
    for (int64_t d = 0; d < head_dim; d += 8) {
        v8f q = ISA(load)(first + d);
        if (queries == 2) {
            v8f r = ISA(load)(second + d);
            v8f k[4] = {ISA(load)(k0 + d), ISA(load)(k1 + d), ISA(load)(k2 + d), ISA(load)(k3 + d)};
#pragma GCC unroll 4
            for (int t = 0; t < 4; t++) {
                sum[t] = q * k[t] + sum[t];
                sum[4 + t] = r * k[t] + sum[4 + t];
            }
        } else {
#pragma GCC unroll 8
            for (int t = 0; t < keys; t++)
                sum[t] = q * ISA(load)(key[t] + d) + sum[t];
        }
    }
    return ISA(transpose_sum)(sum);
}

/* Scores of 8 keys for two query heads. */
ALWAYS_INLINE void ISA(score_pair)(const float *first, const float *second,
                                   const float *const key[8], int64_t head_dim, float *p,
                                   float *q)
{
    v8f low = ISA(score)(2, first, second, key, head_dim);
    v8f high = ISA(score)(2, first, second, key + 4, head_dim);
    ISA(store)(p, __builtin_shufflevector(low, high, 0, 1, 2, 3, 8, 9, 10, 11));
    ISA(store)(q, __builtin_shufflevector(low, high, 4, 5, 6, 7, 12, 13, 14, 15));
}

/* Fold a block's scores into the running softmax and replace them by their weights. */
ALWAYS_INLINE void ISA(soften)(ISA(query_head) * head, float *p, float scale)
{
    const v8i lane = {0, 1, 2, 3, 4, 5, 6, 7};
    const v8f none = ISA(splat)(-__builtin_inff());
    softmax_state *state = head->state;
    v8f best = ISA(splat)(state->max), sum;
    for (int g = head->first / 8 * 8; g < head->count; g += 8) {
        v8i valid = (lane >= head->first - g) & (lane < head->count - g);
        v8f score = ISA(select)(valid, ISA(load)(p + g) * scale, none);
        best = ISA(maximum)(best, score);
        ISA(store)(p + g, score);
    }
    best = ISA(max8)(best);
    v8f alpha = ISA(exp8)(ISA(splat)(state->max) - best);
    sum = state->sum * alpha;
    for (int g = head->first / 8 * 8; g < head->count; g += 8) {
        v8f score = ISA(load)(p + g);
        v8f weight = ISA(select)(score > none, ISA(exp8)(score - best), (v8f){0});
        sum = sum + weight;
        ISA(store)(p + g, weight);
    }
    state->sum = sum;
    state->max = best[0];
    head->alpha = alpha[0];
}

/* out[h][8 * vectors] += sum over t in [first, count) of p[h][t] * values[slots[t]] */
ALWAYS_INLINE void ISA(accumulate)(const int heads, const int vectors, float *out, float *other,
                                   const float *p, const float *q, const float *values,
                                   const int32_t *slots, int64_t stride, int first, int count)
{
    v8f acc[2][8];
#pragma GCC unroll 8
    for (int i = 0; i < vectors; i++) {
        acc[0][i] = ISA(load)(out + 8 * i);
        if (heads == 2)
            acc[1][i] = ISA(load)(other + 8 * i);
    }
    for (int t = first; t < count; t++) {
        const float *value = values + slots[t] * stride;
        v8f weight = ISA(splat)(p[t]), second = ISA(splat)(heads == 2 ? q[t] : 0.0f);
#pragma GCC unroll 8
        for (int i = 0; i < vectors; i++) {
            v8f v = ISA(load)(value + 8 * i);
            acc[0][i] = v * weight + acc[0][i];
            if (heads == 2)
                acc[1][i] = v * second + acc[1][i];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < vectors; i++) {
        ISA(store)(out + 8 * i, acc[0][i]);
        if (heads == 2)
            ISA(store)(other + 8 * i, acc[1][i]);
    }
}

/* Ranks [first, count) of one query head. */
ALWAYS_INLINE void ISA(weigh)(const ISA(query_head) * head, const float *p, const float *values,
                              const int32_t *slots, int64_t stride, int64_t dim, int first,
                              int count)
{
    int64_t d = 0;
    if (first >= count)
        return;
    for (; d + 64 <= dim; d += 64)
        ISA(accumulate)(1, 8, head->out + d, NULL, p, NULL, values + d, slots, stride, first, count);
    for (; d < dim; d += 8)
        ISA(accumulate)(1, 1, head->out + d, NULL, p, NULL, values + d, slots, stride, first, count);
}

/* Two query heads: the ranks that both see together, the others before and after. */
ALWAYS_INLINE void ISA(weigh_pair)(const ISA(query_head) * a, const ISA(query_head) * b,
                                   const float *p, const float *q, const float *values,
                                   const int32_t *slots, int64_t stride, int64_t dim)
{
    int first = a->first > b->first ? a->first : b->first;
    int count = a->count < b->count ? a->count : b->count;
    int64_t d = 0;
    count = count > first ? count : first;
    ISA(weigh)(a, p, values, slots, stride, dim, a->first, first < a->count ? first : a->count);
    ISA(weigh)(b, q, values, slots, stride, dim, b->first, first < b->count ? first : b->count);
    for (; d + 32 <= dim; d += 32)
        ISA(accumulate)(2, 4, a->out + d, b->out + d, p, q, values + d, slots, stride, first,
                        count);
    for (; d < dim; d += 8)
        ISA(accumulate)(2, 1, a->out + d, b->out + d, p, q, values + d, slots, stride, first,
                        count);
    ISA(weigh)(a, p, values, slots, stride, dim, count, a->count);
    ISA(weigh)(b, q, values, slots, stride, dim, count, b->count);
}

/* One block of `count` slots for a tile of query heads. */
static void ISA(attend_block)(const attention_args *a, int64_t kv_head, ISA(query_head) * heads,
                              int num_heads, const int32_t *slots, int count)
{
    float p[HEAD_TILE][KEY_BLOCK] __attribute__((aligned(32)));
    int64_t stride = a->kv_heads * a->head_dim, dim = a->head_dim;
    const float *keys = a->keys + kv_head * dim, *values = a->values + kv_head * dim;
    for (int g = 0; g < count; g += 8) {
        const float *key[8];
        int h = 0;
        for (int t = 0; t < 8; t++) {
            int64_t offset = slots[g + t < count ? g + t : count - 1] * stride;
            key[t] = keys + offset;
            for (int64_t line = 0; line < dim; line += 16)
                __builtin_prefetch(values + offset + line);
        }
        for (; h + 2 <= num_heads; h += 2)
            ISA(score_pair)(heads[h].query, heads[h + 1].query, key, dim, p[h] + g, p[h + 1] + g);
        if (h < num_heads)
            ISA(store)(p[h] + g, ISA(score)(1, heads[h].query, NULL, key, dim));
    }
    for (int h = 0; h < num_heads; h++)
        ISA(soften)(&heads[h], p[h], a->scale);
    for (int h = 0; h < num_heads; h++)
        if (heads[h].alpha != 1.0f)
            for (int64_t d = 0; d < dim; d += 8)
                ISA(store)(heads[h].out + d, ISA(load)(heads[h].out + d) * heads[h].alpha);
    int h = 0;
    for (; h + 2 <= num_heads; h += 2)
        ISA(weigh_pair)(&heads[h], &heads[h + 1], p[h], p[h + 1], values, slots, stride, dim);
    if (h < num_heads)
        ISA(weigh)(&heads[h], p[h], values, slots, stride, dim, heads[h].first, heads[h].count);
}

#ifdef HAS_AVX512
#include "cpu_attend_avx512.h"
#endif

/* One block of `count` slots for any number of query heads up to HEAD_TILE. */
ALWAYS_INLINE void ISA(attend_heads)(const attention_args *a, int64_t kv_head,
                                     ISA(query_head) * heads, int num_heads, const int32_t *slots,
                                     int count)
{
    int paired = 0;
#ifdef HAS_AVX512
    paired = a->head_dim % 16 ? 0 : num_heads / 2 * 2;
    if (paired)
        ISA(attend_pairs)(a, kv_head, heads, paired, slots, count);
#endif
    if (paired < num_heads)
        ISA(attend_block)(a, kv_head, heads + paired, num_heads - paired, slots, count);
}

/* Ranks [begin, end) of a block for the tokens of a row from `token` on. visible[i]: how many
 * keys token i sees in all; those that see none of the block are left out. */
static void ISA(attend_tokens)(const attention_args *a, int64_t kv_head, int64_t first_token,
                               const int64_t *visible, int64_t num_tokens, softmax_state *states,
                               const int32_t *slots, int64_t begin, int64_t end)
{
    int64_t group = a->heads / a->kv_heads;
    ISA(query_head) heads[HEAD_TILE];
    int used = 0, widest = 0;
    for (int64_t i = 0; i < num_tokens * group; i++) {
        int64_t seen = visible[i / group], low = a->window ? seen - a->window : 0;
        int64_t last = seen < end ? seen : end;
        int64_t head = kv_head * group + i % group;
        int64_t offset = ((first_token + i / group) * a->heads + head) * a->head_dim;
        if (begin < last && low < last) {
            ISA(query_head) *next = &heads[used++];
            next->query = a->query + offset;
            next->out = a->out + offset;
            next->state = &states[i];
            next->first = low > begin ? (int)(low - begin) : 0;
            next->count = (int)(last - begin);
            widest = next->count > widest ? next->count : widest;
        }
        if (used && (used == HEAD_TILE || i + 1 == num_tokens * group)) {
            ISA(attend_heads)(a, kv_head, heads, used, slots, widest);
            used = widest = 0;
        }
    }
}

/* The keys of a tree node after the last block that all nodes share: gathered, then attended. */
static void ISA(attend_tree_tail)(const attention_args *a, int64_t kv_head, int64_t token,
                                  softmax_state *states, const int32_t *slots, int64_t shared,
                                  int64_t start, uint64_t bits)
{
    int64_t count = 0;
    for (int64_t i = shared; i < start; i++)
        a->gathered[count++] = slots[i];
    for (int node = 0; bits; node++, bits >>= 1)
        if (bits & 1)
            a->gathered[count++] = slots[start + node];
    int64_t visible = shared + count;
    for (int64_t begin = shared; begin < visible; begin += KEY_BLOCK) {
        int64_t end = begin + KEY_BLOCK < visible ? begin + KEY_BLOCK : visible;
        ISA(attend_tokens)(a, kv_head, token, &visible, 1, states, a->gathered + begin - shared,
                           begin, end);
    }
}

/* Fetch whole rows of keys and values: a step over many sequences waits for memory far longer
 * than it computes, and pages end the hardware's own streams. */
ALWAYS_INLINE void ISA(fetch_slots)(const attention_args *a, const int32_t *slots, int64_t count)
{
    int64_t stride = a->kv_heads * a->head_dim;
    for (int64_t i = 0; i < count; i++) {
        for (int64_t line = 0; line < stride; line += 16)
            __builtin_prefetch(a->keys + slots[i] * stride + line, 0, 2);
        for (int64_t line = 0; line < stride; line += 16)
            __builtin_prefetch(a->values + slots[i] * stride + line, 0, 2);
    }
}

/* `listed`: the length of the slot list, which goes on with the next rows' slots. */
static void ISA(attend_row)(const attention_args *a, const ragged_batch *batch, int64_t row,
                            const int32_t *slots, int64_t listed)
{
    int64_t group = a->heads / a->kv_heads, dim = a->head_dim;
    int64_t first = batch->cu_q[row], count = batch->cu_q[row + 1] - first;
    int64_t kv_len = batch->kv_lens[row], start = kv_len - count;
    int tree = batch->is_tree[row];
    int64_t shared = tree ? start / KEY_BLOCK * KEY_BLOCK : kv_len;
    for (int64_t i = 0; i < count; i++)
        a->visible[i] = start + (tree ? __builtin_popcountll(batch->tree_bits[first + i]) : i + 1);
    for (int64_t i = 0; i < count * a->heads; i++) {
        float *out = a->out + (first * a->heads + i) * dim;
        a->states[i] = (softmax_state){{0}, -__builtin_inff()};
        for (int64_t d = 0; d < dim; d += 8)
            ISA(store)(out + d, (v8f){0});
    }
    /* states: by kv head, then token, then query head of the group */
    for (int64_t begin = 0; begin < shared; begin += KEY_BLOCK) {
        int64_t end = begin + KEY_BLOCK < shared ? begin + KEY_BLOCK : shared;
        ISA(fetch_slots)(a, slots + end, end < listed - KEY_BLOCK ? KEY_BLOCK : listed - end);
        for (int64_t g = 0; g < a->kv_heads; g++)
            ISA(attend_tokens)(a, g, first, a->visible, count, a->states + g * count * group,
                               slots + begin, begin, end);
    }
    for (int64_t g = 0; g < a->kv_heads; g++)
        for (int64_t i = 0; i < count; i++) {
            softmax_state *states = a->states + (g * count + i) * group;
            if (tree)
                ISA(attend_tree_tail)(a, g, first + i, states, slots, shared, start,
                                      (uint64_t)batch->tree_bits[first + i]);
            for (int64_t h = 0; h < group; h++) {
                float *out = a->out + ((first + i) * a->heads + g * group + h) * dim;
                float inverse = 1.0f / ISA(sum8)(states[h].sum);
                for (int64_t d = 0; d < dim; d += 8)
                    ISA(store)(out + d, ISA(load)(out + d) * inverse);
            }
        }
}

/* slots: the rows' slot lists, one after another. */
static void ISA(attention)(const attention_args *a, const ragged_batch *batch,
                           const int32_t *slots)
{
    int64_t listed = 0;
    for (int64_t row = 0; row < batch->num_rows; row++)
        listed += batch->kv_lens[row];
    for (int64_t row = 0; row < batch->num_rows; row++) {
        ISA(attend_row)(a, batch, row, slots, listed);
        slots += batch->kv_lens[row];
        listed -= batch->kv_lens[row];
    }
}
