"""Rejection sampling along chains: the target's token at each node, the torch reference."""

from typing import NamedTuple

import torch

from .coupled_sample import kept_tokens
from .noise_streams import ACCEPT, RESIDUAL
from .philox import philox_words

LEAST_HEAT = 1e-5  # drafts are drawn at this temperature or above


class Verdicts(NamedTuple):
    """Of M nodes: ``accepted`` bool[M], whether the draft is the node's token; ``left`` float64[M,
    V], what the node's token is drawn from otherwise (weights, not normalised).
    """

    accepted: torch.Tensor
    left: torch.Tensor


def rejection_sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    drafts: torch.Tensor,
    draft_logits: torch.Tensor,
    draft_rows: torch.Tensor,
    draft_ids: torch.Tensor | None,
) -> torch.Tensor:
    """int64[M]: the token of each node, which is its draft's where that is accepted.

    The first seven arguments are those of ``coupled_sample``; p is the law that it draws from.
    ``drafts`` int64[M]: the token drafted behind the node, -1 for none. It was drawn from q, the
    softmax at the node's temperature (1e-5 at least) of row ``draft_rows[m]`` of ``draft_logits``
    [Q, Vd], of any float dtype. ``draft_ids`` int32[V]: the column of each token, -1 for none;
    None where the two are the same.

    Draft d is accepted iff u * q(d) < p(d), u uniform; otherwise the token is drawn from max(p - q,
    0), in which d has no part. Where rounding leaves nothing of that, it is drawn from p: a fixed
    token, as SGLang has it, may be one that the filters exclude. A row of ``draft_logits`` with a
    NaN or +inf is no law, its drafts are rejected and the token drawn from p. A node without a
    draft draws from p with ``coupled_sample``'s noise, and so its token. The noise of u and of the
    draw are streams of their own. Rows of logits with a NaN or +inf, or nothing but -inf, get -1.
    """
    accepted, left = judge(
        logits, temperatures, top_ks, top_ps, min_ps, seeds, positions, drafts, draft_logits,
        draft_rows, draft_ids,
    )  # fmt: skip
    own = torch.where(drafts >= 0, seeds ^ RESIDUAL, seeds)
    uniform = (philox_words(own, positions, logits.shape[1]).double() + 0.5) * 2.0**-32
    drawn = (torch.log(left) - torch.log(-torch.log(uniform))).argmax(dim=1)
    usable = (left > 0).any(dim=1)
    return torch.where(usable, torch.where(accepted, drafts, drawn), -1)


def judge(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    drafts: torch.Tensor,
    draft_logits: torch.Tensor,
    draft_rows: torch.Tensor,
    draft_ids: torch.Tensor | None,
) -> Verdicts:
    """Hold M drafts against their nodes' laws; arguments as above. Unusable rows have no weight."""
    p = _target_law(logits, temperatures, top_ks, top_ps, min_ps)
    drafted = drafts >= 0
    q = torch.zeros_like(p)
    if drafted.any():
        q[drafted] = _draft_law(
            draft_logits[draft_rows[drafted]], temperatures[drafted], draft_ids, p.shape[1]
        )
    at = drafts.clamp(min=0)[:, None]
    p_d, q_d = p.gather(1, at)[:, 0], q.gather(1, at)[:, 0]
    words = philox_words(seeds ^ ACCEPT, positions, 1)[:, 0]
    u = (words.double() + 0.5) * 2.0**-32
    accepted = drafted & (q_d > 0) & (u * q_d < p_d)
    left = (p - q).clamp_(min=0)
    return Verdicts(accepted, torch.where((left > 0).any(dim=1, keepdim=True), left, p))


def _target_law(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
) -> torch.Tensor:
    """float64[M, V]: the probabilities after the filters; 0 in unusable rows."""
    scaled = logits.double() / temperatures.double()[:, None]
    top = scaled.amax(dim=1, keepdim=True)
    weights = torch.exp(scaled - top)
    filtered = (top_ks > 0) | (top_ps < 1) | (min_ps > 0)
    if filtered.any():
        kept = kept_tokens(scaled[filtered], top_ks[filtered], top_ps[filtered], min_ps[filtered])
        weights[filtered] = torch.where(kept, weights[filtered], 0)
    law = weights / weights.sum(dim=1, keepdim=True)
    return torch.where(torch.isfinite(top) & ~logits.isnan().any(dim=1, keepdim=True), law, 0)


def _draft_law(
    logits: torch.Tensor, temperatures: torch.Tensor, draft_ids: torch.Tensor | None, vocab: int
) -> torch.Tensor:
    """float64[M, V]: what drafts are drawn from, over the target's tokens; 0 in unusable rows."""
    heat = temperatures.double().clamp(min=LEAST_HEAT)[:, None]
    law = torch.softmax(logits.double() / heat, dim=1)
    law = torch.where(law.isnan().any(dim=1, keepdim=True), 0, law)
    if draft_ids is None:
        return law
    return torch.where(draft_ids >= 0, law[:, draft_ids.clamp(min=0).long()], 0)
