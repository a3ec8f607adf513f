"""Log-probabilities of prompt tokens, from the hidden states of the chunks that hold them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ...engine_core.ids import I32, RowKind, i32, u8
from ...engine_core.plan import RowLogprobs, SlotInit, StepPlan, TokenLogprobs
from ...engine_core.prompt_scores import scored
from .logprobs import token_logprobs

_BLOCK = 32  # positions whose logits are there at once


@dataclass(slots=True)
class _Wanted:
    first: int
    prompt: I32
    top: int


class Piece(NamedTuple):
    """What a chunk scores: ``tokens`` int32[n] by the n positions of its row from ``skipped`` on.

    ``top``: best tokens at each.
    """

    row: int
    skipped: int
    tokens: I32
    top: int


class WantedScores:
    """The slots whose prompts are to be scored, and from which position on."""

    def __init__(self) -> None:
        self._wanted: dict[int, _Wanted] = {}

    def enter(self, init: SlotInit) -> None:
        """Take over a new request's wish; what the slot held before is forgotten."""
        self._wanted.pop(init.slot, None)
        top = init.params.prompt_logprobs
        if init.prompt_scores >= 0 and top is not None:
            self._wanted[init.slot] = _Wanted(init.prompt_scores, i32(init.prompt), top)

    def reset(self) -> None:
        """Forget every slot."""
        self._wanted.clear()

    def take(self, plan: StepPlan) -> list[Piece]:
        """What the step's chunks score; to be asked once a step."""
        if not self._wanted:
            return []
        pieces: list[Piece] = []
        slots, starts, lengths = i32(plan.slots).tolist(), i32(plan.starts), i32(plan.q_caps)
        for row in np.flatnonzero(u8(plan.kinds) != RowKind.VERIFY).tolist():
            wanted = self._wanted.get(slots[row])
            if wanted is None:
                continue
            start = int(starts[row])
            due = scored(wanted.first, len(wanted.prompt), start, start + int(lengths[row]))
            if due:
                tokens = wanted.prompt[due.start : due.stop]
                pieces.append(Piece(row, due.start - 1 - start, tokens, wanted.top))
                wanted.first = due.stop
            if wanted.first == len(wanted.prompt):
                del self._wanted[slots[row]]
        return pieces


def score_prompts(
    pieces: Sequence[Piece],
    cu_q: I32,
    hidden: torch.Tensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[RowLogprobs, ...]:
    """The entries of every piece; ``cu_q`` int32[R + 1] are the step's, ``hidden`` [T, H] its.

    ``logits_of``: float32[n, V] of hidden states [n, H].
    """
    return tuple(RowLogprobs(piece.row, _score(piece, cu_q, hidden, logits_of)) for piece in pieces)


def _score(
    piece: Piece,
    cu_q: I32,
    hidden: torch.Tensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[TokenLogprobs, ...]:
    entries: list[TokenLogprobs] = []
    first = int(cu_q[piece.row]) + piece.skipped
    for begin in range(0, len(piece.tokens), _BLOCK):
        tokens = piece.tokens[begin : begin + _BLOCK]
        part = hidden[first + begin : first + begin + len(tokens)]
        entries += token_logprobs(logits_of(part), tokens, piece.top)
    return tuple(entries)
