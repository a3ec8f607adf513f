# mypy: disable-error-code="no-untyped-call"
"""`simulate_survival` on the GPU, one program a row."""

import torch
import triton
import triton.language as tl

from .simulate_survival import DIFFICULTY, SEGMENT

_SEGMENT = tl.constexpr(SEGMENT)
_DIFFICULTY = tl.constexpr(DIFFICULTY)


def simulate_survival(
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    root: float,
    logits: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    """Chances and accept lengths of R rows, see the reference."""
    rows, drafts = logits.shape
    if rows:
        _survival_kernel[(rows,)](
            slots,
            seq_lens,
            logits,
            lens,
            root,
            DRAFTS=drafts,
            PADDED=triton.next_power_of_2(drafts),
            num_warps=1,
        )


@triton.jit
def _survival_kernel(
    slots: tl.tensor,
    seq_lens: tl.tensor,
    logits: tl.tensor,
    lens: tl.tensor,
    root: tl.tensor,
    DRAFTS: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    draft = tl.arange(0, PADDED)
    position = tl.load(seq_lens + slot).to(tl.int64) + 1 + draft
    segment = _DIFFICULTY + position // _SEGMENT
    low = tl.exp2(tl.log2(_uniform(slot, segment)) * root)
    high = tl.exp2(tl.log2(_uniform(slot, segment + 1)) * root)
    chance = low + (high - low) * ((position % _SEGMENT).to(tl.float32) / _SEGMENT)
    inside = draft < DRAFTS
    tl.store(logits + row * DRAFTS + draft, tl.log(chance / (1 - chance)), mask=inside)
    fails = inside & (_uniform(slot, position) >= chance)
    tl.store(lens + row, 1 + tl.min(tl.where(fails, draft, DRAFTS), 0))


@triton.jit
def _uniform(slot: tl.tensor, position: tl.tensor) -> tl.tensor:
    """float32 in (0, 1), 24 bits of SplitMix64's output for (slot, position)."""
    word = (slot.to(tl.uint64) << 32) | position.to(tl.uint64)
    word = word * tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    word = (word ^ (word >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    word = (word ^ (word >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    word = word ^ (word >> 31)
    return ((word >> 40).to(tl.float32) + 0.5) / 16777216.0
