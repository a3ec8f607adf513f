"""The drafts that a step's nodes are held against, where they were drawn."""

from typing import NamedTuple

import torch

from ..speculative.draft_law import DraftLaw


class NodeDrafts(NamedTuple):
    """Of N nodes of chains, as ``kernels/rejection_sample.py`` takes them.

    ``tokens`` int64[N]: the draft behind each node, -1 for none, and ``rows`` int64[N], the row of
    ``logits`` [Q, Vd] that it was drawn from. ``draft_ids``: see ``DraftLaw``.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    logits: torch.Tensor
    draft_ids: torch.Tensor | None


def node_drafts(
    law: DraftLaw,
    token_of_node: torch.Tensor,
    row_of_node: torch.Tensor,
    cu_q: torch.Tensor,
    proposed: torch.Tensor,
    law_rows: torch.Tensor | None,
    input_ids: torch.Tensor,
) -> NodeDrafts:
    """Find the drafts of N nodes, whose tokens and rows are int64[N].

    A draft beyond the levels of ``law`` has none, so that its node's token is drawn without it.
    ``cu_q`` int32[R + 1] and ``input_ids`` int64[T] are the step's; ``proposed`` int32[R], drafts
    of each row; ``law_rows`` int64[R], the rows' number in ``law``, None where it has all of them.
    """
    levels, count, _ = law.logits.shape
    place = token_of_node - cu_q[row_of_node]
    behind = (token_of_node + 1).clamp(max=len(input_ids) - 1)
    tokens = torch.where(place < proposed[row_of_node].clamp(max=levels), input_ids[behind], -1)
    row = row_of_node if law_rows is None else law_rows[row_of_node]
    rows = place.clamp(max=levels - 1) * count + row.clamp(min=0)
    return NodeDrafts(tokens, rows, law.logits.flatten(0, 1), law.draft_ids)
