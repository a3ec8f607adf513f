"""How likely drafts are to be accepted, and how many are, by a made-up process: the reference.

For timing alone. A request's difficulty is drawn anew every SEGMENT positions, as the chance u^r
of a draft there, u uniform: Beta(1 / r, 1), of mean 1 / (1 + r). Between them the chance moves in a
straight line. A draft at a position holds iff another uniform number is below its chance. All
numbers are SplitMix64's output for (slot, position), so that a run repeats itself and no draft is
tried twice with another outcome.
"""

import torch

SEGMENT = 64
DIFFICULTY = 1 << 31  # apart from the numbers that decide on drafts
_UNIT = 1 << 24


def simulate_survival(
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    root: float,
    logits: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    """Of R rows in ``slots`` int32[R], whose newest tokens stand at ``seq_lens`` int32[S].

    ``root``: r. Out: ``logits`` float32[R, G], those of the chances of G drafts behind the newest
    token; ``lens`` int32[R], 1 and the drafts that hold before the first that does not. Nothing is
    raised.
    """
    slot = slots.long()
    place = torch.arange(1, logits.shape[1] + 1, device=slots.device)
    position = seq_lens[slot].long()[:, None] + place
    segment, within = position // SEGMENT, position % SEGMENT
    low, high = (
        (_uniform(slot[:, None], DIFFICULTY + segment + i).log2() * root).exp2() for i in (0, 1)
    )
    chance = low + (high - low) * (within.float() / SEGMENT)
    logits.copy_((chance / (1 - chance)).log())
    holds = _uniform(slot[:, None], position) < chance
    lens.copy_(1 + holds.long().cumprod(dim=1).sum(dim=1))


def _uniform(slot: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """float32 in (0, 1), 24 bits of SplitMix64's output; int64 wraps as uint64 does."""
    word = (slot << 32 | position) * (0x9E3779B97F4A7C15 - (1 << 64))
    word = (word ^ _shift(word, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    word = (word ^ _shift(word, 27)) * (0x94D049BB133111EB - (1 << 64))
    word = word ^ _shift(word, 31)
    return (_shift(word, 40).float() + 0.5) / _UNIT


def _shift(word: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift to the right."""
    return word >> bits & (1 << 64 - bits) - 1
