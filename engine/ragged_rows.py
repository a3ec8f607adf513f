"""Verify lengths on a CPU: what the drafter's confidence leaves of the drafts of a step."""

from typing import NamedTuple

import torch

from ..engine_core.ragged_verify import RaggedVerify
from ..kernels.verify_lens import allocate_verify
from .speculative.device_drafter import DraftRows


class VerifyCut(NamedTuple):
    """Of R rows that were drafted for: ``confidence`` float32[R, G], and ``lens`` int32[R], the
    bonus token and the drafts that count."""

    confidence: torch.Tensor
    lens: torch.Tensor


class RaggedRows:
    """Shares a step's budget out among the rows of a drafter that gives confidence."""

    def __init__(self, ragged: RaggedVerify) -> None:
        self.mode = ragged.mode
        self._rules = ragged.rules
        self._temperatures = torch.tensor(ragged.temperatures, dtype=torch.float32)

    def cut(self, rows: DraftRows, logits: torch.Tensor, budget: int) -> VerifyCut:
        """``logits`` float32[R, G] raw, of ``rows`` that have their drafts; ``budget``: see
        StepPlan."""
        logits = logits[: len(rows.caps)].float()
        confidence, lens = torch.empty_like(logits), torch.empty_like(rows.caps)
        allocate_verify(
            logits,
            self._temperatures,
            rows.proposed,
            torch.tensor([budget], dtype=torch.int32),
            limit=self._rules.limit,
            eps=self._rules.eps,
            confidence=confidence,
            verify_lens=lens,
        )
        return VerifyCut(confidence, lens)
