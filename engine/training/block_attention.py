"""Attention of many blocks of a row at once, each over its own context and itself.

Keys are the text's T positions, from the target's features, and then all blocks' own rows. A block
sees the text before its anchor; the anchor's own features are not known when serving drafts.
"""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .compiled import compiled

# Of indices of sequence, head, query and key, which broadcast: whether the key is seen.
Visible = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# Something that the attention it is made for takes.
Mask = object


class Attention(NamedTuple):
    """``mask(visible, like, keys)``: for queries ``like`` [B, Q]; ``attend(query, key, value,
    mask)``: [B, heads, Q, D].
    """

    mask: Callable[[Visible, torch.Tensor, int], Mask]
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Mask], torch.Tensor]


def block_visible(anchors: torch.Tensor, tokens: int, rows: int, window: int) -> Visible:
    """What blocks at ``anchors`` [B, A] of ``rows`` rows see behind a text of ``tokens``.

    Without a ``window`` (0) a block is bidirectional; with one it is causal, and a row sees
    ``window`` positions, its own included.
    """

    def visible(
        sequence: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        del head
        anchor, place = anchors[sequence, query // rows], query % rows
        own = key - tokens
        context = key < anchor
        block = (own >= 0) & (own // rows == query // rows)
        if window:
            context = context & (anchor + place - key < window)
            distance = place - own % rows
            block = block & (distance >= 0) & (distance < window)
        return context | block

    return visible


def _dense_mask(visible: Visible, like: torch.Tensor, keys: int) -> Mask:
    """bool[B, 1, Q, keys]."""
    device = like.device
    sequence = torch.arange(like.shape[0], device=device)[:, None, None]
    query = torch.arange(like.shape[1], device=device)[None, :, None]
    key = torch.arange(keys, device=device)[None, None, :]
    return visible(sequence, sequence, query, key)[:, None]


def _dense_attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Mask
) -> torch.Tensor:
    assert isinstance(mask, torch.Tensor)
    # Kernels that take a mask want as many KV heads as query heads.
    group = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


DENSE = Attention(_dense_mask, _dense_attend)


# Fewer queries than this go to a kernel for decoding, which does not take every size.
_FEWEST = 128


def _flex() -> Attention:
    """Skips tiles of keys that no query of a tile sees: most of the other blocks."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def mask(visible: Visible, like: torch.Tensor, keys: int) -> Mask:
        batch, queries = like.shape
        made: Mask = compiled(create_block_mask)(
            visible if queries >= _FEWEST else _repeated(visible, queries - 1),
            batch,
            None,
            max(queries, _FEWEST),
            keys,
            device=str(like.device),
        )
        return made

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Mask
    ) -> torch.Tensor:
        queries = query.shape[2]
        if queries < _FEWEST:
            query = F.pad(query, (0, 0, 0, _FEWEST - queries))
        answer: torch.Tensor = compiled(flex_attention)(
            query, key, value, block_mask=mask, enable_gqa=query.shape[1] != key.shape[1]
        )
        return answer[:, :, :queries]

    return Attention(mask, attend)


def _repeated(visible: Visible, last: int) -> Visible:
    """Queries behind ``last`` see what it sees."""

    def padded(
        sequence: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return visible(sequence, head, query.clamp(max=last), key)

    return padded


def attention_for(device: torch.device, head_dim: int) -> Attention:
    """The one that skips, where it agrees with the whole mask, tried once; else the whole mask."""
    if device.type != "cuda":
        return DENSE
    try:
        flex = _flex()
        worst = disagreement(flex, device, torch.bfloat16, head_dim)
        if worst < 0.1:
            return flex
        reason = f"it is off by {worst:g}"
    except Exception as error:  # a compiler raises almost anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
    warnings.warn(
        f"flex attention of this torch cannot be used ({reason}); training is slower",
        stacklevel=2,
    )
    return DENSE


def disagreement(
    attention: Attention, device: torch.device, dtype: torch.dtype, head_dim: int
) -> float:
    """The largest difference to the whole mask, of an answer and, on a GPU, its gradients."""
    learns = device.type == "cuda"
    tokens, rows = 150, 4
    anchors = torch.tensor([[1, 20, 90, 149], [3, 4, 5, 140]], device=device)
    queries = anchors.shape[1] * rows
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(2, heads, length, head_dim, generator=generator)
        .to(device, dtype)
        .requires_grad_(learns)
        for heads, length in ((4, queries), (2, tokens + queries), (2, tokens + queries))
    ]
    worst = 0.0
    for window in (0, 30):
        visible = block_visible(anchors, tokens, rows, window)
        like = anchors.repeat_interleave(rows, dim=1)
        found = []
        for one in (attention, DENSE):
            mask = one.mask(visible, like, tokens + queries)
            answer = one.attend(leaves[0], leaves[1], leaves[2], mask)
            total = answer.float().square().sum()
            found.append([answer, *(torch.autograd.grad(total, leaves) if learns else ())])
        for mine, plain in zip(*found, strict=True):
            worst = max(worst, float((mine - plain).detach().abs().max()))
    return worst
