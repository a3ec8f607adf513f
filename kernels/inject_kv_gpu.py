"""Keys and values of all layers from one projection, into the KV cache, in one Triton launch."""

import torch
import triton
import triton.language as tl

# Up to so many tokens a program takes few heads, to spread them over the processors.
_FEW_TOKENS = 64


@triton.jit
def _inject_kv(
    kv: tl.tensor,
    bias: tl.tensor,
    k_norms: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    positions: tl.tensor,
    kv_slots: tl.tensor,
    cache: tl.tensor,
    eps: tl.tensor,
    kv_stride: tl.tensor,
    cos_stride: tl.tensor,
    sin_stride: tl.tensor,
    part_stride: tl.tensor,
    slot_stride: tl.tensor,
    LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Some heads of one token; heads are numbered through all layers, keys before values."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK))[:, None]
    pair = tl.broadcast_to(tl.arange(0, HALF_BLOCK)[None], (HEAD_BLOCK, HALF_BLOCK))
    inside = (head < LAYERS * 2 * KV_HEADS) & (pair < HALF)
    part = head // KV_HEADS  # 2 * layer, and 1 more for values
    is_key = inside & (part % 2 == 0)
    column = head * (2 * HALF) + pair
    # the model's constants may be read before the previous kernel ends
    low_shift, high_shift = 0.0, 0.0
    if bias is not None:
        low_shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        high_shift = tl.load(bias + column + HALF, mask=inside, other=0.0).to(tl.float32)
    low_gain, high_gain = 1.0, 1.0
    if k_norms is not None:
        gain = k_norms + part // 2 * (2 * HALF) + pair
        low_gain = tl.load(gain, mask=is_key, other=0.0).to(tl.float32)
        high_gain = tl.load(gain + HALF, mask=is_key, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    position = tl.load(positions + token)
    slot = tl.load(kv_slots + token)
    source = kv + token * kv_stride + column
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32) + low_shift
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32) + high_shift
    row_cos = tl.load(cos + position * cos_stride + pair, mask=pair < HALF, other=0.0)
    row_sin = tl.load(sin + position * sin_stride + pair, mask=pair < HALF, other=0.0)
    key_low, key_high = low, high
    if k_norms is not None:
        scale = tl.rsqrt(tl.sum(low * low + high * high, 1) / (2 * HALF) + eps)[:, None]
        key_low = low * scale * low_gain
        key_high = high * scale * high_gain
    new_low = tl.where(is_key, key_low * row_cos - key_high * row_sin, low)
    new_high = tl.where(is_key, key_high * row_cos + key_low * row_sin, high)
    target = cache + part.to(tl.int64) * part_stride + slot * slot_stride
    target += head % KV_HEADS * (2 * HALF) + pair
    tl.store(target, new_low.to(cache.dtype.element_ty), mask=inside)
    tl.store(target + HALF, new_high.to(cache.dtype.element_ty), mask=inside)


def inject_kv(
    kv: torch.Tensor,
    k_norms: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    cache: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Write the keys and values of T tokens in N layers, see the reference.

    ``pdl``: programmatic dependent launch (Hopper and later). Raises ValueError for a kv of
    another width or whose rows are not contiguous, k_norms that are not contiguous, and a cache
    that is not.
    """
    layers, two, _, heads, dim = cache.shape
    tokens, width = kv.shape
    if two != 2 or not cache.is_contiguous():
        raise ValueError(f"cache {tuple(cache.shape)} is not contiguous keys and values")
    if width != layers * 2 * heads * dim or kv.stride(1) != 1:
        raise ValueError(
            f"kv {tuple(kv.shape)} is not contiguous rows of {layers} * 2 * {heads} heads of {dim}"
        )
    if k_norms is not None and (k_norms.shape != (layers, dim) or not k_norms.is_contiguous()):
        raise ValueError(f"k_norms {tuple(k_norms.shape)} of {layers} layers of heads of {dim}")
    if tokens == 0:
        return
    half_block = triton.next_power_of_2(dim // 2)
    head_block = 4 if tokens <= _FEW_TOKENS else 16
    _inject_kv[(tokens, triton.cdiv(layers * 2 * heads, head_block))](
        kv,
        bias,
        k_norms,
        cos,
        sin,
        positions,
        kv_slots,
        cache,
        eps,
        kv.stride(0),
        cos.stride(0),
        sin.stride(0),
        cache.stride(1),
        cache.stride(2),
        LAYERS=layers,
        KV_HEADS=heads,
        HALF=dim // 2,
        HALF_BLOCK=half_block,
        HEAD_BLOCK=head_block,
        PDL=pdl,
        num_warps=max(head_block * half_block // 256, 1),
        launch_pdl=pdl,
    )
