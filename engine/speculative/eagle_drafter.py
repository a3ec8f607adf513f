"""EAGLE and EAGLE3: drafts from the target's hidden states (eagle_family.md 1.2 to 1.9)."""

import torch

from ...engine_core.plan import SlotInit
from ..models.draft_net import ChainDraftNet, ChainState
from .device_drafter import DrafterContext, DraftRows, LoadedDraft, Verdict
from .draft_law import DraftLaw
from .draft_ops import draft_ops
from .draft_passes import DraftPasses
from .draft_tree import DraftTree
from .native_chains import NativeChains
from .slot_texts import SlotTexts


class EagleDrafter:
    """A :class:`DeviceDrafter` whose net takes (feature of position p, token of p + 1) at p.

    ``align`` runs it over all that a step accepted, so that a slot's draft KV reaches as far as
    the target's; the newest entry's answer is what the slot's next drafts begin with. By slot:
    ``tokens`` int64[S, K] and ``probs`` float32[S, K] of level 1, ``hidden`` [S, H]. Where drafts
    are drawn, level 1 too needs its logits until acceptance, which are V wide: instead of its token
    ``heads`` [S, H] keeps what the head reads. ``trees``: draft chains through the code of trees
    too.
    """

    def __init__(self, context: DrafterContext, draft: LoadedDraft, trees: bool = False) -> None:
        net, shape, device = draft.net, draft.shape, context.device
        self.feature_layers: tuple[int, ...] | None = net.config.feature_layers
        self._steps = shape.steps
        self._passes = DraftPasses(draft, context.page_table, context.vocab_size, draft_ops(device))
        branches = trees or shape.topk > 1
        self._tree = DraftTree(self._passes, shape, 0) if branches else None
        self._texts = SlotTexts(context.slots, context.length, device)
        by_level = (context.slots, shape.topk)
        self.tokens = torch.zeros(by_level, dtype=torch.int64, device=device)
        self.probs = torch.zeros(by_level, dtype=torch.float32, device=device)
        self.hidden = torch.zeros(
            context.slots, net.config.model.hidden_size, dtype=net.dtype, device=device
        )
        drawn = context.config.draws_drafts
        self.heads = torch.zeros_like(self.hidden) if drawn else None
        self._native: NativeChains | None = None
        if isinstance(net, ChainDraftNet) and not branches and not drawn:
            state = ChainState(self.tokens, self.hidden)
            self._native = NativeChains(net, draft, context.page_table, self._texts.tokens, state)

    def enter(self, init: SlotInit) -> None:
        """Keep the request's tokens: chunks of its prompt end with the next one's first."""
        self._texts.enter(init)

    def propose(self, rows: DraftRows) -> DraftLaw | None:
        """Level 1 is known, or its head's input is; every further one takes a pass."""
        if self._native is not None:
            self._native.propose(rows, self._steps)
            return None
        count, state = len(rows.slots), (self.tokens, self.probs, self.hidden)
        hidden = self.hidden.new_empty(count, self.hidden.shape[1])
        if self._tree is not None:
            tokens, probs = (part.new_empty(count, part.shape[1]) for part in state[:2])
            self._passes.ops.take_state(
                rows.slots, state, tokens=tokens, probs=probs, hidden=hidden
            )
            self._tree.propose(rows, tokens, probs, hidden)
            return None
        levels = self._passes.levels(rows, self._steps)
        drafts = self.tokens.new_empty(levels, count)
        draw = self._passes.draw(rows, levels)
        if self.heads is None:
            self._passes.ops.take_state(
                rows.slots, state, tokens=drafts[0, :, None], probs=None, hidden=hidden
            )
        else:
            index = rows.slots.long()
            hidden = self.hidden[index]
            self._passes.choose(self.heads[index], 0, draw, drafts[0])
        self._passes.chain(rows, drafts[0], hidden, drafts[1:], draw, 1)
        self._passes.ops.write_chains(
            drafts, rows.cu_q, rows.caps,
            tokens=rows.tokens, parents=rows.parents, proposed=rows.proposed, depths=rows.depths,
        )  # fmt: skip
        return None if draw is None else draw.law()

    def align(self, verdict: Verdict) -> None:
        """Run what was accepted, and keep level 1 of what follows it."""
        if self._native is not None:
            self._native.align(verdict)
            return
        batch, next_ids, sources = self._passes.extend(verdict, self._texts.tokens)
        features = verdict.features
        if self._tree is not None or len(sources) < len(features):  # else they are in their places
            features = self._passes.ops.pick_rows(sources, features)
        hidden = self._passes.net.fuse(features)
        batch.input_ids = next_ids
        out = self._passes.forward(batch, hidden)
        newest = batch.logits_index
        head_input = self._passes.ops.pick_rows(newest, out.head_input)
        if self.heads is not None:
            index = verdict.slots.long()
            self.heads[index] = head_input
            self.hidden[index] = self._passes.ops.pick_rows(newest, out.recurrent)
            return
        tokens, probs = self._passes.candidates(
            head_input, self.tokens.shape[1], self._tree is not None
        )
        self._passes.ops.keep_state(
            verdict.slots, (self.tokens, self.probs, self.hidden), newest,
            tokens=tokens, probs=probs, hidden=out.recurrent,
        )  # fmt: skip

    def reset(self) -> None:
        """Nothing to do: a slot's state is written by the prefill of the request that enters."""


def make(context: DrafterContext) -> EagleDrafter:
    """The drafter that the specs of EAGLE and EAGLE3 name. Raises ValueError without a model."""
    if not isinstance(context.draft, LoadedDraft):
        raise ValueError("EAGLE and EAGLE3 draft with a model of their kind, and none was loaded")
    return EagleDrafter(context, context.draft)
