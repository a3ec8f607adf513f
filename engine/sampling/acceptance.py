"""How sampled nodes on a CPU come by their tokens, where that is not the coupled draw."""

from typing import NamedTuple, Protocol

import torch

from ...kernels.block_verify_cpu import block_verify
from ...kernels.rejection_sample_cpu import rejection_sample
from ...kernels.threshold_sample import Thresholds
from ...kernels.threshold_sample_cpu import threshold_sample
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


class TriedDrafts(NamedTuple):
    """Drafts of any kind, tried by what the target gives them: ``tokens`` and ``parents`` int64[N],
    see ``kernels/threshold_sample.py``."""

    tokens: torch.Tensor
    parents: torch.Tensor
    thresholds: Thresholds

    def choose(self, index: torch.Tensor, logits: torch.Tensor, columns: Columns) -> torch.Tensor:
        """See ``Acceptance``."""
        number = torch.full_like(self.parents, -1)
        number[index] = torch.arange(len(index))
        parents = self.parents[index]
        parents = torch.where(parents < 0, -1, number[parents])
        return threshold_sample(logits, *columns, self.tokens[index], parents, self.thresholds)
