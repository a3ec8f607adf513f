"""The weights of an unroll's steps, and the sum of their losses."""

import torch
import torch.nn.functional as F

from ...engine_core.train_spec import TrainSpec
from .losses import Wanted, drafted_loss


class ChainLoss:
    """Collects the steps of one batch, in order. ``own``: see Batch. ``starts`` float32[B, R]: what
    a row weighs; None: 1.

    A step counts as far as the steps before it were accepted: drafted as the target chooses, which
    chose the text's own next token, since serving never goes on from a rejected draft.
    """

    def __init__(
        self,
        spec: TrainSpec,
        ids: torch.Tensor,
        own: torch.Tensor,
        rows: int,
        starts: torch.Tensor | None = None,
    ):
        self._spec = spec
        self._ids = ids
        self._own = own
        self._rows = rows
        self._alive = torch.ones(ids.shape[0], rows, device=ids.device)
        if starts is not None:
            self._alive = starts
        self._total: torch.Tensor | None = None
        self._agrees: list[torch.Tensor] = []
        self._norm: torch.Tensor | None = None

    def weights(self, offset: int, wanted: Wanted, draft_vocab: int) -> torch.Tensor:
        """float32[B, R] of the next step, which predicts token ``row + offset``."""
        own = self._own[:, offset : offset + self._rows]
        if own.shape[1] < self._rows:  # the text's end, which is never compared
            own = F.pad(own, (0, self._rows - own.shape[1]))
        base = torch.where(own, 1.0, self._spec.prompt_weight)
        if self._norm is None:
            self._norm = base.sum()
        step = len(self._agrees)
        return base * self._alive * (wanted.top < draft_vocab) * self._spec.step_decay**step

    def add(
        self,
        head_input: torch.Tensor,
        head: torch.Tensor,
        wanted: Wanted,
        weight: torch.Tensor,
        text: torch.Tensor,
    ) -> None:
        """The next step; ``text`` [B, R]: what the text has there, as indices like ``top``."""
        spec = self._spec
        loss, agree = drafted_loss(
            head_input, head, wanted, weight, spec.hard_weight, spec.loss == "lk"
        )
        self.add_plain(loss)
        self._agrees.append(agree)
        accepted = (agree & (wanted.top == text)).float()
        self._alive = self._alive * (spec.survival_floor + (1.0 - spec.survival_floor) * accepted)

    def add_plain(self, loss: torch.Tensor) -> None:
        """A part of the loss that is a weighted sum over rows."""
        self._total = loss if self._total is None else self._total + loss

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss a row, and bool[B, R, S] agreement."""
        assert self._total is not None
        assert self._norm is not None
        return self._total / self._norm, torch.stack(self._agrees, dim=-1)
