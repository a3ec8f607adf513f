"""Where the blocks of a batch begin, what stands in them, and what they are to say.

A block begins at an anchor a, the newest token that serving would know, and proposes the tokens
a + 1 to a + K. All blocks of a row are computed at once, side by side behind the row's text.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from .losses import start_weights


class Blocks(NamedTuple):
    """``anchors`` int64[B, A], ascending; ``valid`` bool[B, A]: the others fill the shape only.
    ``weight`` float32[B, A]: what a block counts, 1 on average over the valid ones of a row.
    """

    anchors: torch.Tensor
    valid: torch.Tensor
    weight: torch.Tensor


def draw_anchors(
    own: torch.Tensor, count: int, drafts: int, surprise: torch.Tensor, focus: float
) -> Blocks:
    """``count`` anchors a row at random, or as many as leave room for ``drafts`` tokens.

    ``own``: see Batch. In a row with own text the token behind an anchor is own. ``surprise``
    float32[B, T] of the tokens, ``focus``: see ``start_weights``, by which a place counts: so it is
    drawn more often, and where it is always drawn its block weighs more. Random numbers are the
    CPU's, whose state a run saves.
    """
    end = own.shape[1] - drafts
    fits = own[:, 2 : end + 1]  # what follows anchors 1, 2, …
    fits = fits | ~fits.any(1, keepdim=True)
    count = min(count, fits.shape[1])
    wanted = start_weights(surprise[:, 1:end], fits, focus).double().clamp(min=1e-6) * fits
    chance, rate = _chances(wanted, fits, count)
    # Every 1 of the chances' sum, from a random place on: each is drawn by its chance, none twice.
    at = torch.rand(len(own), 1, dtype=torch.float64).to(own.device)
    marks = at + torch.arange(count, device=own.device)
    picked = torch.searchsorted(chance.cumsum(1), marks, right=True).clamp(max=fits.shape[1] - 1)
    valid = fits.gather(1, picked)
    weight = (rate * wanted).gather(1, picked).clamp(min=1.0) * valid
    weight *= valid.sum(1, keepdim=True) / weight.sum(1, keepdim=True)
    return Blocks(picked + 1, valid, weight.float())


def _chances(
    wanted: torch.Tensor, fits: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each place [B, R] to be one of ``count``: ``rate`` [B, 1] times ``wanted``, 1 at most; and
    the rate. Where fewer fit, the others fill up.
    """
    room = fits.sum(1, keepdim=True).clamp(max=count).double()
    high = wanted.sort(1, descending=True).values
    # With the first n places drawn for certain the others share what is left by this rate, which
    # is the one once the next place's chance is below 1.
    left = high.flip(1).cumsum(1).flip(1).clamp(min=1e-12)
    rates = (room - torch.arange(high.shape[1], device=high.device)).clamp(min=0.0) / left
    rate = rates.gather(1, (rates * high <= 1.0).int().argmax(1, keepdim=True))
    spare = (count - room) / (~fits).sum(1, keepdim=True).clamp(min=1)
    chance = torch.where(fits, (rate * wanted).clamp(max=1.0), spare)
    return torch.where(fits & (fits.sum(1, keepdim=True) <= count), 1.0, chance), rate


def every_anchor(ids: torch.Tensor, count: int, drafts: int) -> Iterator[tuple[slice, Blocks]]:
    """All anchors from 0 on, ``count`` at a time: which they are, and blocks of one shape."""
    total = ids.shape[1] - drafts
    for begin in range(0, total, count):
        end = min(begin + count, total)
        anchors = torch.arange(begin, begin + count, device=ids.device).clamp(max=total - 1)
        shape = len(ids), count
        weight = torch.ones(shape, device=ids.device)
        yield slice(begin, end), Blocks(anchors.expand(shape).contiguous(), weight > 0, weight)


def block_ids(ids: torch.Tensor, anchors: torch.Tensor, rows: int, mask: int) -> torch.Tensor:
    """int64[B, A * rows]: each block's anchor, then masks."""
    made = ids.new_full((*anchors.shape, rows), mask)
    made[..., 0] = ids.gather(1, anchors)
    return made.flatten(1)


def block_positions(anchors: torch.Tensor, rows: int) -> torch.Tensor:
    """int64[B, A * rows]."""
    return (anchors[..., None] + torch.arange(rows, device=anchors.device)).flatten(1)


def behind(values: torch.Tensor, anchors: torch.Tensor, offset: int, drafts: int) -> torch.Tensor:
    """[B, A, K, …]: of ``values`` [B, T, …], those at anchor + ``offset`` and on.

    Offset 1 are the tokens that a block proposes, offset 0 those that stand before these.
    """
    places = anchors[..., None] + offset + torch.arange(drafts, device=anchors.device)
    rows = torch.arange(len(values), device=anchors.device)[:, None, None]
    return values[rows, places]
