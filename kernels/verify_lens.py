"""Which drafts of a step are verified: a budget shared out by confidence; torch operations."""

import torch


def allocate_verify(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    caps: torch.Tensor,
    budget: torch.Tensor,
    *,
    limit: int,
    eps: float,
    confidence: torch.Tensor,
    verify_lens: torch.Tensor,
) -> None:
    """Give the drafts of R rows that are likeliest to be accepted a place in the step.

    In: logits float32[R, G] and temperatures float32[G] of the drafts' confidence; caps int32[R],
    most drafts of a row, 0 for rows that do not draft; budget int32[1], drafts of all rows
    together. Out: confidence float32[R, G] = sigmoid(logits / temperatures), the chance that draft
    k of a row is accepted if all before it were.

    Draft k's survival is the product of the row's chances up to k, rounded to float32 after each;
    candidates are drafts with k < min(limit, cap) and a survival of ``eps`` or more (a NaN is
    less), the surest first, of equals the shallower, then the lower row. The first
    ``budget`` are taken; of a negative budget all that the caps leave. As survival never rises
    along a row, those of a row are its first ones.

    Out, too: verify_lens int32[R] = 1 + the row's drafts that were taken. Nothing is raised.
    """
    rows, gamma = logits.shape
    torch.sigmoid(logits / temperatures, out=confidence)
    running = torch.ones_like(confidence[:, 0])
    survival = torch.empty_like(confidence)
    for k in range(gamma):  # torch's own product of a column rounds elsewhere
        running = running * confidence[:, k]
        survival[:, k] = running
    depth = torch.arange(gamma, device=confidence.device)
    candidate = (survival >= eps) & (depth < limit) & (depth < caps[:, None])
    keys = torch.where(candidate, survival, -1.0)
    # Depth by depth: a stable sort keeps equals in the order that they are to have.
    order = torch.sort(keys.t().flatten(), descending=True, stable=True).indices
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order), device=order.device)
    taken = candidate & (ranks.view(gamma, rows).t() < budget)
    taken |= (budget < 0) & (depth < caps[:, None])
    verify_lens.copy_(1 + taken.sum(dim=1))
