"""The likeliest tokens of each row of logits in Triton: of each chunk, then of each row."""

import torch
import triton
import triton.language as tl

MOST = 8
_PROGRAMS = 1024
_SMALLEST_CHUNK, _LARGEST_CHUNK = 1024, 4096


@triton.jit
def _chunk_tops(
    logits: tl.tensor,
    values: tl.tensor,
    places: tl.tensor,
    sums: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    COUNT: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    part = row * tl.num_programs(1) + tl.program_id(1)
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
    peak = tl.max(value, 0)
    known = peak < float("inf")
    weight = tl.exp(value - tl.where(known, peak, 0.0))
    tl.store(sums + part, tl.sum(tl.where(known, weight, 0.0), 0))
    left = inside
    for k in tl.static_range(COUNT):
        best = tl.max(tl.where(left, value, -float("inf")), 0)
        found = left & (value == best)
        place = tl.min(tl.where(found, column, vocab), 0)
        left = left & (column != place)
        tl.store(values + part * COUNT + k, best)
        tl.store(places + part * COUNT + k, place)


@triton.jit
def _row_tops(
    values: tl.tensor,
    places: tl.tensor,
    sums: tl.tensor,
    names: tl.tensor,
    tokens: tl.tensor,
    probabilities: tl.tensor,
    chunks: tl.tensor,
    vocab: tl.tensor,
    COUNT: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    lane = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # A chunk's first value is its peak, which its sum is relative to.
    there = chunk < chunks
    peaks = tl.load(values + (row * chunks + chunk) * COUNT, mask=there, other=-float("inf"))
    peak = tl.max(peaks, 0)
    usable = peak < float("inf")
    parts = tl.load(sums + row * chunks + chunk, mask=there, other=0.0)
    peak = tl.where(usable, peak, 0.0)
    scale = tl.exp(tl.where(peaks < float("inf"), peaks, -float("inf")) - peak)
    total = tl.sum(parts * scale, 0)
    inside = lane < chunks * COUNT
    value = tl.load(values + row * chunks * COUNT + lane, mask=inside, other=-float("inf"))
    place = tl.load(places + row * chunks * COUNT + lane, mask=inside, other=vocab)
    left = inside & (place < vocab)
    for k in tl.static_range(COUNT):
        best = tl.max(tl.where(left, value, -float("inf")), 0)
        token = tl.min(tl.where(left & (value == best), place, vocab), 0)
        left = left & (place != token)
        out = token.to(tl.int64)
        if names is not None:
            out = tl.load(names + token, mask=usable & (token < vocab), other=-1).to(tl.int64)
        probability = tl.exp(tl.where(usable, best - peak, 0.0)) / total
        tl.store(tokens + row * COUNT + k, tl.where(usable, out, -1))
        tl.store(probabilities + row * COUNT + k, tl.where(usable, probability, 0.0))


def top_tokens(
    logits: torch.Tensor, count: int, names: torch.Tensor | None = None, *, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64[N, K] tokens and float32[N, K] probabilities of the K likeliest, see the reference.

    K is 1 to MOST. ``pdl``: programmatic dependent launch (Hopper and later). Raises ValueError
    unless the rows are contiguous, K fits, and ``names`` is a contiguous int64[V].
    """
    rows, vocab = logits.shape
    if not 1 <= count <= min(MOST, vocab) or logits.stride(1) != 1:
        raise ValueError(f"{count} of contiguous rows {tuple(logits.shape)}, at most {MOST}")
    if names is not None and (names.shape != (vocab,) or not names.is_contiguous()):
        raise ValueError(f"names {tuple(names.shape)} of {vocab} logits")
    chunk = triton.next_power_of_2(triton.cdiv(rows * vocab, _PROGRAMS))
    chunk = min(max(chunk, _SMALLEST_CHUNK), _LARGEST_CHUNK)
    chunks = triton.cdiv(vocab, chunk)
    values = logits.new_empty(rows, chunks, count, dtype=torch.float32)
    places = logits.new_empty(rows, chunks, count, dtype=torch.int32)
    sums = logits.new_empty(rows, chunks, dtype=torch.float32)
    tokens = logits.new_empty(rows, count, dtype=torch.int64)
    probabilities = logits.new_empty(rows, count, dtype=torch.float32)
    if rows == 0:
        return tokens, probabilities
    _chunk_tops[(rows, chunks)](
        logits,
        values,
        places,
        sums,
        vocab,
        logits.stride(0),
        COUNT=count,
        CHUNK=chunk,
        PDL=pdl,
        num_warps=chunk // 512,
        launch_pdl=pdl,
    )
    block = triton.next_power_of_2(chunks * count)
    _row_tops[(rows,)](
        values,
        places,
        sums,
        names,
        tokens,
        probabilities,
        chunks,
        vocab,
        COUNT=count,
        CHUNKS=triton.next_power_of_2(chunks),
        BLOCK=block,
        PDL=pdl,
        num_warps=max(1, min(8, block // 256)),
        launch_pdl=pdl,
    )
    return tokens, probabilities
