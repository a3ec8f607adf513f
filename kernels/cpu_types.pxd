"""The structures of the native CPU kernels."""

from libc.stdint cimport int8_t, int32_t, int64_t, uint8_t, uint16_t

cdef extern from "cpu_types.h" nogil:
    enum:
        PANEL
        EPILOGUE_STORE
        WEIGHTS_BF16
        WEIGHTS_F32
        WEIGHTS_I8
    int64_t cpu_weight_bytes(int)
    ctypedef struct softmax_state:
        pass
    ctypedef struct packed_matrix:
        const void *data
        const float *bias
        const float *scales
        int64_t n, k, panels
        int type
    ctypedef struct decoder_layer:
        packed_matrix qkv, o, gate_up, down
        const float *input_norm
        const float *embed_norm
        const float *post_norm
        const float *q_norm
        const float *k_norm
        int64_t window
        int norm_residual
    ctypedef struct decoder_model:
        int64_t hidden, inner, heads, kv_heads, head_dim, num_layers
        float eps, scale
        decoder_layer *layers
        const float *final_norm
        packed_matrix lm_head
        packed_matrix fuse
        const void *embed
        int embed_is_float32
    ctypedef struct ragged_batch:
        int64_t num_tokens, num_rows, table_width, page_size
        const int64_t *input_ids
        const int64_t *positions
        const int64_t *kv_slots
        const int64_t *tree_bits
        const int32_t *cu_q
        const int32_t *kv_lens
        const int32_t *page_table
        const uint8_t *is_tree
    ctypedef struct attention_args:
        const float *query
        const float *keys
        const float *values
        int64_t heads, kv_heads, head_dim, window
        float scale
        float *out
        softmax_state *states
        int64_t *visible
        int32_t *gathered
    ctypedef struct decoder_scratch:
        float *stream
        float *normed
        float *qkv
        float *context
        float *gated
        float *embedded
        int32_t *slots
        int32_t *gathered
        softmax_state *states
        int64_t *visible
    ctypedef struct decoder_cache:
        float *data
        int64_t num_slots
        const float *cos
        const float *sin
    ctypedef struct draft_chain:
        int64_t rows, passes, pages, table_width, page_size
        const int32_t *slot_of
        const int32_t *caps
        const int32_t *seq_lens
        const int32_t *page_table
        const packed_matrix *head
        const int64_t *token_ids
        int norm_output
        const float *hidden
        float *recurrent
        float *normed
        float *logits
        int64_t *drafts
        int64_t *ids
        int64_t *positions
        int64_t *kv_slots
        int64_t *tree_bits
        int32_t *cu_q
        int32_t *kv_lens
        int32_t *slot_list
        uint8_t *is_tree

cdef extern from "cpu_memory.h" nogil:
    void *cpu_allocate(size_t)
    int64_t cpu_source_row(int64_t, int, int64_t, int64_t)
    void cpu_pack_bf16(const uint16_t *, int64_t, int64_t, int64_t, int, uint16_t *)
    void cpu_pack_i8(const void *, int, int64_t, int64_t, int64_t, int, int8_t *, float *)
    void cpu_pack_f32(const float *, int64_t, int64_t, int64_t, int, float *)
