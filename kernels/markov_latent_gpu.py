"""What the Markov heads of block drafts multiply by their vocabulary matrix, in Triton."""

import torch
import triton
import triton.language as tl

_LARGEST_BLOCK = 1024


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    """In float32; of large values of either sign the exponential is 0, never infinite."""
    decay = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - decay) / (1.0 + decay)
    return tl.where(x < 0, -size, size)


@triton.jit
def _gated_latent(
    gate: tl.tensor,
    embedded: tl.tensor,
    out: tl.tensor,
    rank: tl.tensor,
    gate_stride: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < rank
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    logit = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(embedded + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.sigmoid(logit) * value
    tl.store(out + row * rank + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rnn_latent(
    joint: tl.tensor,
    state: tl.tensor,
    out: tl.tensor,
    rank: tl.tensor,
    joint_stride: tl.tensor,
    state_stride: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < rank
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    source = joint + row * joint_stride + column
    share = tl.sigmoid(tl.load(source, mask=inside, other=0.0).to(tl.float32))
    candidate = tl.load(source + rank, mask=inside, other=0.0).to(tl.float32)
    latent = _tanh(tl.load(source + 2 * rank, mask=inside, other=0.0).to(tl.float32))
    kept = state + row * state_stride + column
    before = tl.load(kept, mask=inside, other=0.0).to(tl.float32)
    after = share * before + (1.0 - share) * _tanh(candidate)
    tl.store(kept, after.to(state.dtype.element_ty), mask=inside)
    tl.store(out + row * rank + column, latent.to(out.dtype.element_ty), mask=inside)


def gated_latent(gate: torch.Tensor, embedded: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """[N, r]: embeddings [N, r] let through by the gates' logits [N, r], see the reference.

    ``pdl``: programmatic dependent launch (Hopper and later). Raises ValueError for shapes that
    differ, or rows that are not contiguous.
    """
    rows, rank = embedded.shape
    if gate.shape != embedded.shape or gate.stride(1) != 1 or embedded.stride(1) != 1:
        raise ValueError(f"gates {tuple(gate.shape)} of embeddings {tuple(embedded.shape)}")
    out = embedded.new_empty(rows, rank)
    if rows:
        block = min(triton.next_power_of_2(rank), _LARGEST_BLOCK)
        _gated_latent[(rows, triton.cdiv(rank, block))](
            gate, embedded, out, rank, gate.stride(0), embedded.stride(0),
            BLOCK=block, PDL=pdl, num_warps=max(block // 256, 1), launch_pdl=pdl,
        )  # fmt: skip
    return out


def rnn_latent(joint: torch.Tensor, state: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """[N, r] of ``joint`` [N, 3r]; ``state`` [N, r] moves on, see the reference.

    ``pdl``: programmatic dependent launch (Hopper and later). Raises ValueError for a joint of
    another width, or rows that are not contiguous.
    """
    rows, rank = state.shape
    if joint.shape != (rows, 3 * rank) or joint.stride(1) != 1 or state.stride(1) != 1:
        raise ValueError(f"joint {tuple(joint.shape)} of states {tuple(state.shape)}")
    out = joint.new_empty(rows, rank)
    if rows:
        block = min(triton.next_power_of_2(rank), _LARGEST_BLOCK)
        _rnn_latent[(rows, triton.cdiv(rank, block))](
            joint, state, out, rank, joint.stride(0), state.stride(0),
            BLOCK=block, PDL=pdl, num_warps=max(block // 256, 1), launch_pdl=pdl,
        )  # fmt: skip
    return out
