"""Drafts into the places that a step keeps for them; torch operations."""

import torch


def write_chains(
    drafts: torch.Tensor,
    cu_q: torch.Tensor,
    caps: torch.Tensor,
    *,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    proposed: torch.Tensor,
    depths: torch.Tensor,
) -> None:
    """Write the first caps[r] of N drafts of each of R rows as a chain.

    In: drafts int64[N, R], draft i of row r; cu_q int32[R + 1]; caps int32[R].

    Out, for rows with caps[r] > 0: tokens, parents int32[T] at places cu_q[r] + 1 + i, i <
    caps[r]: the drafts, each the child of the one before it, and padding from N on: token 0,
    parent -1. All other places stay as they are. proposed, depths int32[R] = min(caps, N).
    """
    most = len(drafts)
    row, node, drafted = _places(cu_q, caps, len(tokens))
    real = node < most
    token = drafts[node.clamp(0, most - 1), row].int()
    tokens.copy_(torch.where(drafted, torch.where(real, token, 0), tokens))
    parents.copy_(torch.where(drafted, torch.where(real, node, -1), parents))
    torch.clamp(caps, max=most, out=proposed)
    depths.copy_(proposed)


def select_tree(
    scores: torch.Tensor,
    candidates: torch.Tensor,
    beams: torch.Tensor,
    cu_q: torch.Tensor,
    caps: torch.Tensor,
    *,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    proposed: torch.Tensor,
    depths: torch.Tensor,
) -> None:
    """Write the best caps[r] of C candidates of each of R rows as a tree.

    In: scores float32[R, C], cumulative probabilities, not NaN; candidates int64[R, C], their
    tokens; the flat id of a candidate is its column: K of level 1, then K * K a level, K of each
    beam node in turn. beams int64[R, B, K]: flat ids of the beam nodes of levels 1 to B, whose
    children levels 2 to B + 1 are. cu_q int32[R + 1]; caps int32[R].

    Chosen are the min(caps[r], C) highest scores, the lower flat id among equals; since no child
    scores higher than its parent, parents are always among them. Nodes stand in the order of their
    flat ids.

    Out: as ``write_chains``; parents are the nodes' numbers within the row, 0 the bonus token, and
    depths the level of the deepest one.
    """
    width, columns = beams.shape[2], scores.shape[1]
    count = torch.clamp(caps, max=columns)
    ranked = torch.sort(scores, dim=1, descending=True, stable=True).indices
    rank = torch.arange(columns, device=scores.device)
    flat = torch.sort(torch.where(rank < count[:, None], ranked, columns), dim=1).values
    chosen = flat.clamp(max=columns - 1)
    token = candidates.gather(1, chosen).int()
    above = (chosen - width).clamp(min=0)  # beyond level 1
    level = torch.where(chosen < width, 0, 1 + above // (width * width))
    beam = (level - 1).clamp(min=0) * width + above % (width * width) // width
    parent = beams.flatten(1).gather(1, beam.clamp(max=beams.shape[1] * width - 1))
    number = 1 + torch.searchsorted(flat, parent)
    number = torch.where(level == 0, 0, number).int()
    row, node, drafted = _places(cu_q, caps, len(tokens))
    real = node < count[row]
    column = node.clamp(0, columns - 1)
    tokens.copy_(torch.where(drafted, torch.where(real, token[row, column], 0), tokens))
    parents.copy_(torch.where(drafted, torch.where(real, number[row, column], -1), parents))
    proposed.copy_(count)
    depths.copy_(torch.where(rank < count[:, None], level + 1, 0).amax(dim=1))


def _places(
    cu_q: torch.Tensor, caps: torch.Tensor, total: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each of T places its row and draft int64[T], and whether that is one of the row's caps."""
    place = torch.arange(total, device=cu_q.device)
    row = torch.searchsorted(cu_q[1:], place, right=True).clamp_(max=len(caps) - 1)
    node = place - cu_q[row] - 1
    return row, node, (node >= 0) & (node < caps[row])
