"""What a draft model proposes at a node, in one Triton launch: of each chunk, then of each row.

Chunks of a row are looked through by programs of their own; the one that ends last puts together
what they found.
"""

import torch
import triton
import triton.language as tl

MOST = 8
_PROGRAMS = 1024
_SMALLEST_CHUNK, _LARGEST_CHUNK = 1024, 4096


@triton.jit
def _top_candidates(
    logits: tl.tensor,
    token_ids: tl.tensor,
    values: tl.tensor,
    places: tl.tensor,
    sums: tl.tensor,
    arrived: tl.tensor,
    tokens: tl.tensor,
    probs: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    tokens_stride: tl.tensor,
    chunks: tl.tensor,
    COUNT: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    part = row * chunks + tl.program_id(1)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = column < vocab
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    # A NaN or an infinity spoils its row: the largest of all values stands for it.
    usable = tl.abs(value) < float("inf")
    value = tl.where(usable, value, float("inf"))
    value = tl.where(inside, value, -float("inf"))
    if probs is not None:
        peak = tl.max(value, 0)
        known = peak < float("inf")
        weight = tl.exp(value - tl.where(known, peak, 0.0))
        tl.store(sums + part, tl.sum(tl.where(known, weight, 0.0), 0))
    for k in tl.static_range(COUNT):
        best = tl.max(value, 0)
        place = tl.min(tl.where(inside & (value == best), column, vocab), 0)
        inside = inside & (column != place)
        value = tl.where(inside, value, -float("inf"))
        tl.store(values + part * COUNT + k, best)
        tl.store(places + part * COUNT + k, place)
    # Every thread's stores come before the one thread's release.
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel", scope="gpu") == chunks - 1:
        tl.store(arrived + row, 0)
        _of_row(
            values, places, sums, token_ids, tokens + row * tokens_stride, probs, row, chunks,
            vocab, COUNT, CHUNKS, BLOCK,
        )  # fmt: skip


@triton.jit
def _of_row(
    values: tl.tensor, places: tl.tensor, sums: tl.tensor, token_ids: tl.tensor,
    tokens: tl.tensor, probs: tl.tensor, row: tl.tensor, chunks: tl.tensor, vocab: tl.tensor,
    COUNT: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """The best of a row's chunks. Loads go past L1, which may hold what was there before."""
    lane = tl.arange(0, BLOCK)
    inside = lane < chunks * COUNT
    at = row * chunks * COUNT + lane
    value = tl.load(values + at, mask=inside, other=-float("inf"), cache_modifier=".cg")
    place = tl.load(places + at, mask=inside, other=vocab, cache_modifier=".cg")
    peak = tl.max(value, 0)
    usable = peak < float("inf")
    peak = tl.where(usable, peak, 0.0)
    total = 1.0
    if probs is not None:
        chunk = tl.arange(0, CHUNKS)
        there = chunk < chunks
        part = row * chunks + chunk
        # A chunk's first value is its peak, which its sum is relative to.
        peaks = tl.load(
            values + part * COUNT, mask=there, other=-float("inf"), cache_modifier=".cg"
        )
        parts = tl.load(sums + part, mask=there, other=0.0, cache_modifier=".cg")
        scale = tl.exp(tl.where(peaks < float("inf"), peaks, -float("inf")) - peak)
        total = tl.sum(parts * scale, 0)
        total = tl.where(total > 0, total, 1.0)  # nothing was usable
    left = inside & (place < vocab)
    for k in tl.static_range(COUNT):
        best = tl.max(tl.where(left, value, -float("inf")), 0)
        token = tl.min(tl.where(left & (value == best), place, vocab), 0)
        left = left & (place != token)
        out = tl.where(token < vocab, token, 0).to(tl.int64)
        if token_ids is not None:
            out = tl.load(token_ids + out)
        tl.store(tokens + k, out)
        if probs is not None:
            chance = tl.exp(tl.where(usable, best - peak, 0.0)) / total
            tl.store(probs + row * COUNT + k, tl.where(usable, chance, 0.0))


def top_candidates(
    logits: torch.Tensor,
    token_ids: torch.Tensor | None,
    *,
    tokens: torch.Tensor,
    probs: torch.Tensor | None,
    arrived: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """The K most likely tokens of each of N rows, see the reference.

    K is 1 to MOST. ``arrived``: int32 zeros, at least N, which are zeros again when the kernel
    ends; without, they are made. ``pdl``: programmatic dependent launch (Hopper and later). Raises
    ValueError unless the rows are contiguous, K fits, and ``token_ids`` is a contiguous int64[V].
    """
    (rows, vocab), count = logits.shape, tokens.shape[1]
    if not 1 <= count <= min(MOST, vocab) or logits.stride(1) != 1:
        raise ValueError(f"{count} of contiguous rows {tuple(logits.shape)}, at most {MOST}")
    if token_ids is not None and (token_ids.shape != (vocab,) or not token_ids.is_contiguous()):
        raise ValueError(f"token_ids {tuple(token_ids.shape)} of {vocab} logits")
    if tokens.stride(1) != 1 or (probs is not None and not probs.is_contiguous()):
        raise ValueError("tokens and probs are not contiguous rows")
    if rows == 0:
        return
    chunk = triton.next_power_of_2(triton.cdiv(rows * vocab, _PROGRAMS))
    chunk = min(max(chunk, _SMALLEST_CHUNK), _LARGEST_CHUNK)
    chunks = triton.cdiv(vocab, chunk)
    if arrived is None or len(arrived) < rows:
        arrived = torch.zeros(rows, dtype=torch.int32, device=logits.device)
    _top_candidates[(rows, chunks)](
        logits,
        token_ids,
        logits.new_empty(rows, chunks, count, dtype=torch.float32),
        logits.new_empty(rows, chunks, count, dtype=torch.int32),
        None if probs is None else logits.new_empty(rows, chunks, dtype=torch.float32),
        arrived,
        tokens,
        probs,
        vocab,
        logits.stride(0),
        tokens.stride(0),
        chunks,
        COUNT=count,
        CHUNK=chunk,
        CHUNKS=triton.next_power_of_2(chunks),
        BLOCK=triton.next_power_of_2(chunks * count),
        PDL=pdl,
        num_warps=chunk // 512,
        launch_pdl=pdl,
    )
