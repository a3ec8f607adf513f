"""Target-only acceptance with thresholds, over draft trees: the torch reference."""

from typing import NamedTuple

import torch

from .noise_streams import ACCEPT, RESIDUAL
from .philox import philox_words
from .rejection_sample import target_law

LEAST = 1e-9  # of the threshold for accumulated probability, by which coins are scaled


class Thresholds(NamedTuple):
    """``single``: drafts of this probability are accepted; ``acc``: others as if they had 1 / acc
    times theirs. Both are in [0, 1]; at 1 tokens follow the target's law."""

    single: float
    acc: float


def threshold_sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor,
    thresholds: Thresholds,
) -> torch.Tensor:
    """int64[M]: the token of each node, which is a child's where that is accepted.

    The first seven arguments are those of ``coupled_sample``; p is the law that it draws from.
    ``drafts`` int64[M]: the token that each node holds; ``parents`` int64[M]: the node before it
    whose child it is, -1 for none.

    They are tried in the order of their numbers: one of p(d) > 0 is accepted if u * acc < the
    sum of p over it and those before, u uniform, or if p(d) >= single; a token that an earlier
    child held counts for nothing. Where none is, the token is drawn from p without the children's;
    where they leave nothing, from p. A node without children draws with ``coupled_sample``'s noise,
    and so its token. The noise of u and of the draw are streams of their own. Rows of logits with a
    NaN or +inf, or nothing but -inf, get -1.
    """
    p = target_law(logits, temperatures, top_ks, top_ps, min_ps, torch.float64)
    child = (parents >= 0).nonzero()[:, 0]
    parent = parents[child]
    first = accepted_child(p, child, parent, drafts[child], coins(seeds, positions), thresholds)
    left = untried(p, parent, drafts[child])
    tries = torch.zeros(len(p), dtype=torch.bool, device=p.device).index_fill_(0, parent, True)
    own = torch.where(tries, seeds ^ RESIDUAL, seeds)
    uniform = (philox_words(own, positions, logits.shape[1]).double() + 0.5) * 2.0**-32
    drawn = (torch.log(left) - torch.log(-torch.log(uniform))).argmax(dim=1)
    tokens = torch.where(first >= 0, drafts[first.clamp(min=0)], drawn)
    return torch.where((left > 0).any(dim=1), tokens, -1)


def coins(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """float64[M]: each node's coin."""
    return (philox_words(seeds ^ ACCEPT, positions, 1)[:, 0].double() + 0.5) * 2.0**-32


def accepted_child(
    p: torch.Tensor,
    child: torch.Tensor,
    parent: torch.Tensor,
    tokens: torch.Tensor,
    uniforms: torch.Tensor,
    thresholds: Thresholds,
) -> torch.Tensor:
    """int64[M]: the child that each of M nodes accepts, -1 for none.

    ``p`` [M, V]: their laws; ``child``, which rises, ``parent``, the row of p, and ``tokens``
    int64[C].
    """
    held = parent * p.shape[1] + tokens
    alike = held.argsort(stable=True)
    chances = p.flatten()[held].double()
    chances[alike[1:][held[alike][1:] == held[alike][:-1]]] = 0.0
    order = parent.argsort(stable=True)
    chances, child, parent = chances[order], child[order], parent[order]
    total = chances.cumsum(0)
    begins = torch.ones_like(parent, dtype=torch.bool)
    begins[1:] = parent[1:] != parent[:-1]
    before = (total - chances)[begins][begins.cumsum(0) - 1]
    reached = uniforms[parent] * max(thresholds.acc, LEAST) < total - before
    passes = (chances > 0) & (reached | (chances >= thresholds.single))
    none = torch.iinfo(torch.int64).max
    first = torch.full_like(uniforms, none, dtype=torch.int64)
    first.scatter_reduce_(0, parent[passes], child[passes], "amin")
    return torch.where(first < none, first, -1)


def untried(p: torch.Tensor, parent: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """[M, V]: p without the tokens ``drafts`` [C] of children of ``parent`` [C]; p itself where
    nothing is left."""
    left = p.clone()
    left[parent, drafts] = 0
    return torch.where((left > 0).any(dim=1, keepdim=True), left, p)
