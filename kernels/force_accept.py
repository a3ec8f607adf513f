"""Drafts and targets whose walk accepts drawn lengths, for timing alone: the torch reference."""

import torch

UNIT = 1 << 24
NO_TOKEN = -1  # equals no token of the target
_WORD = (1 << 64) - 1


def force_accept(
    targets: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    tree_bits: torch.Tensor,
    host_parents: torch.Tensor,
    cu_q: torch.Tensor,
    node_cu: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    *,
    floor: int,
    threshold: int,
    tokens: torch.Tensor,
) -> None:
    """Force R rows to accept ``floor`` tokens, or one more in ``threshold`` of UNIT draws.

    In: targets int64[N] and input_ids, positions, tree_bits int64[T] as the step made them;
    host_parents int32[T], cu_q, node_cu int32[R + 1], slots, starts int32[R] as in `verify_walk`.
    A row's nodes are its last tokens, at most 64. The draw is SplitMix64's output for (slot,
    start); the bonus token counts and the row's deepest node, the first of equals, is the cap.

    Out: tokens int64[T], for `verify_walk` in the place of input_ids: along the path to the
    deepest node the accepted drafts, NO_TOKEN for all others of a row's nodes after its first,
    padding among them; the rest is not to be read. In place, targets become the accepted drafts,
    where they are not negative (unusable). Rows of fewer than two nodes stay as they are. Nothing
    is raised.
    """
    bounds, node_bounds = cu_q.tolist(), node_cu.tolist()
    for row, (slot, start) in enumerate(zip(slots.tolist(), starts.tolist(), strict=True)):
        low, high = node_bounds[row], node_bounds[row + 1]
        if high - low < 2:
            continue
        first = bounds[row + 1] - (high - low)
        length = floor + (_mix(slot, start) >> 40 < threshold)
        parents = host_parents[first : bounds[row + 1]].tolist()
        depths = [depth - start for depth in positions[first : bounds[row + 1]].tolist()]
        depths = [0, *(d if p >= 0 else 0 for d, p in zip(depths[1:], parents[1:], strict=True))]
        path = int(tree_bits[first + depths.index(max(depths))])
        for node in range(1, high - low):
            accepted = path >> node & 1 and depths[node] < length
            tokens[first + node] = input_ids[first + node] if accepted else NO_TOKEN
            before = low + parents[node]
            if accepted and targets[before] >= 0:
                targets[before] = input_ids[first + node]


def _mix(slot: int, position: int) -> int:
    word = (slot << 32 | position) * 0x9E3779B97F4A7C15 & _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31
