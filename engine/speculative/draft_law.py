"""Drafts that are drawn: with which noise, and from what, which acceptance must know."""

from typing import NamedTuple

import torch

from ...engine_core.drafter_spec import MAX_DRAFT_TOKENS
from .draft_ops import DraftOps


class DraftNoise(NamedTuple):
    """How requests sample, by slot: ``temperatures`` float32[S], ``seeds`` int64[S]; ``sampled``
    bool[S], without which a slot's drafts are the likeliest tokens.
    """

    temperatures: torch.Tensor
    seeds: torch.Tensor
    sampled: torch.Tensor


class DraftLaw(NamedTuple):
    """What the drafts of R chains were drawn from, see ``kernels/rejection_sample.py``.

    ``logits`` [L, R, Vd] of any float dtype: those of draft i of row r, at the row's temperature
    (1e-5 at least), nothing else; what lies beyond a row's drafts is not read. ``draft_ids``
    int32[V]: the column of each of the target's tokens, -1 for none; None where the two are the
    same. Valid until the step's end.
    """

    logits: torch.Tensor
    draft_ids: torch.Tensor | None


class DraftDraw:
    """Draws L drafts of each of R rows, one level after the other, and keeps what they came from.

    ``slots`` int32[R]; ``seq_lens`` int32[S], the place of each slot's newest token;
    ``token_ids`` int64[Vd] and ``draft_ids`` int32[V]: the draft's vocabulary, None where it is the
    target's. The noise of draft i is keyed by the place of the row's newest token and by i, so that
    no two rounds share any: the confidence of drafts that were never reached has a say in later
    rounds' lengths, which must not know the drafts that they are of.
    """

    def __init__(
        self,
        ops: DraftOps,
        noise: DraftNoise,
        slots: torch.Tensor,
        seq_lens: torch.Tensor,
        levels: int,
        token_ids: torch.Tensor | None,
        draft_ids: torch.Tensor | None,
    ) -> None:
        index = slots.long()
        self._ops = ops
        self._levels = levels
        self._token_ids, self._draft_ids = token_ids, draft_ids
        self._temperatures, self._seeds = noise.temperatures[index], noise.seeds[index]
        self._sampled = noise.sampled[index]
        self._newest = seq_lens[index].long()
        self._kept: torch.Tensor | None = None

    def draw(self, level: int, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        """Fill ``tokens`` int64[R] with draft ``level``, counted from 0, of ``logits`` [R, Vd]."""
        if self._kept is None:
            self._kept = logits.new_empty(self._levels, *logits.shape)
        self._kept[level].copy_(logits)
        self._ops.draw_drafts(
            logits, self._token_ids, self._temperatures, self._sampled, self._seeds,
            self._newest * MAX_DRAFT_TOKENS + level, tokens=tokens[:, None],
        )  # fmt: skip

    def law(self) -> DraftLaw:
        """What all levels were drawn from."""
        assert self._kept is not None, "nothing was drawn"
        return DraftLaw(self._kept, self._draft_ids)


def columns_of(token_ids: torch.Tensor | None, vocab_size: int) -> torch.Tensor | None:
    """int32[vocab_size]: the draft id of each token, -1 for none, from the tokens int64[Vd]."""
    if token_ids is None:
        return None
    draft_ids = torch.full((vocab_size,), -1, dtype=torch.int32, device=token_ids.device)
    draft_ids[token_ids] = torch.arange(len(token_ids), dtype=torch.int32, device=token_ids.device)
    return draft_ids
