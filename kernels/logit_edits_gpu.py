# mypy: disable-error-code="no-untyped-call"
"""Penalties, bias and minimum length on logits, and the counts behind them, on a GPU.

One pass copies the logits and penalises where a slot asks for it; a second one writes the few
listed tokens. Products and differences are rounded apart (no fused multiply-add), as on a CPU.
"""

import torch
import triton
import triton.language as tl

_MASKED = tl.constexpr(torch.finfo(torch.float32).min)
_BLOCK = 1024
_LIST_BLOCK = tl.constexpr(128)
_MOST_NODES = 8  # of a row side by side; a row's other nodes follow them


def edit_logits(
    logits: torch.Tensor,
    cu_q: torch.Tensor,
    node_cu: torch.Tensor,
    slots: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    tree_bits: torch.Tensor,
    out_counts: torch.Tensor,
    penalized: torch.Tensor,
    penalties: torch.Tensor,
    history: torch.Tensor,
    min_new_tokens: torch.Tensor,
    list_bounds: torch.Tensor,
    list_ids: torch.Tensor,
    list_values: torch.Tensor,
    *,
    width: int | None = None,
) -> torch.Tensor:
    """float32[N, V]: the step's logits as its rows' requests want them, see the reference.

    Raises ValueError unless the rows of ``logits`` are contiguous.
    """
    nodes, vocab = logits.shape
    rows = slots.shape[0]
    if logits.stride(1) != 1:
        raise ValueError("logits rows are not contiguous")
    edited = torch.empty(nodes, vocab, dtype=torch.float32, device=logits.device)
    if not nodes:
        return edited
    side_by_side = min(_MOST_NODES, nodes if width is None else width)
    _edit_rows[(rows + 1, triton.cdiv(vocab, _BLOCK), side_by_side)](
        logits,
        logits.stride(0),
        cu_q,
        node_cu,
        slots,
        input_ids,
        tree_bits,
        penalized.view(torch.uint8),
        penalties,
        history,
        list_bounds,
        edited,
        rows,
        nodes,
        vocab,
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    _edit_listed[(rows, side_by_side)](
        cu_q,
        node_cu,
        slots,
        positions,
        out_counts,
        min_new_tokens,
        list_bounds,
        list_ids,
        list_values,
        edited,
        list_ids.shape[1],
        vocab,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return edited


def count_emitted(
    tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    slots: torch.Tensor,
    penalized: torch.Tensor,
    history: torch.Tensor,
) -> None:
    """Add the tokens that R rows emit to their slots' history, in place; see the reference."""
    rows, width = tokens.shape
    if rows:
        _count_kernel[(rows,)](
            tokens,
            accept_lens,
            slots,
            penalized.view(torch.uint8),
            history,
            history.shape[1],
            WIDTH=width,
            LANES=max(32, triton.next_power_of_2(width)),
            num_warps=1,
        )


@triton.jit
def _edit_rows(
    logits: tl.tensor,
    stride: tl.tensor,
    cu_q: tl.tensor,
    node_cu: tl.tensor,
    slots: tl.tensor,
    input_ids: tl.tensor,
    tree_bits: tl.tensor,
    penalized: tl.tensor,
    penalties: tl.tensor,
    history: tl.tensor,
    list_bounds: tl.tensor,
    edited: tl.tensor,
    rows: tl.tensor,
    nodes: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    low = tl.load(node_cu + row)
    base = low.to(tl.int64)
    begin = low + tl.program_id(2)
    step = tl.num_programs(2)
    if row == rows:
        for node in range(begin, nodes, step):
            at = edited + (base + node - low) * vocab
            tl.store(at + column, tl.zeros([BLOCK], tl.float32), mask=inside)
    else:
        high = tl.load(node_cu + row + 1)
        if begin < high:
            slot = tl.load(slots + row).to(tl.int64)
            first = tl.load(cu_q + row + 1) - (high - low)
            counts = tl.load(penalized + slot) != 0
            edits = counts | (tl.load(list_bounds + slot * 3 + 2) > 0)
            inverse = tl.load(penalties + slot * 4)
            repetition = tl.load(penalties + slot * 4 + 1)
            frequency = tl.load(penalties + slot * 4 + 2)
            presence = tl.load(penalties + slot * 4 + 3)
            past = tl.load(history + slot * vocab + column, mask=inside & counts, other=0)
            for node in range(begin, high, step):
                own = node - low
                wide = base + own
                x = tl.load(logits + wide * stride + column, mask=inside, other=0).to(tl.float32)
                if edits:
                    x = tl.where(tl.abs(x) < float("inf"), x, float("nan"))
                if counts:
                    count = past >> 1
                    if own > 0:
                        bits = tl.load(tree_bits + first + own)
                        for place in range(1, own + 1):
                            if (bits >> place) & 1 == 1:
                                draft = tl.load(input_ids + first + place)
                                count += (column == draft).to(tl.int32)
                    scale = tl.where(x > 0, inverse, repetition)
                    x = tl.where((count > 0) | (past & 1 == 1), x * scale, x)
                    x = x - count.to(tl.float32) * frequency
                    x = x - tl.where(count > 0, presence, 0.0)
                tl.store(edited + wide * vocab + column, x, mask=inside)


@triton.jit
def _edit_listed(
    cu_q: tl.tensor,
    node_cu: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    out_counts: tl.tensor,
    min_new_tokens: tl.tensor,
    list_bounds: tl.tensor,
    list_ids: tl.tensor,
    list_values: tl.tensor,
    edited: tl.tensor,
    room: tl.tensor,
    vocab: tl.tensor,
) -> None:
    row = tl.program_id(0)
    low = tl.load(node_cu + row)
    high = tl.load(node_cu + row + 1)
    begin = low + tl.program_id(1)
    if begin < high:
        slot = tl.load(slots + row).to(tl.int64)
        listed = tl.load(list_bounds + slot * 3 + 2)
        if listed > 0:
            ends = tl.load(list_bounds + slot * 3)
            biased = tl.load(list_bounds + slot * 3 + 1)
            first = tl.load(cu_q + row + 1) - (high - low)
            start = tl.load(positions + first)
            missing = tl.load(min_new_tokens + slot) - tl.load(out_counts + slot)
            for node in range(begin, high, tl.num_programs(1)):
                short = tl.load(positions + first + node - low) - start < missing
                at = edited + (low.to(tl.int64) + node - low) * vocab
                for base in range(0, listed, _LIST_BLOCK):
                    place = base + tl.arange(0, _LIST_BLOCK)
                    inside = place < listed
                    token = tl.load(list_ids + slot * room + place, mask=inside, other=0)
                    value = tl.load(list_values + slot * room + place, mask=inside, other=0)
                    x = tl.load(at + token, mask=inside, other=0)
                    x = tl.where(place < biased, x + value, x)
                    masked = short & (place >= ends) & (tl.abs(x) < float("inf"))
                    tl.store(at + token, tl.where(masked, _MASKED, x), mask=inside)


@triton.jit
def _count_kernel(
    tokens: tl.tensor,
    accept_lens: tl.tensor,
    slots: tl.tensor,
    penalized: tl.tensor,
    history: tl.tensor,
    vocab: tl.tensor,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    lane = tl.arange(0, LANES)
    slot = tl.load(slots + row).to(tl.int64)
    length = tl.load(accept_lens + row)
    counts = (lane < length) & (tl.load(penalized + slot) != 0)
    token = tl.load(tokens + row * WIDTH + lane, mask=counts, other=0)
    tl.atomic_add(history + slot * vocab + token, 2, mask=counts)
