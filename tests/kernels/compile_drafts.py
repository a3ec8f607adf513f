"""Compiles the Triton kernels of drafts, of bans and of packed prompts for Hopper, which needs no
GPU; run as a script.

The interpreter takes more than the compiler does: a name of two types, methods of constants.
"""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from outrider.kernels import (
    add_rms_norm_gpu,
    block_layout_gpu,
    block_verify_gpu,
    confidence_logits_gpu,
    draft_candidates_gpu,
    draft_extend_gpu,
    draft_input_gpu,
    draft_layout_gpu,
    draft_nodes_gpu,
    draft_state_gpu,
    draft_tree_gpu,
    embedding_gpu,
    greedy_argmax_gpu,
    inject_kv_gpu,
    law_gpu,
    logit_masks_gpu,
    markov_latent_gpu,
    paged_attention_gpu,
    ragged_rows_gpu,
    rejection_sample_gpu,
    rms_norm_gpu,
    simulate_survival_gpu,
    threshold_sample_gpu,
    token_bans_gpu,
    verify_lens_gpu,
    window_layout_gpu,
)

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {
    "h": "*bf16",
    "f": "*fp32",
    "i": "*i32",
    "l": "*i64",
    "b": "*u8",
    "e": "fp32",
    "d": "*fp64",
}


