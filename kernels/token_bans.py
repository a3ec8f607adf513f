"""Tokens ruled out everywhere or after others, and the tails behind that: the torch reference."""

import torch

from .logit_edits import MASKED


def mask_banned(
    edited: torch.Tensor,
    cu_q: torch.Tensor,
    node_cu: torch.Tensor,
    slots: torch.Tensor,
    input_ids: torch.Tensor,
    tree_bits: torch.Tensor,
    disallowed: torch.Tensor,
    ban_counts: torch.Tensor,
    ban_bounds: torch.Tensor,
    ban_tokens: torch.Tensor,
    tails: torch.Tensor,
    *,
    width: int | None = None,
) -> None:
    """Mask in ``edited`` float32[N, V], in place, what the rows' requests rule out.

    The rows are those of `edit_logits`, and ``width`` too. By slot: disallowed int32[S, W], bit
    token % 32 of word token / 32 set for tokens ruled out at every position; W is 0 where no slot
    has any. ban_counts int32[S] sequences, of which number b is ban_tokens[slot, ban_bounds[slot,
    b] : ban_bounds[slot, b + 1]], int32 [S, T] and [S, B + 1], at most D + 1 tokens. tails
    int32[S, D]: the newest output tokens, the latest last, -1 for what is missing.

    A sequence's last token is ruled out where the output and then the drafts on the node's path
    end in the tokens before it. What is not finite stays so.
    """
    bounds, node_bounds = cu_q.tolist(), node_cu.tolist()
    for row, slot in enumerate(slots.tolist()):
        low, high = node_bounds[row], node_bounds[row + 1]
        first = bounds[row + 1] - (high - low)
        starts = ban_bounds[slot].tolist()
        bans = [
            ban_tokens[slot, starts[b] : starts[b + 1]].tolist()
            for b in range(int(ban_counts[slot]))
        ]
        tail = [token for token in tails[slot].tolist() if token >= 0]
        for node in range(low, high):
            bits = int(tree_bits[first + node - low]) if node > low else 0
            path = [i for i in range(1, node - low + 1) if bits >> i & 1]
            recent = [*tail, *input_ids[[first + i for i in path]].tolist()]
            found = [ban[-1] for ban in bans if recent[len(recent) - len(ban) + 1 :] == ban[:-1]]
            found += _set_bits(disallowed[slot])
            x = edited[node, found]
            edited[node, found] = torch.where(torch.isfinite(x), MASKED, x)


def push_emitted(
    tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    slots: torch.Tensor,
    ban_counts: torch.Tensor,
    tails: torch.Tensor,
) -> None:
    """Append what R rows emit to their slots' ``tails``, in place; see `mask_banned`.

    ``tokens`` int32[R, W], of which the first accept_lens int32[R] of a row count. ``slots``
    int32[R]: no slot with tokens twice. Slots without sequences keep their tail.
    """
    depth = tails.shape[1]
    for row, (slot, length) in enumerate(zip(slots.tolist(), accept_lens.tolist(), strict=True)):
        if ban_counts[slot]:
            tails[slot] = torch.cat((tails[slot], tokens[row, :length]))[-depth:]


def _set_bits(words: torch.Tensor) -> list[int]:
    shifts = torch.arange(32, device=words.device)
    found: list[int] = torch.nonzero((words[:, None] >> shifts & 1).flatten())[:, 0].tolist()
    return found
