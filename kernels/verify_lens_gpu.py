"""Which drafts of a step are verified, in one Triton launch, one program a row.

Nothing is sorted: a draft is taken if fewer drafts than the budget come before it, and counting
these takes each program one look at all survivals, a thousand or so. What a program says of its
own row and what others say of it must be equal to the last bit, or more drafts than the budget are
taken: both come of the same operations on blocks of the same shape.
"""

import torch
import triton
import triton.language as tl

_MOST_ROWS = 256  # that a program looks at together


@triton.jit
def _chance(
    logits: tl.tensor,
    temperatures: tl.tensor,
    row: tl.tensor,
    inside: tl.tensor,
    stride: tl.tensor,
    k: tl.constexpr,
) -> tl.tensor:
    """float32[B]: that draft k of each row is accepted if all before it were."""
    logit = tl.load(logits + row.to(tl.int64) * stride + k, mask=inside, other=0.0)
    return tl.sigmoid(logit / tl.load(temperatures + k))


@triton.jit
def _allocate(
    logits: tl.tensor,
    temperatures: tl.tensor,
    caps: tl.tensor,
    budget: tl.tensor,
    confidence: tl.tensor,
    verify_lens: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    eps: tl.tensor,
    LIMIT: tl.constexpr,
    GAMMA: tl.constexpr,
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
    near = row // BLOCK * BLOCK + tl.arange(0, BLOCK)
    mine = near == row
    survivals = tl.zeros([DEPTHS, BLOCK], tl.float32)
    running = tl.full([BLOCK], 1.0, tl.float32)
    for k in tl.static_range(GAMMA):
        chance = _chance(logits, temperatures, near, near < rows, stride, k)
        running = running * chance
        survivals = tl.where((depth == k)[:, None], running[None, :], survivals)
        tl.store(confidence + near * GAMMA + k, chance, mask=mine)
    own = tl.sum(tl.where(mine[None, :], survivals, 0.0), 1)
    ahead = tl.zeros([DEPTHS, BLOCK], tl.int32)
    for low in range(0, rows, BLOCK):
        other = low + tl.arange(0, BLOCK)
        inside = other < rows
        room = tl.load(caps + other, mask=inside, other=0)
        running_all = tl.full([BLOCK], 1.0, tl.float32)
        for k in tl.static_range(LIMIT):
            running_all = running_all * _chance(logits, temperatures, other, inside, stride, k)
            rival = inside & (k < room) & (running_all >= eps)
            earlier = (k < depth)[:, None] | ((depth == k)[:, None] & (other < row)[None, :])
            before = running_all[None, :] > own[:, None]
            before = before | ((running_all[None, :] == own[:, None]) & earlier)
            ahead += (before & rival[None, :]).to(tl.int32)
    most = tl.load(budget)
    taken = (depth < tl.minimum(cap, LIMIT)) & (own >= eps) & (tl.sum(ahead, 1) < most)
    count = tl.where(most < 0, tl.minimum(cap, GAMMA), tl.sum(taken.to(tl.int32), 0))
    tl.store(verify_lens + row, 1 + count)


def allocate_verify(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    caps: torch.Tensor,
    budget: torch.Tensor,
    *,
    limit: int,
    eps: float,
    confidence: torch.Tensor,
    verify_lens: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Give the likeliest drafts of R rows a place in the step, see the reference.

    ``pdl``: programmatic dependent launch (Hopper and later). Raises ValueError unless logits have
    contiguous rows, they, temperatures and confidence are float32, and all others are contiguous,
    those not named here int32.
    """
    rows, gamma = logits.shape
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"logits are {logits.dtype} with stride {logits.stride(1)}")
    floats = (("temperatures", temperatures, (gamma,)), ("confidence", confidence, (rows, gamma)))
    for name, given, shape in floats:
        wrong = given.dtype != torch.float32 or given.shape != shape
        if wrong or not given.is_contiguous():
            raise ValueError(
                f"{name} is {given.dtype} {tuple(given.shape)}, not float32 {shape}, or not "
                "contiguous"
            )
    for name, given in (("caps", caps), ("budget", budget), ("verify_lens", verify_lens)):
        if given.dtype != torch.int32 or not given.is_contiguous():
            raise ValueError(f"{name} is {given.dtype}, or not contiguous")
    if rows:
        _allocate[(rows,)](
            logits,
            temperatures,
            caps,
            budget,
            confidence,
            verify_lens,
            rows,
            logits.stride(0),
            eps,
            LIMIT=max(0, min(limit, gamma)),
            GAMMA=gamma,
            DEPTHS=triton.next_power_of_2(max(gamma, 1)),
            BLOCK=min(triton.next_power_of_2(rows), _MOST_ROWS),
            PDL=pdl,
            num_warps=4,
            launch_pdl=pdl,
        )
