"""Which nodes of a step are children of which, for rules that try a node's children."""

import torch


def tree_parents(
    token_of_node: torch.Tensor,
    row_of_node: torch.Tensor,
    cu_q: torch.Tensor,
    node_cu: torch.Tensor,
    parents: torch.Tensor | None,
    positions: torch.Tensor,
    most: torch.Tensor | None,
) -> torch.Tensor:
    """int64[N]: the node of which each is a child, -1 for none.

    Nodes' tokens and rows are int64[N]; those behind the last row's are padding. ``cu_q`` and
    ``node_cu`` int32[R + 1] are the step's; ``parents`` int32[T], the parent's index in the row,
    None where every row is a chain; ``positions`` int64[T]. ``most`` int32[R]: tokens that a row
    emits at most, None for no limit; a node at that cap has no children, as if they were not there.
    """
    node = torch.arange(len(token_of_node), device=token_of_node.device)
    first, end = node_cu[row_of_node].long(), node_cu[row_of_node + 1].long()
    place = node - first
    before = place - 1 if parents is None else parents[token_of_node].long()
    held = (node < end) & (before >= 0) & (before < place)
    if most is not None:
        root = cu_q[row_of_node + 1].long() - (end - first)
        root = root.clamp(min=0, max=len(positions) - 1)
        held &= positions[token_of_node] - positions[root] < most[row_of_node]
    return torch.where(held, first + before, -1)
