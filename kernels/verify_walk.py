"""The acceptance walk over draft trees and the slots' next state, the torch reference."""

import torch


def verify_walk(
    targets: torch.Tensor,
    input_ids: torch.Tensor,
    host_parents: torch.Tensor,
    cu_q: torch.Tensor,
    node_cu: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    last_tokens: torch.Tensor,
    out_counts: torch.Tensor,
    *,
    accept_lens: torch.Tensor,
    tokens: torch.Tensor,
    accept_idx: torch.Tensor,
    most: torch.Tensor | None = None,
    trimmed: torch.Tensor | None = None,
) -> None:
    """Accept R rows and move their slots' state over what they emit.

    In: targets int64[N], the target's token at each node, negative where its numbers are
    unusable; input_ids int64[T]; host_parents int32[T], read for a row's nodes after its first:
    the parent's index within the row, below the node's own, or -1 for padding, which nothing
    accepts; cu_q, node_cu int32[R + 1] offsets of the rows' tokens and nodes. A row's nodes are
    its last tokens: none (a prefill chunk), one (the last chunk) or all (verify), at most W. slots
    int32[R], no slot twice; starts int32[R], the rows' starts as `lay_out` resolved them.

    From the first node on, the lowest child whose token equals the target's token at the node is
    accepted; the row emits the targets along this path. A row whose path meets a negative target
    emits nothing and leaves its slot as it is. ``most`` int32[R], 1 or more: tokens that a row
    emits, None for no limit; the last one is the target's, whatever was drafted there, and
    unusable targets beyond it do no harm.

    Out: accept_lens int32[R], emitted tokens; tokens int32[R, W], them; accept_idx int32[R, W],
    the path's nodes; both -1 beyond accept_lens. In place, int32[S]: seq_lens, the tokens whose KV
    is in place, becomes the row's start, chunk and accepted nodes; last_tokens the last token
    emitted; out_counts grows by accept_lens. Rows without tokens are padding, their slot is not
    used. With ``most`` trimmed int32[R]: the path's tokens beyond it. Nothing is raised.
    """
    accept_lens.zero_()
    tokens.fill_(-1)
    accept_idx.fill_(-1)
    bounds, node_bounds = cu_q.tolist(), node_cu.tolist()
    for row, slot in enumerate(slots.tolist()):
        length, low, high = bounds[row + 1] - bounds[row], node_bounds[row], node_bounds[row + 1]
        first, width = bounds[row + 1] - (high - low), high - low
        wanted = targets[low:high].tolist()
        path = _walk(
            input_ids[first : first + width].tolist(),
            host_parents[first : first + width].tolist(),
            wanted,
            width if most is None else int(most[row]),
        )
        if most is not None and trimmed is not None:
            limit = int(most[row])
            trimmed[row] = max(0, len(path) - limit)
            path = path[:limit]
        if length == 0 or (width > 0 and not path):
            continue
        seq_lens[slot] = starts[row] + length - width + len(path)
        if path:
            accept_lens[row] = len(path)
            accept_idx[row, : len(path)] = torch.tensor(path, dtype=torch.int32)
            tokens[row, : len(path)] = torch.tensor([wanted[node] for node in path])
            last_tokens[slot] = wanted[path[-1]]
            out_counts[slot] += len(path)


def _walk(tokens: list[int], parents: list[int], targets: list[int], most: int) -> list[int]:
    """The accepted nodes; none if a target among the first ``most`` is unusable, up to a later
    one."""
    path: list[int] = []
    node: int | None = 0 if tokens else None
    while node is not None:
        if targets[node] < 0:
            return path if len(path) >= most else []
        path.append(node)
        children = range(node + 1, len(tokens))
        node = next(
            (c for c in children if parents[c] == node and tokens[c] == targets[node]), None
        )
    return path
