"""Verify lengths inside a step on the device: by the drafter's confidence, or by the plan."""

from typing import TYPE_CHECKING, NamedTuple

import torch

from ...engine_core.ragged_verify import RaggedMode, RaggedVerify
from ...kernels.ragged_rows_gpu import compact_rows
from ...kernels.verify_lens_gpu import allocate_verify
from .staging import StagingViews

if TYPE_CHECKING:
    from .device_step import StepOutput


class Cut(NamedTuple):
    """The batch as it is verified, and int32[R] tokens that rows emit at most (None: any)."""

    staging: StagingViews
    most: torch.Tensor | None


class RaggedStep:
    """Cuts the rows of a step, or caps what they accept, behind the drafter's ``propose``.

    ``gamma``: drafts a row whose confidence the output carries; 0 without any. ``pdl``: see
    ``allocate_verify``.
    """

    def __init__(self, ragged: RaggedVerify, device: torch.device, pdl: bool) -> None:
        self._mode: RaggedMode = ragged.mode
        self.gamma = len(ragged.temperatures)
        self.caps = self._mode == "cap-accept"
        self.compacts = self._mode == "compact" and ragged.planned
        self._rules = ragged.rules if ragged.planned else None
        self._temperatures = torch.tensor(ragged.temperatures, device=device)
        self._pdl = pdl

    def cut(
        self,
        staging: StagingViews,
        output: "StepOutput",
        logits: torch.Tensor | None,
        verified: int | None,
    ) -> Cut:
        """``output`` has what was proposed, and gets confidence and what is left of the drafts.

        ``logits`` float32[R, G]: raw confidence, where it is asked for. ``verified``: tokens of the
        batch that is to be verified, G' of them; None: as planned.
        """
        assert output.proposed is not None
        assert output.depths is not None
        lens = self._lengths(staging, output, logits)
        if self.caps:
            drafts = lens - 1
            torch.minimum(output.proposed, drafts, out=output.proposed)
            torch.minimum(output.depths, drafts, out=output.depths)
            return Cut(staging, lens)
        if verified is None:
            return Cut(staging, None)
        return Cut(self._compact(staging, output, lens, verified), None)

    def _lengths(
        self, staging: StagingViews, output: "StepOutput", logits: torch.Tensor | None
    ) -> torch.Tensor:
        """int32[R]: 1 and the drafts of the row that count."""
        if self._rules is None:
            return staging.accept_caps + 1
        assert logits is not None
        assert output.confidence is not None
        rows = len(staging.slots)
        lens = torch.empty_like(staging.slots)
        assert output.proposed is not None
        allocate_verify(
            logits[:rows].float(),
            self._temperatures,
            output.proposed,
            staging.budget,
            limit=self._rules.limit,
            eps=self._rules.eps,
            confidence=output.confidence,
            verify_lens=lens,
            pdl=self._pdl,
        )
        return lens

    def _compact(
        self, staging: StagingViews, output: "StepOutput", lens: torch.Tensor, verified: int
    ) -> StagingViews:
        assert output.proposed is not None
        assert output.depths is not None
        cu_q, node_cu = torch.empty_like(staging.cu_q), torch.empty_like(staging.node_cu)
        tokens, parents, index = torch.empty(
            3, verified, dtype=torch.int32, device=staging.slots.device
        ).unbind()
        compact_rows(
            staging.cu_q,
            staging.node_cu,
            staging.caps,
            lens,
            staging.tokens,
            staging.parents,
            cu_q_out=cu_q,
            node_cu_out=node_cu,
            tokens_out=tokens,
            parents_out=parents,
            node_index_out=index,
            proposed=output.proposed,
            depths=output.depths,
            pdl=self._pdl,
        )
        return staging._replace(
            cu_q=cu_q, node_cu=node_cu, tokens=tokens, parents=parents, node_index=index
        )
