"""How sampled nodes on a CPU come by their tokens, where that is not the coupled draw."""

from typing import NamedTuple, Protocol

import torch

from ...kernels.block_verify_cpu import block_verify
from ...kernels.rejection_sample_cpu import rejection_sample
from .node_drafts import NodeDrafts


class Columns(NamedTuple):
    """How M nodes sample, as the kernels take it: see ``kernels/coupled_sample.py``."""

    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor


class Acceptance(Protocol):
    """A rule with what it knows of a step's N nodes. A node whose draft it accepts gets the draft's
    token, so that the walk needs no rule."""

    def choose(self, index: torch.Tensor, logits: torch.Tensor, columns: Columns) -> torch.Tensor:
        """int64[M]: the tokens of nodes ``index`` int64[M], all nodes of their rows, from edited
        logits float32[M, V]."""
        ...


class DrawnDrafts(NamedTuple):
    """Rejection sampling of drafts that were drawn, one by one or, ``blocks``, all of a row."""

    drafts: NodeDrafts
    blocks: bool

    def choose(self, index: torch.Tensor, logits: torch.Tensor, columns: Columns) -> torch.Tensor:
        """See ``Acceptance``."""
        drafts = self.drafts
        rule = block_verify if self.blocks else rejection_sample
        return rule(
            logits, *columns, drafts.tokens[index], drafts.logits, drafts.rows[index],
            drafts.draft_ids,
        )  # fmt: skip
