"""The tensors of one ragged forward pass."""

from dataclasses import dataclass
from typing import NamedTuple

import torch


class RowGroup(NamedTuple):
    """Rows ``begin``..``end`` of a batch, of at most ``max_q`` query tokens each.

    ``max_tokens``: at most so many of all of them, if that is far less than all could have.
    """

    begin: int
    end: int
    max_q: int
    max_tokens: int | None = None


class RowMask(NamedTuple):
    """What the tokens of a batch see in one layer, where that is not the batch's own rule.

    As ForwardBatch: ``positions`` int64[T], which windows alone compare here, ``tree_bits``
    int64[T], whose bits may name later tokens of the row, and ``is_tree`` uint8[R]. ``window``:
    positions a token sees, itself included; 0 for all.
    """

    positions: torch.Tensor
    tree_bits: torch.Tensor
    is_tree: torch.Tensor
    window: int


@dataclass(slots=True)
class ForwardBatch:
    """R rows with T query tokens in all, over paged KV; every tensor is on the model's device.

    Token i of a row sits at sequence index ``kv_len - q_len + i``. It attends to every KV entry
    before the row's own tokens, and among those to the earlier ones and itself (plain rows), or
    to row token j iff bit j of its mask is set (tree rows; bit i itself is set, parents precede
    children, at most 64 tokens). Sliding windows compare ``positions``, which in a tree is
    start + depth and not the sequence index.
    """

    input_ids: torch.Tensor  # int64[T]
    positions: torch.Tensor  # int64[T]
    kv_slots: torch.Tensor  # int64[T], page * page_size + offset, where this step's KV goes
    cu_q: torch.Tensor  # int32[R + 1], prefix sums of the rows' query lengths
    kv_lens: torch.Tensor  # int32[R], this step's tokens included
    page_table: torch.Tensor  # int32[R, P], pages in sequence order
    tree_bits: torch.Tensor  # int64[T], ancestors (self included); read for tree rows only
    is_tree: torch.Tensor  # uint8[R]
    logits_index: torch.Tensor  # int64[N], flat tokens whose logits are wanted
    # On a GPU: the state's whole page table with the rows' slots int32[R] into it, and the rows in
    # groups of similar length, so that launches are sized without a look at the device.
    slots: torch.Tensor | None = None
    groups: tuple[RowGroup, ...] = ()
    # int64[T], where rows begin within a sequence, so that ``positions`` are those within the row.
    rope_positions: torch.Tensor | None = None

    @property
    def rotated(self) -> torch.Tensor:
        """int64[T]: the positions by which queries and keys are rotated."""
        return self.positions if self.rope_positions is None else self.rope_positions

    def mask(self, window: int) -> RowMask:
        """The batch's own rule under a window."""
        return RowMask(self.positions, self.tree_bits, self.is_tree, window)
