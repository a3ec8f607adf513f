"""Between a step and a drafter from another package: what is proposed is safe to verify."""

from typing import cast

import torch

from ...engine_core.plan import SlotInit
from .device_drafter import DeviceDrafter, DraftRows, SurvivalDrafter, Verdict
from .draft_law import DraftLaw

_DOUBLINGS = 6  # a row has up to 64 nodes, so that none is deeper than 63


class CheckedDrafter:
    """A :class:`DeviceDrafter` that passes ``drafter``'s proposals on only where they are sound.

    A row with a token outside the vocabulary of ``vocab_size``, or with a node that does not stand
    behind its parent (without ``tree``: right behind), has no drafts at all. What was written
    beyond what is proposed becomes padding, and depths are counted here. Errors name the drafter.
    """

    def __init__(self, drafter: DeviceDrafter, name: str, vocab_size: int, tree: bool) -> None:
        self._drafter = drafter
        self._name = name
        self._vocab_size = vocab_size
        self._tree = tree
        self._layers = drafter.feature_layers

    @property
    def feature_layers(self) -> tuple[int, ...] | None:
        """As the drafter said when it was made."""
        return self._layers

    @property
    def confidence(self) -> torch.Tensor:
        """As the drafter says; only where it is a SurvivalDrafter."""
        return cast(SurvivalDrafter, self._drafter).confidence

    def enter(self, init: SlotInit) -> None:
        """A request enters a slot."""
        self._drafter.enter(init)

    def propose(self, rows: DraftRows) -> DraftLaw | None:
        """Let the drafter draft, then look at it.

        Raises TypeError, ValueError for drawn drafts without a law that fits them.
        """
        try:
            law: object = self._drafter.propose(rows)
            checked = None if rows.noise is None else check_law(law, rows, self._vocab_size)
        except Exception as error:
            error.add_note(f"in propose() of the plug-in drafter {self._name}")
            raise
        check_drafts(rows, self._vocab_size, self._tree)
        return checked

    def align(self, verdict: Verdict) -> None:
        """Bring the drafter's state to what was accepted."""
        try:
            self._drafter.align(verdict)
        except Exception as error:
            error.add_note(f"in align() of the plug-in drafter {self._name}")
            raise

    def reset(self) -> None:
        """Forget every slot."""
        self._drafter.reset()


def check_law(law: object, rows: DraftRows, vocab_size: int) -> DraftLaw:
    """``law``, if its shapes and types are those of drafts of ``rows``.

    Raises TypeError, ValueError naming what is wrong; what its numbers say is the drafter's word.
    """
    if not isinstance(law, DraftLaw):
        raise TypeError(f"rows.noise asks for a DraftLaw, not {type(law).__name__}")
    shape, ids = tuple(law.logits.shape), law.draft_ids
    if len(shape) != 3 or shape[0] < 1 or shape[1] != len(rows.slots) or shape[2] < 1:
        raise ValueError(f"DraftLaw.logits are {shape}, not [levels, {len(rows.slots)}, ids]")
    if not law.logits.is_floating_point() or not law.logits.is_contiguous():
        raise ValueError(f"DraftLaw.logits are {law.logits.dtype}; they must be contiguous floats")
    if ids is None:
        if shape[2] != vocab_size:
            raise ValueError(f"DraftLaw.logits have {shape[2]} columns for {vocab_size} tokens")
    elif ids.dtype != torch.int32 or ids.shape != (vocab_size,) or not ids.is_contiguous():
        raise ValueError(f"DraftLaw.draft_ids must be a contiguous int32[{vocab_size}]")
    return law


def check_drafts(rows: DraftRows, vocab_size: int, tree: bool) -> None:
    """Change what is not sound, in place, without a look at the host."""
    tokens, parents = rows.tokens, rows.parents
    place = torch.arange(len(tokens), dtype=torch.int32, device=tokens.device)
    row = torch.searchsorted(rows.cu_q[1:].contiguous(), place, right=True)
    row.clamp_(max=len(rows.caps) - 1)
    node = place - rows.cu_q[row]
    drafted = (node >= 1) & (node <= rows.caps[row])
    wanted = torch.minimum(rows.proposed.clamp(min=0), rows.caps)
    real = drafted & (node <= wanted[row])
    behind = (parents >= 0) & (parents < node) if tree else parents == node - 1
    wrong = real & ~(behind & (tokens >= 0) & (tokens < vocab_size))
    faults = torch.zeros_like(rows.caps).index_add_(0, row, wrong.int())
    kept = torch.where(faults > 0, 0, wanted)
    padding = drafted & (node > kept[row])
    tokens.masked_fill_(padding, 0)
    parents.masked_fill_(padding, -1)
    rows.proposed.copy_(kept)
    rows.depths.copy_(_deepest(rows, row, drafted & ~padding) if tree else kept)


def _deepest(rows: DraftRows, row: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """int32[R]: the depth of each row's tree, by following twice as many parents each time."""
    place = torch.arange(len(real), device=real.device)
    above = torch.where(real, rows.cu_q[row].long() + rows.parents, place)
    depth = real.int()
    for _ in range(_DOUBLINGS):
        depth = depth + depth[above]
        above = above[above]
    zeros = torch.zeros_like(rows.caps)
    return zeros.scatter_reduce_(0, row, depth, "amax")
