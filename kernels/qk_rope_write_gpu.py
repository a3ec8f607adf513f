"""Bias, q/k norm, rotary position and the write to the KV cache in one Triton kernel."""

import torch
import triton
import triton.language as tl

# Up to so many tokens a program takes few heads, to spread them over the processors.
_FEW_TOKENS = 64


@triton.jit
def _load_halves(
    source: tl.tensor, mask: tl.tensor, HALF: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The elements and those half a head further, as float32; zero where masked."""
    low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def _store_halves(
    target: tl.tensor, low: tl.tensor, high: tl.tensor, mask: tl.tensor, HALF: tl.constexpr
) -> None:
    """Write what `_load_halves` reads, rounded to the target's dtype."""
    tl.store(target, low.to(target.dtype.element_ty), mask=mask)
    tl.store(target + HALF, high.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _qk_norm_rope_write(
    qkv: tl.tensor,
    bias: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    positions: tl.tensor,
    kv_slots: tl.tensor,
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    eps: tl.tensor,
    qkv_stride: tl.tensor,
    cos_stride: tl.tensor,
    sin_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK))[:, None]
    # every operand is loaded in the tile's own shape: no exchange between threads
    pair = tl.broadcast_to(tl.arange(0, HALF_BLOCK)[None], (HEAD_BLOCK, HALF_BLOCK))
    inside = (head < HEADS + 2 * KV_HEADS) & (pair < HALF)
    is_query = inside & (head < HEADS)
    is_key = inside & (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = inside & (head >= HEADS + KV_HEADS)
    column = head * (2 * HALF) + pair
    # the model's constants may be read before the previous kernel ends
    low_shift, high_shift = 0.0, 0.0
    if bias is not None:
        low_shift, high_shift = _load_halves(bias + column, inside, HALF)
    q_low, q_high, k_low, k_high = 1.0, 1.0, 1.0, 1.0
    if q_norm is not None:
        q_low, q_high = _load_halves(q_norm + pair, pair < HALF, HALF)
    if k_norm is not None:
        k_low, k_high = _load_halves(k_norm + pair, pair < HALF, HALF)
    if PDL:
        tl.extra.cuda.gdc_wait()
        # Not before: attention's programs would crowd the few multiprocessors that are free.
        tl.extra.cuda.gdc_launch_dependents()
    position = tl.load(positions + token)
    slot = tl.load(kv_slots + token)
    low, high = _load_halves(qkv + token * qkv_stride + column, inside, HALF)
    row_cos = tl.load(cos + position * cos_stride + pair, mask=pair < HALF, other=0.0)
    row_sin = tl.load(sin + position * sin_stride + pair, mask=pair < HALF, other=0.0)
    low += low_shift
    high += high_shift
    scale = tl.rsqrt(tl.sum(low * low + high * high, 1) / (2 * HALF) + eps)[:, None]
    if q_norm is not None:
        low = tl.where(is_query, low * scale * q_low, low)
        high = tl.where(is_query, high * scale * q_high, high)
    if k_norm is not None:
        low = tl.where(is_key, low * scale * k_low, low)
        high = tl.where(is_key, high * scale * k_high, high)
    new_low = tl.where(is_value, low, low * row_cos - high * row_sin)
    new_high = tl.where(is_value, high, high * row_cos + low * row_sin)
    target = query + token * (HEADS * 2 * HALF) + column
    _store_halves(target, new_low, new_high, is_query, HALF)
    target = key_cache + slot * key_stride + (column - HEADS * 2 * HALF)
    _store_halves(target, new_low, new_high, is_key, HALF)
    target = value_cache + slot * value_stride + (column - (HEADS + KV_HEADS) * 2 * HALF)
    _store_halves(target, new_low, new_high, is_value, HALF)


def qk_norm_rope_write(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    bias: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Return the query [T, heads, D] of a qkv projection; write its keys and values.

    Shapes and dtypes are those of `qk_rope_write.qk_norm_rope_write`; qkv and the caches share a
    float dtype, D is even. float32 inside, one rounding at the end. ``pdl``: programmatic
    dependent launch (Hopper and later). Raises ValueError for a qkv of another width, rows that
    are not contiguous or caches whose slots are not.
    """
    tokens, width = qkv.shape
    head_dim = key_cache.shape[2]
    if width != (num_heads + 2 * num_kv_heads) * head_dim or qkv.stride(1) != 1:
        raise ValueError(
            f"qkv {tuple(qkv.shape)} is not contiguous rows of {num_heads} + 2 * {num_kv_heads} "
            f"heads of {head_dim}"
        )
    for cache in (key_cache, value_cache):
        if cache.shape[1:] != (num_kv_heads, head_dim) or cache.stride()[1:] != (head_dim, 1):
            raise ValueError(f"cache {tuple(cache.shape)} is not contiguous slots")
    query = qkv.new_empty(tokens, num_heads, head_dim)
    half_block = triton.next_power_of_2(head_dim // 2)
    head_block = 4 if tokens <= _FEW_TOKENS else 16
    _qk_norm_rope_write[(tokens, triton.cdiv(num_heads + 2 * num_kv_heads, head_block))](
        qkv,
        bias,
        q_norm,
        k_norm,
        cos,
        sin,
        positions,
        kv_slots,
        query,
        key_cache,
        value_cache,
        eps,
        qkv.stride(0),
        cos.stride(0),
        sin.stride(0),
        key_cache.stride(0),
        value_cache.stride(0),
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        HALF_BLOCK=half_block,
        HEAD_BLOCK=head_block,
        PDL=pdl,
        num_warps=max(head_block * half_block // 256, 1),
        launch_pdl=pdl,
    )
    return query
