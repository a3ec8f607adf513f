"""Rejection sampling along chains: the target's token at each node, the torch reference."""

import torch

from .coupled_sample import kept_tokens
from .noise_streams import ACCEPT, RESIDUAL
from .philox import philox_words

LEAST_HEAT = 1e-5  # drafts are drawn at this temperature or above


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
    p = target_law(logits, temperatures, top_ks, top_ps, min_ps, torch.float64)
    accepted, left, held = torch.zeros_like(drafts, dtype=torch.bool), p.clone(), drafts >= 0
    if held.any():
        q = draft_law(draft_logits[draft_rows[held]], temperatures[held], torch.float64)
        accepted[held] = accept(p[held], q, drafts[held], draft_ids, seeds[held], positions[held])
        left[held] = left_over(p[held], q, draft_ids)
    own = torch.where(drafts >= 0, seeds ^ RESIDUAL, seeds)
    uniform = (philox_words(own, positions, logits.shape[1]).double() + 0.5) * 2.0**-32
    drawn = (torch.log(left) - torch.log(-torch.log(uniform))).argmax(dim=1)
    usable = (left > 0).any(dim=1)
    return torch.where(usable, torch.where(accepted, drafts, drawn), -1)


def accept(
    p: torch.Tensor,
    q: torch.Tensor,
    drafts: torch.Tensor,
    draft_ids: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """bool[M]: whether each draft is its node's token; p [M, V] and q [M, Vd] are the laws."""
    columns = drafts if draft_ids is None else draft_ids[drafts].long()
    p_d = p.gather(1, drafts[:, None])[:, 0].double()
    q_d = q.gather(1, columns.clamp(min=0)[:, None])[:, 0].double()
    u = (philox_words(seeds ^ ACCEPT, positions, 1)[:, 0].double() + 0.5) * 2.0**-32
    return (columns >= 0) & (q_d > 0) & (u * q_d < p_d)


def left_over(p: torch.Tensor, q: torch.Tensor, draft_ids: torch.Tensor | None) -> torch.Tensor:
    """[M, V]: max(p - q, 0), not normalised; p where nothing is left."""
    left = beyond(p, q, draft_ids)
    return torch.where((left > 0).any(dim=1, keepdim=True), left, p)


def beyond(p: torch.Tensor, q: torch.Tensor, draft_ids: torch.Tensor | None) -> torch.Tensor:
    """[M, V]: max(p - q, 0), not normalised."""
    if draft_ids is not None:
        q = torch.where(draft_ids >= 0, q[:, draft_ids.clamp(min=0).long()], 0)
    return (p - q).clamp_(min=0)


def target_law(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[M, V] of ``dtype``: the probabilities after the filters; 0 in unusable rows."""
    law = _softmax(logits, temperatures, dtype)
    filtered = (top_ks > 0) | (top_ps < 1) | (min_ps > 0)
    if filtered.any():
        scaled = logits[filtered].double() / temperatures[filtered].double()[:, None]
        kept = kept_tokens(scaled, top_ks[filtered], top_ps[filtered], min_ps[filtered])
        part = torch.where(kept, law[filtered], 0)
        law[filtered] = part / part.sum(dim=1, keepdim=True).clamp_(min=1e-30)
    return law


def draft_law(logits: torch.Tensor, temperatures: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[M, Vd] of ``dtype``: what drafts of logits [M, Vd] are drawn from; 0 in unusable rows."""
    return _softmax(logits, temperatures.clamp(min=LEAST_HEAT), dtype)


def _softmax(logits: torch.Tensor, temperatures: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    law = torch.softmax(logits.to(dtype) / temperatures.to(dtype)[:, None], dim=1)
    spoilt = law[:, 0].isnan()  # one NaN or +inf spoils all of a row
    if spoilt.any():
        law[spoilt] = 0
    return law
