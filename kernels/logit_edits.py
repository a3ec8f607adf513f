"""Penalties, bias and minimum length on logits, and the counts behind them: the torch reference."""

import torch

# Not -inf: a masked row stays finite, and no finite logit is below it.
MASKED = torch.finfo(torch.float32).min


def edit_logits(
    logits: torch.Tensor,
    cu_q: torch.Tensor,
    node_cu: torch.Tensor,
    slots: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    tree_bits: torch.Tensor,
    out_counts: torch.Tensor,
    penalized: torch.Tensor,
    penalties: torch.Tensor,
    history: torch.Tensor,
    min_new_tokens: torch.Tensor,
    list_bounds: torch.Tensor,
    list_ids: torch.Tensor,
    list_values: torch.Tensor,
    *,
    width: int | None = None,
) -> torch.Tensor:
    """float32[N, V]: the step's logits as its rows' requests want them; rows without edits copied.

    ``logits`` [N, V] of any float dtype up to float32 stay untouched. cu_q, node_cu int32[R + 1]
    and slots int32[R]: a row's nodes are its last tokens, at most 64. input_ids, positions,
    tree_bits int64[T]: a node's history is its slot's and the drafts on its path, itself included
    (the row's first node is history already). ``width``: most nodes of a row, if known.

    By slot: out_counts int32[S], output tokens before the step. penalized bool[S]. penalties
    float32[S, 4]: 1 / repetition, repetition, frequency, presence. history int32[S, V], read where
    penalized: twice a token's count in the output, plus one if it is in the prompt.
    min_new_tokens int32[S]. list_bounds int32[S, 3]: (ends, biased, listed): of the slot's
    first ``listed`` entries of list_ids int32[S, L] (no id twice) and list_values float32[S, L],
    those below ``biased`` are biases and those from ``ends`` on end tokens.

    In this order: the logits of tokens in the history are divided by the repetition penalty if
    positive and multiplied by it otherwise; frequency times the output count and presence (if it
    is not 0) are subtracted; biases are added; at a node whose output would be shorter than
    min_new_tokens end tokens become MASKED. In a row with any edit what is not finite becomes NaN
    and stays it. Rows from node_cu[R] on are 0.
    """
    edited = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    bounds, node_bounds = cu_q.tolist(), node_cu.tolist()
    for row, slot in enumerate(slots.tolist()):
        low, high = node_bounds[row], node_bounds[row + 1]
        first = bounds[row + 1] - (high - low)
        ends, biased, listed = list_bounds[slot].tolist()
        for node in range(low, high):
            x = edited[node]
            x.copy_(logits[node])
            if not (penalized[slot] or listed):
                continue
            x[~torch.isfinite(x)] = torch.nan
            token = first + node - low
            if penalized[slot]:
                bits = int(tree_bits[token]) if node > low else 0
                path = [i for i in range(1, node - low + 1) if bits >> i & 1]
                _penalize(x, history[slot], input_ids[[first + i for i in path]], penalties[slot])
            ids, values = list_ids[slot, :listed].long(), list_values[slot, :listed]
            x[ids[:biased]] += values[:biased]
            depth = positions[token] - positions[first]
            if out_counts[slot] + depth < min_new_tokens[slot]:
                masked = ids[ends:]
                x[masked] = torch.where(torch.isfinite(x[masked]), MASKED, x[masked])
    return edited


def count_emitted(
    tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    slots: torch.Tensor,
    penalized: torch.Tensor,
    history: torch.Tensor,
) -> None:
    """Add the tokens that R rows emit to their slots' ``history``, in place; see `edit_logits`.

    ``tokens`` int32[R, W], of which the first accept_lens int32[R] of a row count. ``slots``
    int32[R]: no slot with tokens twice. Slots that are not ``penalized`` keep their history.
    """
    for row, (slot, length) in enumerate(zip(slots.tolist(), accept_lens.tolist(), strict=True)):
        if penalized[slot]:
            added = torch.bincount(tokens[row, :length], minlength=history.shape[1])
            history[slot] += 2 * added


def _penalize(
    x: torch.Tensor, history: torch.Tensor, path: torch.Tensor, penalties: torch.Tensor
) -> None:
    counts = (history >> 1) + torch.bincount(path, minlength=len(x))
    generated = counts > 0
    inverse, repetition, frequency, presence = penalties
    scale = torch.where(x > 0, inverse, repetition)
    x.mul_(torch.where(generated | (history & 1 > 0), scale, 1.0))
    x.sub_(counts * frequency)
    x.sub_(generated * presence)