def compile_one(kernel: Any, pointers: dict[str, str], **constants: object) -> None:
    """``pointers``: names by the key of their type; what is named nowhere is an int32."""
    names = {name: TYPES[key] for key, some in pointers.items() for name in some.split()}
    signature = {name: names.get(name, "i32") for name in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    triton.compile(ASTSource(kernel, signature, constants), target=TARGET)
    print(kernel.__name__, constants)


def main() -> None:
    """All of them; None stands for what is optional, 1 for sizes that Triton makes constants."""
    halves = {"l": "ids", "h": "table hidden embed_norm hidden_norm out", "e": "eps"}
    sizes = {"EMBED": 20, "EMBED_BLOCK": 32, "HIDDEN": 256, "HIDDEN_BLOCK": 256, "PDL": True}
    none: dict[str, None] = {"embed_norm": None, "hidden_norm": None}
    for given in ({}, none):
        compile_one(draft_input_gpu._draft_input, halves, **sizes, **given)

    best = {"h": "logits", "l": "token_ids tokens", "f": "values sums probs", "i": "places arrived"}
    sizes = {"CHUNK": 1024, "CHUNKS": 4, "PDL": True}
    kernel = draft_candidates_gpu._top_candidates
    compile_one(kernel, best, COUNT=4, BLOCK=16, **sizes)
    compile_one(kernel, best, COUNT=1, BLOCK=4, probs=None, sums=None, token_ids=None, **sizes)

    extend = {
        "i": "slots starts cu_q accept_lens tokens path prompts",
        "b": "kinds",
        "l": "input_ids next_ids sources positions select",
    }
    compile_one(draft_extend_gpu._extend_inputs, extend, BLOCK=256, PDL=True)
    sizes = {"BLOCK": 256, "PDL": False, "rows": 1, "width": 1}
    compile_one(draft_extend_gpu._extend_inputs, extend, prompts=None, **sizes)

    places = {"i": "slots caps seq_lens page_table kv_lens", "l": "positions kv_slots"}
    for chain in (True, False):
        sizes = {"PAGE_SIZE": 16, "BLOCK": 128, "CHAIN": chain, "PDL": True}
        compile_one(draft_layout_gpu._lay_out, places, **sizes)
        compile_one(draft_layout_gpu._lay_out, places, rows=1, each=1, level_width=1, **sizes)

    blocks = {
        "i": "slots caps seq_lens page_table cu_q kv_lens accept_lens tokens",
        "l": "bonus ids positions kv_slots first places",
    }
    sizes = {"PAGE_SIZE": 16, "DRAFTS": 7, "NODES": 8, "ROWS": 16, "PADDING": 64, "PDL": True}
    layout = {**blocks, "i": blocks["i"].removesuffix(" tokens")}  # there they are a number
    for fixed in ({}, {"rows": 1, "first_row": 1, "ROWS": 1}):
        compile_one(block_layout_gpu._block_layout, layout, **{**sizes, **fixed})
    compile_one(block_layout_gpu._keep_newest, blocks, BLOCK=16, PDL=True)

    views = {
        "i": "table lows pages drafts count slots row_lows caps seq_lens starts block_caps cu_q "
        "page_table kv_lens",
        "l": "positions kv_slots places out",
    }
    compile_one(window_layout_gpu._apply_window, views, BLOCK=256)
    compile_one(window_layout_gpu._apply_window, views, BLOCK=256, rows=1)
    laid = {"PAGE_SIZE": 16, "NODES": 16, "COLUMNS": 256, "PADDING": 64, "PDL": True}
    ones = {"rows": 1, "view": 1, "columns": 1, "table_stride": 1, "COLUMNS": 1, "PAGE_SIZE": 1}
    for fixed in ({}, ones):
        compile_one(window_layout_gpu._window_layout, views, **{**laid, **fixed})
    sizes = {"PAGE_SIZE": 16, "BLOCK": 128, "PDL": True}
    for fixed in ({}, {"rows": 1, "window": 1, "BLOCK": 1, "PAGE_SIZE": 1}):
        compile_one(window_layout_gpu._window_starts, views, **{**sizes, **fixed})
    for fixed in ({}, {"tokens": 1, "PAGE_SIZE": 1}):
        compile_one(window_layout_gpu._draft_slots, views, **{**sizes, **fixed})

    injected = {
        "h": "kv bias k_norms cache",
        "f": "cos sin",
        "l": "positions kv_slots",
        "e": "eps",
    }
    sizes = {
        "LAYERS": 5, "KV_HEADS": 8, "HALF": 64, "HALF_BLOCK": 64, "HEAD_BLOCK": 4, "PDL": True,
    }  # fmt: skip
    for absent in ((), ("bias",), ("bias", "k_norms")):
        compile_one(inject_kv_gpu._inject_kv, injected, **sizes, **dict.fromkeys(absent))

    heads = {"h": "gate embedded out joint state"}
    for kernel in (markov_latent_gpu._gated_latent, markov_latent_gpu._rnn_latent):
        compile_one(kernel, heads, BLOCK=256, PDL=True)

    chosen = {"h": "logits addend", "f": "best", "i": "best_id"}
    sizes = {"CHUNK": 2048, "BLOCK": 1024, "PDL": True}
    kernel = greedy_argmax_gpu._chunk_best
    compile_one(kernel, chosen, DRAFT=True, **sizes)
    for draft in (False, True):
        compile_one(kernel, chosen, DRAFT=draft, addend=None, **sizes)

    nodes = {"i": "cu_q caps tokens parents proposed depths", "l": "drafts candidates beams"}
    nodes["f"] = "scores"
    compile_one(draft_nodes_gpu._write_chains, nodes, LANES=32, PDL=True)
    compile_one(draft_nodes_gpu._write_chains, nodes, LANES=32, most=1, PDL=True)
    for width in (1, 4):
        compile_one(draft_nodes_gpu._select_tree, nodes, WIDTH=width, BLOCK=64, PART=16, PDL=True)

    floats = "logits temperatures confidence"
    shared = {"f": floats, "i": "caps budget verify_lens", "e": "eps"}
    sizes = {"LIMIT": 15, "GAMMA": 15, "DEPTHS": 16, "BLOCK": 256, "PDL": True}
    compile_one(verify_lens_gpu._allocate, shared, **sizes)
    sizes = {"LIMIT": 1, "GAMMA": 1, "DEPTHS": 1, "BLOCK": 1, "PDL": False, "rows": 1, "stride": 1}
    compile_one(verify_lens_gpu._allocate, shared, **sizes)

    kept = {"i": " ".join(ragged_rows_gpu._compact.arg_names[:13])}
    compile_one(ragged_rows_gpu._compact, kept, BLOCK=128, ROWS=256, PDL=True)

    head = {"f": "weight bias out", "h": "before hidden", "l": "bonus tokens"}
    sizes = {"HIDDEN": 4096, "RANK": 256, "BLOCK": 1024, "RANK_BLOCK": 256, "PDL": True}
    compile_one(confidence_logits_gpu._confidence_logits, head, **sizes)
    sizes = {"HIDDEN": 8, "RANK": 0, "BLOCK": 8, "RANK_BLOCK": 1, "PDL": False}
    one = {"rows": 1, "drafts": 1, "vocab": 0}
    compile_one(confidence_logits_gpu._confidence_logits, head, before=None, **sizes, **one)

    made_up = {"i": "slots seq_lens lens", "f": "logits", "e": "root"}
    for drafts, padded in ((1, 1), (7, 8)):
        kernel = simulate_survival_gpu._survival_kernel
        compile_one(kernel, made_up, DRAFTS=drafts, PADDED=padded)

    grown = {"f": "chances reach scores", "l": "successors candidates beams ids bits parents"}
    for width, last in ((1, False), (4, False), (4, True)):
        lanes = width * width
        sizes = {"WIDTH": width, "LANES": lanes, "LAST": last, "PDL": True}
        compile_one(draft_tree_gpu._expand_tree, grown, **sizes)

    moved = {
        "i": "slots",
        "l": "select tokens_from tokens_to",
        "f": "probs_from probs_to",
        "h": "hidden_from hidden_to",
    }
    sizes = {"LANES": 1, "COUNT": 1, "BLOCK": 256, "PDL": True}
    no_probs: dict[str, None] = {"probs_from": None, "probs_to": None}
    compile_one(draft_state_gpu._move, moved, TAKE=True, select=None, **no_probs, **sizes)
    compile_one(draft_state_gpu._move, moved, TAKE=False, **sizes)

    judged = {
        "h": "logits draft_logits",
        "f": "temperatures top_ps min_ps maxima parts scores",
        "l": "seeds positions sums totals states tokens drafts draft_rows cuts",
        "i": "top_ks counts tie_counts accepted draft_ids ids_out ids_in",
        "b": "active",
    }
    compile_one(law_gpu.measure_laws, judged, G=64, PDL=True)
    alone: dict[str, None] = {"draft_logits": None, "draft_rows": None}
    compile_one(law_gpu.measure_laws, judged, G=64, PDL=True, **alone)
    compile_one(rejection_sample_gpu._draw_left, judged, S=16, G=64, PDL=True)
    compile_one(rejection_sample_gpu._draw_left, judged, S=1, G=1, PDL=False, draft_ids=None)
    compile_one(rejection_sample_gpu._pick_left, judged, S=16, PDL=True)

    block = {**judged, "l": judged["l"] + " firsts", "f": judged["f"] + " masses"}
    block["d"] = "ratios"
    for kernel in (block_verify_gpu._note_ratios, block_verify_gpu._draw_beyond):
        compile_one(kernel, block, S=16, G=64, PDL=True)
        compile_one(kernel, block, S=1, G=1, PDL=False, draft_ids=None)
    compile_one(block_verify_gpu._pick_block, block, S=16, PDL=True)

    tried = {**judged, "f": judged["f"] + " chances", "l": judged["l"] + " tries parents"}
    for fixed in ({}, {"rows": 1}):
        sizes = {"S": 16, "PDL": True, **fixed}
        compile_one(threshold_sample_gpu._draw_untried, tried, G=64, **sizes)
        compile_one(threshold_sample_gpu._pick_child, {**tried, "e": "single scale"}, **sizes)

    norm = {"h": "x residual total weight out table", "l": "ids", "e": "eps"}
    sizes = {"WIDTH": 250, "BLOCK": 256, "PDL": True}
    compile_one(rms_norm_gpu._rms_norm, norm, GAINS=3, GEMMA=False, **sizes)
    compile_one(add_rms_norm_gpu._add_rms_norm, norm, GEMMA=False, **sizes)
    compile_one(embedding_gpu._embed, norm, **sizes)

    banned = {
        "i": "cu_q node_cu slots disallowed ban_counts ban_bounds ban_tokens tails tokens "
        "accept_lens",
        "l": "input_ids tree_bits",
        "f": "edited",
    }
    for fixed in ({}, {"bounds": 1, "room": 1, "words": 1}):
        for kernel, sizes in (
            (token_bans_gpu._mask_always, {"BLOCK": 1024}),
            (token_bans_gpu._mask_after, {"DEPTH": 32}),
            (token_bans_gpu._push_kernel, {"WIDTH": 5, "DEPTH": 32}),
        ):
            own = {name: one for name, one in fixed.items() if name in kernel.arg_names}
            compile_one(kernel, banned, **sizes, **own)

    masked = {"f": "logits", "i": "places masks"}
    for fixed in ({}, {"words": 1}):
        compile_one(logit_masks_gpu._mask_rows, masked, BLOCK=2048, **fixed)

    attended = {
        "h": "query_ptr key_ptr value_ptr out_ptr",
        "f": "partial_ptr lse_ptr",
        "l": "positions tree_bits",
        "i": "cu_q kv_lens page_table slots",
        "b": "is_tree",
        "e": "scale soft_cap",
    }
    sizes = {
        "PAGE_SIZE": 16, "GROUP": 2, "KV_HEADS": 2, "HEAD_DIM": 64, "BLOCK_M": 128, "BLOCK_N": 64,
        "BLOCK_D": 64, "GROUP_BLOCK": 2, "HAS_WINDOW": False, "HAS_CAP": False, "UPCAST": False,
        "TWO_PHASE": True, "PDL": True,
    }  # fmt: skip
    for packed, split in ((0, False), (16, False), (16, True), (1, False)):
        compile_one(
            paged_attention_gpu._attend_rows, attended, sinks=None, PACKED_ROWS=packed,
            SPLIT=split, **sizes,
        )  # fmt: skip
    sizes = {"HEADS": 4, "HEAD_DIM": 64, "BLOCK_D": 64, "SPLIT_BLOCK": 2, "PDL": True}
    compile_one(paged_attention_gpu._merge_splits, attended, **sizes)


if __name__ == "__main__":
    main()
