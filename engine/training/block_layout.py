"""Where the blocks of a batch begin, what stands in them, and what they are to say.

A block begins at an anchor a, the newest token that serving would know, and proposes the tokens
a + 1 to a + K. All blocks of a row are computed at once, side by side behind the row's text.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from .losses import start_weights


class Blocks(NamedTuple):
    """``anchors`` int64[B, A], ascending; ``valid`` bool[B, A]: the others fill the shape only."""

    anchors: torch.Tensor
    valid: torch.Tensor


def draw_anchors(
    own: torch.Tensor, count: int, drafts: int, surprise: torch.Tensor, focus: float
) -> Blocks:
    """``count`` anchors a row at random, or as many as leave room for ``drafts`` tokens.

    ``own``: see Batch. In a row with own text the token behind an anchor is own. ``surprise``
    float32[B, T] of the tokens, ``focus``: see ``start_weights``. Random numbers are the CPU's,
    whose state a run saves.
    """
    end = own.shape[1] - drafts
    fits = own[:, 2 : end + 1]  # what follows anchors 1, 2, …
    fits = fits | ~fits.any(1, keepdim=True)
    weight = start_weights(surprise[:, 1:end], fits, focus)
    # The first arrivals at these rates are draws without replacement; none of what does not fit.
    arrival = -torch.rand(fits.shape).clamp(min=1e-12).log().to(own.device)
    keys = torch.where(fits, arrival / weight.clamp(min=1e-6), torch.inf)
    picked = keys.topk(min(count, fits.shape[1]), dim=1, largest=False).indices.sort(1).values
    return Blocks(picked + 1, fits.gather(1, picked))


def every_anchor(ids: torch.Tensor, count: int, drafts: int) -> Iterator[tuple[slice, Blocks]]:
    """All anchors from 0 on, ``count`` at a time: which they are, and blocks of one shape."""
    total = ids.shape[1] - drafts
    for begin in range(0, total, count):
        end = min(begin + count, total)
        anchors = torch.arange(begin, begin + count, device=ids.device).clamp(max=total - 1)
        shape = len(ids), count
        valid = torch.ones(shape, dtype=torch.bool, device=ids.device)
        yield slice(begin, end), Blocks(anchors.expand(shape).contiguous(), valid)


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
