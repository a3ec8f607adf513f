/* Drafting a chain on a CPU: pass after pass of one token a row, each continued by its own argmax. */
#ifndef OUTRIDER_CPU_DRAFT_CHAIN_H
#define OUTRIDER_CPU_DRAFT_CHAIN_H

#include "cpu_kernels.h"
#include "row_argmax.h"

/* The page of a sequence index; what lies beyond the table is page 0, which nobody reads. */
static int64_t cpu_page_at(const draft_chain *c, int64_t slot, int64_t index)
{
    int64_t column = index / c->page_size;
    return column < c->table_width ? c->page_table[slot * c->table_width + column] : 0;
}

/* Places and slot lists of pass `pass`; 0 if a page lies outside the cache. */
static int cpu_chain_layout(const draft_chain *c, int64_t pass)
{
    int32_t *out = c->slot_list;
    for (int64_t r = 0; r < c->rows; r++) {
        int64_t slot = c->slot_of[r], last = c->caps[r] > 0 ? c->seq_lens[slot] + pass : 0;
        c->positions[r] = last;
        c->kv_lens[r] = (int32_t)last + 1;
        for (int64_t index = 0; index <= last; index += c->page_size) {
            int64_t page = cpu_page_at(c, slot, index), left = last + 1 - index;
            if (page < 0 || page >= c->pages)
                return 0;
            for (int64_t i = 0; i < c->page_size && i < left; i++)
                *out++ = (int32_t)(page * c->page_size + i);
        }
        c->kv_slots[r] = c->caps[r] > 0 ? out[-1] : 0;
    }
    return 1;
}

static int cpu_draft_chain(int isa, const decoder_model *model, const draft_chain *c,
                           const decoder_cache *cache, decoder_scratch *scratch)
{
    ragged_batch batch = {c->rows,      c->rows,     c->table_width, c->page_size, c->ids,
                          c->positions, c->kv_slots, c->tree_bits,   c->cu_q,      c->kv_lens,
                          NULL,         c->is_tree};
    const float *hidden = c->hidden, *head_input = c->normed ? c->normed : c->recurrent;
    scratch->slots = c->slot_list;
    for (int64_t pass = 0; pass < c->passes; pass++) {
        if (!cpu_chain_layout(c, pass))
            return 0;
        cpu_draft_forward(isa, model, &batch, &batch, cache, scratch, hidden,
                          c->norm_output ? NULL : c->recurrent, c->normed);
        hidden = c->norm_output ? c->normed : c->recurrent;
        cpu_matmul(isa, c->head, head_input, model->hidden, c->rows, c->logits, c->head->n,
                   EPILOGUE_STORE);
        for (int64_t r = 0; r < c->rows; r++) {
            int64_t best = outrider_row_argmax(c->logits + r * c->head->n, c->head->n);
            best = best < 0 ? 0 : best;
            c->ids[r] = c->token_ids ? c->token_ids[best] : best;
            c->drafts[pass * c->rows + r] = c->ids[r];
        }
    }
    return 1;
}

#endif
