"""Greedy choice over rows of logits in Triton: the best of each chunk, then of each row."""

import torch
import triton
import triton.language as tl

# Enough programs to keep every processor's loads in flight; beyond that, larger chunks.
_PROGRAMS = 1024
_SMALLEST_CHUNK, _LARGEST_BLOCK, _LARGEST_CHUNK = 1024, 4096, 16384
_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _chunk_best(
    logits: tl.tensor,
    addend: tl.tensor,
    best: tl.tensor,
    best_id: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    addend_stride: tl.tensor,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    DRAFT: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    top_id = tl.full((BLOCK,), 0, tl.int32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for start in tl.static_range(0, CHUNK, BLOCK):
        column = chunk * CHUNK + start + lane
        inside = column < vocab
        value = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32)
        if addend is not None:
            more = tl.load(addend + row * addend_stride + column, mask=inside, other=0.0)
            value = (value + more.to(tl.float32)).to(logits.dtype.element_ty).to(tl.float32)
        chosen = column
        if DRAFT:
            # a NaN outranks all else, an infinity is as the largest of numbers
            value = tl.where(value != value, float("inf"), tl.minimum(value, _LARGEST))
        else:
            # a NaN or an infinity outranks all logits, and its id is the row's answer
            usable = tl.abs(value) < float("inf")
            value = tl.where(usable, value, float("inf"))
            chosen = tl.where(usable, column, -1)
        better = inside & (value > top)
        top = tl.where(better, value, top)
        top_id = tl.where(better, chosen, top_id)
    peak = tl.max(top, 0)
    place = row * tl.num_programs(1) + chunk
    tl.store(best + place, peak)
    tl.store(best_id + place, tl.min(tl.where(top == peak, top_id, vocab), 0))


@triton.jit
def _row_best(
    best: tl.tensor,
    best_id: tl.tensor,
    ids: tl.tensor,
    chunks: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    inside = chunk < chunks
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    top = tl.load(best + row * chunks + chunk, mask=inside, other=-float("inf"))
    top_id = tl.load(best_id + row * chunks + chunk, mask=inside, other=vocab)
    first = tl.min(tl.where(top == tl.max(top, 0), top_id, vocab), 0)
    tl.store(ids + row, first.to(tl.int64))


def greedy_argmax(logits: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """int64[N]: the id of each row's largest logit, the lowest one among equals.

    ``logits`` [N, V] of any float dtype up to float32. A row with a NaN or an infinity has no
    choice: -1. ``pdl``: programmatic dependent launch (Hopper and later). Raises ValueError
    unless the rows are contiguous and V >= 1.
    """
    ids = logits.new_empty(logits.shape[0], dtype=torch.int64)
    _launch(logits, None, ids, False, pdl)
    return ids


def draft_argmax(
    logits: torch.Tensor,
    addend: torch.Tensor | None,
    *,
    tokens: torch.Tensor,
    pdl: bool = False,
) -> None:
    """The id of each row's largest logit whatever the rows hold, see the reference.

    ``pdl``: programmatic dependent launch (Hopper and later). Raises ValueError unless the rows of
    both are contiguous and of one shape and dtype, tokens are contiguous, and V >= 1.
    """
    if addend is not None and (
        addend.shape != logits.shape or addend.dtype != logits.dtype or addend.stride(1) != 1
    ):
        raise ValueError(
            f"addend {tuple(addend.shape)} of {addend.dtype} for logits {tuple(logits.shape)} of "
            f"{logits.dtype}, or not contiguous rows"
        )
    if tokens.shape != logits.shape[:1] or not tokens.is_contiguous():
        raise ValueError(f"tokens {tuple(tokens.shape)} of {logits.shape[0]} rows")
    _launch(logits, addend, tokens, True, pdl)


def _launch(
    logits: torch.Tensor, addend: torch.Tensor | None, ids: torch.Tensor, draft: bool, pdl: bool
) -> None:
    rows, vocab = logits.shape
    if vocab < 1 or logits.stride(1) != 1:
        raise ValueError(f"logits {tuple(logits.shape)} are not contiguous rows of a vocabulary")
    chunk = triton.next_power_of_2(triton.cdiv(rows * vocab, _PROGRAMS))
    chunk = min(max(chunk, _SMALLEST_CHUNK), _LARGEST_CHUNK)
    block = min(chunk, _LARGEST_BLOCK)
    chunks = triton.cdiv(vocab, chunk)
    best = logits.new_empty(rows, chunks, dtype=torch.float32)
    best_id = logits.new_empty(rows, chunks, dtype=torch.int32)
    _chunk_best[(rows, chunks)](
        logits,
        addend,
        best,
        best_id,
        vocab,
        logits.stride(0),
        0 if addend is None else addend.stride(0),
        CHUNK=chunk,
        BLOCK=block,
        DRAFT=draft,
        PDL=pdl,
        num_warps=min(block // 256, 8),
        launch_pdl=pdl,
    )
    _row_best[(rows,)](
        best,
        best_id,
        ids,
        chunks,
        vocab,
        BLOCK=triton.next_power_of_2(chunks),
        PDL=pdl,
        num_warps=1 if chunks <= 256 else 4,
        launch_pdl=pdl,
    )
