"""The tree nodes whose logits need processors, with what each needs to know of its place."""

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Nodes:
    """M nodes, int64[M] each.

    ``index``: row of the step's logits. ``slots``: request slot. ``depths``: drafts between the
    row's first node and this one, itself included. ``positions``: sequence position of the token
    that the node decides. ``path_node``/``path_token`` int64[P]: pairs of a node and a draft token
    on its path (itself included, the row's first node left out: it is history already).
    """

    index: torch.Tensor
    slots: torch.Tensor
    depths: torch.Tensor
    positions: torch.Tensor
    path_node: torch.Tensor
    path_token: torch.Tensor

    def select(self, chosen: torch.Tensor) -> "Nodes":
        """The nodes at ``chosen``, bool[M]."""
        renumber = torch.cumsum(chosen, dim=0) - 1
        on_path = chosen[self.path_node]
        return Nodes(
            self.index[chosen],
            self.slots[chosen],
            self.depths[chosen],
            self.positions[chosen],
            renumber[self.path_node[on_path]],
            self.path_token[on_path],
        )


def place_nodes(
    index: torch.Tensor,
    slots: torch.Tensor,
    first: torch.Tensor,
    logits_index: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    tree_bits: torch.Tensor,
) -> Nodes:
    """Nodes for the logits rows ``index`` of slots ``slots``, both int64[M].

    ``first`` int64[M]: flat token of the first node of each node's row. The rest are the step's
    tensors: ``logits_index`` int64[N], ``input_ids``, ``positions``, ``tree_bits`` int64[T].
    """
    token = logits_index[index]
    # A prompt chunk's mask covers the chunk; only a verify row's describes drafts.
    bits = torch.where(token == first, 0, tree_bits[token] & ~1)
    member = (bits[:, None] >> torch.arange(64, device=bits.device)) & 1
    path_node, place = torch.nonzero(member, as_tuple=True)
    return Nodes(
        index=index,
        slots=slots,
        depths=positions[token] - positions[first],
        positions=positions[token] + 1,
        path_node=path_node,
        path_token=input_ids[first[path_node] + place],
    )
