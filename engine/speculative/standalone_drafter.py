"""STANDALONE: drafts from a small language model of its own (eagle_family.md 1.15)."""

import torch

from ...engine_core.plan import SlotInit
from .device_drafter import DrafterContext, DraftRows, LoadedDraft, Verdict
from .draft_law import DraftLaw
from .draft_ops import draft_ops
from .draft_passes import DraftPasses
from .draft_tree import DraftTree


class StandaloneDrafter:
    """A :class:`DeviceDrafter` whose net takes token p at position p, as any language model does.

    ``align`` runs it over all that a step accepted, so that a slot's draft KV reaches as far as
    the target's. ``bonus`` int64[S]: the newest token of each slot, with which drafting begins.
    ``trees``: draft chains through the code of trees too.
    """

    def __init__(self, context: DrafterContext, draft: LoadedDraft, trees: bool = False) -> None:
        shape, device = draft.shape, context.device
        self._steps, self._width = shape.steps, shape.topk
        self._passes = DraftPasses(draft, context.page_table, context.vocab_size, draft_ops(device))
        branches = trees or shape.topk > 1
        self._tree = DraftTree(self._passes, shape, 1) if branches else None
        self.bonus = torch.zeros(context.slots, dtype=torch.int64, device=device)

    @property
    def feature_layers(self) -> None:
        """It looks at tokens alone."""

    def enter(self, init: SlotInit) -> None:
        """Nothing to keep: the prefill gives all that is needed."""

    def propose(self, rows: DraftRows) -> DraftLaw | None:
        """Every level takes a pass, the first one over the bonus token."""
        bonus = self.bonus[rows.slots.long()]
        count = self._passes.levels(rows, self._steps)
        if self._tree is not None:
            out = self._passes.step(rows, bonus)
            tokens, probs = self._passes.candidates(out.head_input, self._width, True)
            assert probs is not None
            self._tree.propose(rows, tokens, probs, None)
            return None
        drafts = torch.empty(count, len(bonus), dtype=torch.int64, device=bonus.device)
        draw = self._passes.draw(rows, count)
        self._passes.chain(rows, bonus, None, drafts, draw)
        self._passes.ops.write_chains(
            drafts, rows.cu_q, rows.caps,
            tokens=rows.tokens, parents=rows.parents, proposed=rows.proposed, depths=rows.depths,
        )  # fmt: skip
        return None if draw is None else draw.law()

    def align(self, verdict: Verdict) -> None:
        """Run what was accepted, for its KV alone."""
        batch, next_ids, sources = self._passes.extend(verdict, None)
        given = verdict.batch.input_ids
        if self._tree is not None or len(sources) < len(given):  # else they are in their places
            given = given.index_select(0, sources)
        batch.input_ids = given
        self._passes.forward(batch, None)
        self.bonus[verdict.slots.long()] = next_ids.index_select(0, batch.logits_index)

    def reset(self) -> None:
        """Nothing to do: a slot's state is written by the prefill of the request that enters."""


def make(context: DrafterContext) -> StandaloneDrafter:
    """The drafter that STANDALONE's spec names. Raises ValueError without a model."""
    if not isinstance(context.draft, LoadedDraft):
        raise ValueError("STANDALONE drafts with a model of its kind, and none was loaded")
    return StandaloneDrafter(context, context.draft)
