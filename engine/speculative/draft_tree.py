"""Draft trees: K branches a level, of which the likeliest nodes are proposed."""

import torch

from ...engine_core.draft_config import SpecShape
from .device_drafter import DraftRows
from .draft_passes import DraftPasses


class DraftTree:
    """Grows trees of ``shape`` level by level; every node sees its true ancestors.

    A pass runs all nodes so far again, since a row's mask covers its own tokens alone; only the
    newest level's answers count. ``ahead``: tokens between a slot's length and the tree's KV.
    """

    def __init__(self, passes: DraftPasses, shape: SpecShape, ahead: int) -> None:
        self._passes = passes
        self._shape = shape
        self._ahead = ahead

    def propose(
        self,
        rows: DraftRows,
        tokens: torch.Tensor,
        probs: torch.Tensor,
        hidden: torch.Tensor | None,
    ) -> None:
        """Draft from level 1: ``tokens`` int64[R, K], ``probs`` float32[R, K] and the recurrent
        states [R, H] that predicted them.
        """
        ops, width, count = self._passes.ops, self._shape.topk, len(tokens)
        levels = self._passes.levels(rows, self._shape.steps)
        beam_levels = max(1, levels - 1)
        columns, device = width + (levels - 1) * width * width, tokens.device
        scores = torch.empty(count, columns, dtype=torch.float32, device=device)
        candidates, beams, ids, bits = (
            torch.empty(count, *shape, dtype=torch.int64, device=device)
            for shape in ((columns,), (beam_levels, width), *2 * ((beam_levels * width,),))
        )
        parents = torch.empty(count, width, dtype=torch.int64, device=device)
        reach = probs.clone()
        branch = torch.arange(width, device=device)
        scores[:, :width], candidates[:, :width], ids[:, :width] = probs, tokens, tokens
        beams[:, 0], bits[:, :width] = branch, 1 << branch
        states: torch.Tensor | None = None
        if hidden is not None:
            states = hidden.new_empty(count, beam_levels * width, hidden.shape[1])
            states[:, :width] = hidden[:, None]
        for level in range(1, levels):
            nodes = level * width
            out = self._passes.tree(
                rows,
                ids[:, :nodes],
                bits[:, :nodes],
                None if states is None else states[:, :nodes],
                width,
                self._ahead,
            )
            newest = out.head_input.view(count, nodes, -1)[:, -width:].flatten(0, 1).contiguous()
            successors, chances = self._passes.candidates(newest, width, True)
            assert chances is not None
            ops.expand_tree(
                level, chances.view(count, width, width), successors.view(count, width, width),
                reach=reach, scores=scores, candidates=candidates, beams=beams, ids=ids, bits=bits,
                parents=parents,
            )  # fmt: skip
            if states is not None and level < beam_levels:
                recurrent = out.recurrent.view(count, nodes, -1)[:, -width:]
                above = parents[:, :, None].expand(-1, -1, recurrent.shape[2])
                states[:, nodes : nodes + width] = recurrent.gather(1, above)
        ops.select_tree(
            scores, candidates, beams, rows.cu_q, rows.caps,
            tokens=rows.tokens, parents=rows.parents, proposed=rows.proposed, depths=rows.depths,
        )  # fmt: skip
