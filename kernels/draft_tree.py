"""A draft tree's next level; torch operations."""

import torch


def expand_tree(
    level: int,
    chances: torch.Tensor,
    successors: torch.Tensor,
    *,
    reach: torch.Tensor,
    scores: torch.Tensor,
    candidates: torch.Tensor,
    beams: torch.Tensor,
    ids: torch.Tensor,
    bits: torch.Tensor,
    parents: torch.Tensor,
) -> None:
    """Grow R trees by a level: the K candidates of each of K beam nodes, and the K best of all.

    In: ``level`` of the beam, from 1 on; chances float32[R, K, K] and successors int64[R, K, K]:
    the beam nodes' candidates as ``top_candidates`` gives them.

    In place: reach float32[R, K], the beam nodes' cumulative probabilities, in and out. Out at
    places of their own, others stay: scores float32[R, C] and candidates int64[R, C], the K * K
    new ones from K + (level - 1) * K * K on, in the order of ``successors``. And, unless
    ``beams`` int64[R, B, K] ends with this level: beams[:, level], flat ids (columns of
    ``scores``) of the new beam, whose nodes are the K highest scores, the lower flat id among
    equals, best first; ids int64[R, B * K], tokens, and bits int64[R, B * K], ancestor sets, at
    level * K + k; parents int64[R, K], the beam node above each of them.
    """
    width = reach.shape[1]
    begin = width + (level - 1) * width * width
    cumulative = (reach[:, :, None] * chances).flatten(1)
    scores[:, begin : begin + width * width] = cumulative
    candidates[:, begin : begin + width * width] = successors.flatten(1)
    if level >= beams.shape[1]:
        return
    ranked = torch.sort(cumulative, dim=1, descending=True, stable=True)
    best = ranked.indices[:, :width]
    reach.copy_(ranked.values[:, :width])
    parents.copy_(best // width)
    beams[:, level] = begin + best
    here = slice(level * width, (level + 1) * width)
    ids[:, here] = successors.flatten(1).gather(1, best)
    own = torch.ones((), dtype=torch.int64, device=bits.device) << torch.arange(
        level * width, (level + 1) * width, device=bits.device
    )
    above = bits[:, (level - 1) * width : level * width]
    bits[:, here] = above.gather(1, parents) | own
