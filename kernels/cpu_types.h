/* Types shared by the CPU kernels of every instruction set. */
#ifndef OUTRIDER_CPU_TYPES_H
#define OUTRIDER_CPU_TYPES_H

#include <stddef.h>
#include <stdint.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define PANEL 16 /* output columns of a weight panel: two vectors of 8 */

typedef float v8f __attribute__((vector_size(32)));
typedef float v16f __attribute__((vector_size(64)));
typedef int32_t v16i __attribute__((vector_size(64)));
typedef int32_t v8i __attribute__((vector_size(32)));
typedef uint32_t v8u __attribute__((vector_size(32)));
typedef v8f v8f_unaligned __attribute__((aligned(4), may_alias));
typedef v16f v16f_unaligned __attribute__((aligned(4), may_alias));
typedef int8_t v8c __attribute__((vector_size(8), aligned(1), may_alias));
typedef v8u v8u_unaligned __attribute__((aligned(4), may_alias));

/* What a packed weight is. A step of a panel is its 16 columns at one k. */
enum {
    WEIGHTS_BF16 = 0, /* 8 words: low halves are columns 0..7, high halves 8..15, so that a shift and
                         a mask widen them to float32 */
    WEIGHTS_F32 = 1,
    WEIGHTS_I8 = 2, /* to be multiplied with its column's scale */
};

/* A weight matrix [n, k] in panels of 16 output columns, k-major inside a panel. Missing columns
 * are 0. */
typedef struct {
    const void *data;
    const float *bias;   /* float32[panels * 16] in panel order, or NULL */
    const float *scales; /* likewise, of WEIGHTS_I8 */
    int64_t n, k, panels;
    int type;
} packed_matrix;

static inline int64_t cpu_weight_bytes(int type)
{
    return type == WEIGHTS_F32 ? 4 : type == WEIGHTS_BF16 ? 2 : 1;
}

enum { EPILOGUE_STORE = 0, EPILOGUE_ADD = 1, EPILOGUE_SILU_MUL = 2 };

/* Norms but post_norm may be NULL. With embed_norm, attention takes in the token's embedding as
 * well, in front of the stream; norm_residual then makes the normed stream the stream. */
typedef struct {
    packed_matrix qkv, o, gate_up, down;
    const float *input_norm, *embed_norm, *post_norm, *q_norm, *k_norm;
    int64_t window; /* positions, 0 for all */
    int norm_residual;
} decoder_layer;

typedef struct {
    int64_t hidden, inner, heads, kv_heads, head_dim, num_layers;
    float eps, scale;
    decoder_layer *layers;
    const float *final_norm; /* NULL in a draft without one */
    packed_matrix lm_head;
    packed_matrix fuse; /* of a draft: embedding and hidden state to the stream, if data is there */
    const void *embed;  /* [vocabulary, hidden] rows, or NULL: the columns of lm_head */
    int embed_is_float32;
} decoder_model;

/* One ragged batch; ForwardBatch documents the fields. */
typedef struct {
    int64_t num_tokens, num_rows, table_width, page_size;
    const int64_t *input_ids, *positions, *kv_slots, *tree_bits;
    const int32_t *cu_q, *kv_lens, *page_table;
    const uint8_t *is_tree;
} ragged_batch;

/* Running softmax of one query head. */
typedef struct {
    v8f sum;
    float max;
} softmax_state;

/* One attention over [slots, kv heads, head_dim] caches; gathered holds a tree node's slots. */
typedef struct {
    const float *query, *keys, *values;
    int64_t heads, kv_heads, head_dim, window;
    float scale;
    float *out;
    softmax_state *states; /* [longest row * heads] */
    int64_t *visible;      /* [longest row] */
    int32_t *gathered;     /* [64 + 64] */
} attention_args;

/* Working memory of a forward pass, all owned by the caller. */
typedef struct {
    float *stream, *normed, *qkv, *context, *gated; /* [T, ...] */
    float *embedded;                                /* [T, hidden], in a draft */
    int32_t *slots;                                 /* [sum of kv_lens], by row */
    int32_t *gathered;
    softmax_state *states;
    int64_t *visible;
} decoder_scratch;

/* [layers, 2, slots, kv heads, head_dim] float32 and the rotary tables [positions, head_dim / 2]. */
typedef struct {
    float *data;
    int64_t num_slots;
    const float *cos, *sin;
} decoder_cache;

/* A chain of R rows, as the references in draft_layout.py and draft_candidates.py describe them. The arrays
 * behind `positions` are working memory of R (cu_q: R + 1) elements, slot_list of all rows' keys. */
typedef struct {
    int64_t rows, passes, pages, table_width, page_size;
    const int32_t *slot_of, *caps, *seq_lens;
    const int32_t *page_table;   /* [slots, table_width] */
    const packed_matrix *head;
    const int64_t *token_ids;    /* the target's id of each output of the head, or NULL */
    int norm_output;             /* the normed stream is what the next pass takes in */
    const float *hidden;         /* [R, hidden] of the first pass */
    float *recurrent, *normed;   /* [R, hidden]; normed is NULL in a draft without a final norm */
    float *logits;               /* [R, outputs of the head] */
    int64_t *drafts;             /* [passes, R] */
    int64_t *ids, *positions, *kv_slots, *tree_bits;
    int32_t *cu_q, *kv_lens, *slot_list;
    uint8_t *is_tree;
} draft_chain;

#endif
