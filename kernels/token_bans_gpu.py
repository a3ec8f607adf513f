# mypy: disable-error-code="no-untyped-call"
"""Tokens ruled out at every position or after others, and the tails behind that, on a GPU.

One pass masks by the slots' bits, reading logits only where one is set. A second one holds the
banned sequences of a slot, one a lane, against the path of each node and then the slot's tail.
"""

import torch
import triton
import triton.language as tl

_MASKED = tl.constexpr(torch.finfo(torch.float32).min)
_BLOCK = 1024
_BANS = tl.constexpr(128)
_MOST_NODES = 8  # of a row side by side; a row's other nodes follow them


def mask_banned(
    edited: torch.Tensor,
    cu_q: torch.Tensor,
    node_cu: torch.Tensor,
    slots: torch.Tensor,
    input_ids: torch.Tensor,
    tree_bits: torch.Tensor,
    disallowed: torch.Tensor,
    ban_counts: torch.Tensor,
    ban_bounds: torch.Tensor,
    ban_tokens: torch.Tensor,
    tails: torch.Tensor,
    *,
    width: int | None = None,
) -> None:
    """Mask in ``edited`` float32[N, V] what the rows' requests rule out; see the reference.

    Raises ValueError unless the rows of ``edited`` follow each other without a gap.
    """
    nodes, vocab = edited.shape
    rows = slots.shape[0]
    if not edited.is_contiguous():
        raise ValueError("edited logits are not contiguous")
    if not nodes or not rows:
        return
    side_by_side = min(_MOST_NODES, nodes if width is None else width)
    if disallowed.shape[1]:
        _mask_always[(rows, triton.cdiv(vocab, _BLOCK), side_by_side)](
            node_cu,
            slots,
            disallowed,
            edited,
            disallowed.shape[1],
            vocab,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    if ban_tokens.shape[1]:
        _mask_after[(rows, side_by_side)](
            cu_q,
            node_cu,
            slots,
            input_ids,
            tree_bits,
            ban_counts,
            ban_bounds,
            ban_tokens,
            tails,
            edited,
            ban_bounds.shape[1],
            ban_tokens.shape[1],
            vocab,
            DEPTH=tails.shape[1],
            num_warps=4,
        )


def push_emitted(
    tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    slots: torch.Tensor,
    ban_counts: torch.Tensor,
    tails: torch.Tensor,
) -> None:
    """Append what R rows emit to their slots' ``tails``, in place; see the reference."""
    rows, width = tokens.shape
    if rows:
        _push_kernel[(rows,)](
            tokens,
            accept_lens,
            slots,
            ban_counts,
            tails,
            WIDTH=width,
            DEPTH=tails.shape[1],
            num_warps=1,
        )


@triton.jit
def _mask_always(
    node_cu: tl.tensor,
    slots: tl.tensor,
    disallowed: tl.tensor,
    edited: tl.tensor,
    words: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    low = tl.load(node_cu + row)
    high = tl.load(node_cu + row + 1)
    begin = low + tl.program_id(2)
    if begin < high:
        slot = tl.load(slots + row).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < vocab
        word = tl.load(disallowed + slot * words + column // 32, mask=inside, other=0)
        masked = inside & ((word >> (column % 32)) & 1 == 1)
        if tl.max(masked.to(tl.int32)) > 0:
            for node in range(begin, high, tl.num_programs(2)):
                at = edited + (low.to(tl.int64) + node - low) * vocab + column
                x = tl.load(at, mask=masked, other=0)
                tl.store(at, _MASKED, mask=masked & (tl.abs(x) < float("inf")))


@triton.jit
def _mask_after(
    cu_q: tl.tensor,
    node_cu: tl.tensor,
    slots: tl.tensor,
    input_ids: tl.tensor,
    tree_bits: tl.tensor,
    ban_counts: tl.tensor,
    ban_bounds: tl.tensor,
    ban_tokens: tl.tensor,
    tails: tl.tensor,
    edited: tl.tensor,
    bounds: tl.tensor,
    room: tl.tensor,
    vocab: tl.tensor,
    DEPTH: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    low = tl.load(node_cu + row)
    high = tl.load(node_cu + row + 1)
    begin = low + tl.program_id(1)
    if begin < high:
        slot = tl.load(slots + row).to(tl.int64)
        count = tl.load(ban_counts + slot)
        if count > 0:
            first = tl.load(cu_q + row + 1) - (high - low)
            for node in range(begin, high, tl.num_programs(1)):
                own = node - low
                bits = tl.load(tree_bits + first + own)
                at = edited + (low.to(tl.int64) + own) * vocab
                for base in range(0, count, _BANS):
                    ban = base + tl.arange(0, _BANS)
                    inside = ban < count
                    start = tl.load(ban_bounds + slot * bounds + ban, mask=inside, other=0)
                    end = tl.load(ban_bounds + slot * bounds + ban + 1, mask=inside, other=1)
                    length = end - start
                    before = ban_tokens + slot * room + end - 1
                    holds = inside
                    back = 0  # tokens between the one that is decided and the one looked at
                    for step in range(own):
                        place = own - step
                        if (bits >> place) & 1 == 1:
                            back += 1
                            seen = tl.load(input_ids + first + place)
                            asked = back < length
                            wanted = tl.load(before - back, mask=inside & asked, other=0)
                            holds = holds & ((wanted == seen) | (back >= length))
                    for step in range(DEPTH):
                        back += 1
                        seen = tl.load(tails + slot * DEPTH + DEPTH - 1 - step).to(tl.int64)
                        asked = back < length
                        wanted = tl.load(before - back, mask=inside & asked, other=0)
                        holds = holds & ((wanted == seen) | (back >= length))
                    token = tl.load(before, mask=inside, other=0)
                    x = tl.load(at + token, mask=holds, other=0)
                    tl.store(at + token, _MASKED, mask=holds & (tl.abs(x) < float("inf")))


@triton.jit
def _push_kernel(
    tokens: tl.tensor,
    accept_lens: tl.tensor,
    slots: tl.tensor,
    ban_counts: tl.tensor,
    tails: tl.tensor,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    length = tl.load(accept_lens + row)
    if (length > 0) & (tl.load(ban_counts + slot) > 0):
        lane = tl.arange(0, DEPTH)
        source = lane + length
        tail = tails + slot * DEPTH
        old = tl.load(tail + source, mask=source < DEPTH, other=0)
        new = tl.load(tokens + row * WIDTH + source - DEPTH, mask=source >= DEPTH, other=0)
        tl.debug_barrier()
        tl.store(tail + lane, tl.where(source < DEPTH, old, new))
