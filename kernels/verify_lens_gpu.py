"""Which drafts of a step are verified, in one Triton launch, one program a row.

Nothing is sorted: a draft is taken if fewer drafts than the budget come before it, and counting
these takes each program one look at all survivals, a thousand or so.
"""

import torch
import triton
import triton.language as tl

_MOST_ROWS = 256  # that a program looks at together


@triton.jit
def _allocate(
    confidence: tl.tensor,
    caps: tl.tensor,
    budget: tl.tensor,
    verify_lens: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    eps: tl.tensor,
    gamma: tl.tensor,
    LIMIT: tl.constexpr,
    DEPTHS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    depth = tl.arange(0, DEPTHS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    cap = tl.load(caps + row)
    own = tl.zeros([DEPTHS], tl.float32)
    running = tl.full((), 1.0, tl.float32)
    for k in tl.static_range(LIMIT):
        running = running * tl.load(confidence + row.to(tl.int64) * stride + k)
        own = tl.where(depth == k, running, own)
    ahead = tl.zeros([DEPTHS, BLOCK], tl.int32)
    for low in range(0, rows, BLOCK):
        other = low + tl.arange(0, BLOCK)
        inside = other < rows
        room = tl.load(caps + other, mask=inside, other=0)
        running_all = tl.full([BLOCK], 1.0, tl.float32)
        for k in tl.static_range(LIMIT):
            place = confidence + other.to(tl.int64) * stride + k
            running_all = running_all * tl.load(place, mask=inside, other=0.0)
            rival = inside & (k < room) & (running_all >= eps)
            earlier = (k < depth)[:, None] | ((depth == k)[:, None] & (other < row)[None, :])
            before = running_all[None, :] > own[:, None]
            before = before | ((running_all[None, :] == own[:, None]) & earlier)
            ahead += (before & rival[None, :]).to(tl.int32)
    most = tl.load(budget)
    taken = (depth < tl.minimum(cap, LIMIT)) & (own >= eps) & (tl.sum(ahead, 1) < most)
    count = tl.where(most < 0, tl.minimum(cap, gamma), tl.sum(taken.to(tl.int32), 0))
    tl.store(verify_lens + row, 1 + count)


def allocate_verify(
    confidence: torch.Tensor,
    caps: torch.Tensor,
    budget: torch.Tensor,
    *,
    limit: int,
    eps: float,
    verify_lens: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Give the likeliest drafts of R rows a place in the step, see the reference.

    ``pdl``: programmatic dependent launch (Hopper and later). Raises ValueError unless confidence
    is float32 with contiguous rows and the others are contiguous int32.
    """
    rows, gamma = confidence.shape
    if confidence.dtype != torch.float32 or confidence.stride(1) != 1:
        raise ValueError(f"confidence is {confidence.dtype} with stride {confidence.stride(1)}")
    for name, given in (("caps", caps), ("budget", budget), ("verify_lens", verify_lens)):
        if given.dtype != torch.int32 or not given.is_contiguous():
            raise ValueError(f"{name} is {given.dtype}, or not contiguous")
    limit = max(0, min(limit, gamma))
    if rows:
        _allocate[(rows,)](
            confidence,
            caps,
            budget,
            verify_lens,
            rows,
            confidence.stride(0),
            eps,
            gamma,
            LIMIT=limit,
            DEPTHS=triton.next_power_of_2(max(limit, 1)),
            BLOCK=min(triton.next_power_of_2(rows), _MOST_ROWS),
            PDL=pdl,
            num_warps=4,
            launch_pdl=pdl,
        )
