"""Drafters on the device as another package would write them, without weights of their own."""

import torch

from outrider.engine.speculative.device_drafter import DrafterContext, DraftRows, Verdict
from outrider.engine.speculative.draft_law import DraftDraw, DraftLaw
from outrider.engine.speculative.draft_ops import draft_ops
from outrider.engine_core.drafter_spec import DrafterSpec
from outrider.engine_core.ids import RowKind
from outrider.engine_core.plan import SlotInit

FOLLOW = DrafterSpec(
    name="FOLLOW", implementation="device_drafters:follow", default_num_draft_tokens=5
)
LENS = DrafterSpec(
    name="LENS", implementation="device_drafters:lens", tree=True, default_num_draft_tokens=3
)
GUESS = DrafterSpec(
    name="GUESS",
    implementation="device_drafters:guess",
    default_num_draft_tokens=5,
    gives_survival=True,
)

DICE = DrafterSpec(
    name="DICE",
    implementation="device_drafters:dice",
    gives_q=True,
    default_num_draft_tokens=4,
)


class FollowDrafter:
    """From tokens: a chain of what last followed each token, in anybody's text.

    ``follows`` int64[V] is the token behind each token; ``newest`` int64[S] a slot's last one.
    """

    def __init__(self, context: DrafterContext) -> None:
        self._ops = draft_ops(context.device)
        self._nodes = context.config.num_draft_tokens(FOLLOW) - 1
        self.follows = torch.zeros(context.vocab_size, dtype=torch.int64, device=context.device)
        self.newest = torch.zeros(context.slots, dtype=torch.int64, device=context.device)

    @property
    def feature_layers(self) -> None:
        """It takes nothing of the target."""

    def enter(self, init: SlotInit) -> None:
        """A slot's text begins with the token of its prompt's last chunk."""

    def propose(self, rows: DraftRows) -> DraftLaw | None:
        token = self.newest[rows.slots]
        drafts = []
        for _ in range(self._nodes):
            token = self.follows[token]
            drafts.append(token)
        self._ops.write_chains(
            torch.stack(drafts),
            rows.cu_q,
            rows.caps,
            tokens=rows.tokens,
            parents=rows.parents,
            proposed=rows.proposed,
            depths=rows.depths,
        )
        return None

    def align(self, verdict: Verdict) -> None:
        before = self.newest[verdict.slots]
        for column in verdict.tokens.long().unbind(1):
            real = column >= 0
            kept = self.follows[before]
            self.follows[before] = torch.where(real, column, kept)
            before = torch.where(real, column, before)
        self.newest[verdict.slots] = before

    def reset(self) -> None:
        self.follows.zero_()
        self.newest.zero_()


class GuessDrafter(FollowDrafter):
    """The same chains, and for each draft a confidence that its token and place decide."""

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        self._confidence = torch.zeros(0, self._nodes, device=context.device)

    @property
    def confidence(self) -> torch.Tensor:
        return self._confidence

    def propose(self, rows: DraftRows) -> None:
        super().propose(rows)
        last = max(len(rows.tokens) - 1, 0)
        guesses = []
        for k in range(self._nodes):
            place = (rows.cu_q[:-1].long() + 1 + k).clamp(max=last)
            guesses.append((rows.tokens[place] * 7 + 3 * k) % 11 - 4)
        self._confidence = torch.stack(guesses, dim=1) * 0.7


class LensDrafter:
    """From features: the two best tokens of the final hidden state, as siblings.

    That state decided the newest token, so the first sibling repeats it where features arrive at
    their place: ``siblings`` int64[S, 2] and ``newest`` int64[S] of the slots.
    """

    def __init__(self, context: DrafterContext) -> None:
        self._target = context.target
        slots, device = context.slots, context.device
        self.siblings = torch.zeros(slots, 2, dtype=torch.int64, device=device)
        self.newest = torch.zeros(slots, dtype=torch.int64, device=device)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The final hidden state."""
        return ()

    def enter(self, init: SlotInit) -> None:
        """The prompt's last chunk says all that is needed."""

    def propose(self, rows: DraftRows) -> None:
        caps = rows.caps
        place = torch.arange(len(rows.tokens), dtype=torch.int32, device=caps.device)
        row = torch.searchsorted(rows.cu_q[1:], place, right=True).clamp_(max=len(caps) - 1)
        node = place - rows.cu_q[row]
        mine = (node >= 1) & (node <= caps.clamp(max=2)[row])
        drafts = self.siblings[rows.slots].int()[row, (node - 1).clamp(0, 1)]
        rows.tokens.copy_(torch.where(mine, drafts, rows.tokens))
        rows.parents.copy_(torch.where(mine, 0, rows.parents))
        rows.proposed.copy_(caps.clamp(max=2))
        rows.depths.copy_(caps.clamp(max=1))

    def align(self, verdict: Verdict) -> None:
        begin, end = verdict.batch.cu_q[:-1].long(), verdict.batch.cu_q[1:].long()
        newest = (verdict.accept_lens - 1).clamp(min=0).long()[:, None]
        node = begin + verdict.path.gather(1, newest)[:, 0].clamp(min=0)
        deciding = torch.where(verdict.kinds == RowKind.VERIFY, node, end - 1)
        logits = self._target.logits(verdict.features[deciding])
        self.siblings[verdict.slots] = logits.topk(2, dim=1).indices
        self.newest[verdict.slots] = verdict.tokens.gather(1, newest)[:, 0].long()

    def reset(self) -> None:
        self.siblings.zero_()


def follow(context: DrafterContext) -> FollowDrafter:
    return FollowDrafter(context)


def lens(context: DrafterContext) -> LensDrafter:
    return LensDrafter(context)


def guess(context: DrafterContext) -> GuessDrafter:
    return GuessDrafter(context)


class DiceDrafter(FollowDrafter):
    """Chains drawn from fixed laws of a token by the one before it; else the likeliest."""

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        self._nodes = context.config.num_draft_tokens(DICE) - 1
        shape, generator = (context.vocab_size, context.vocab_size), torch.Generator()
        self._table = torch.randn(shape, generator=generator.manual_seed(3)).to(context.device)

    def propose(self, rows: DraftRows) -> DraftLaw | None:
        draw: DraftDraw | None = None
        if rows.noise is not None:
            draw = DraftDraw(
                self._ops, rows.noise, rows.slots, rows.seq_lens, self._nodes, None, None
            )
        token = self.newest[rows.slots.long()]
        drafts = token.new_empty(self._nodes, len(token))
        for level in range(self._nodes):
            logits = self._table[token]
            if draw is None:
                drafts[level] = logits.argmax(dim=1)
            else:
                draw.draw(level, logits, drafts[level])
            token = drafts[level]
        self._ops.write_chains(
            drafts,
            rows.cu_q,
            rows.caps,
            tokens=rows.tokens,
            parents=rows.parents,
            proposed=rows.proposed,
            depths=rows.depths,
        )
        return None if draw is None else draw.law()


def dice(context: DrafterContext) -> DiceDrafter:
    return DiceDrafter(context)
