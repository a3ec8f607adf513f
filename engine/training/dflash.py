"""DFLASH in training: every row of a block says the token at its own place, all at once."""

import torch
import torch.nn.functional as F

from ...engine_core.train_spec import weighting_of
from .block_loss import Drafted, Objective
from .block_recipe import BlockRecipe, Named


class DFlash(BlockRecipe):
    """Rows 1 to B - 1 of a block of B, through the target's head."""

    architecture = "DFlashDraftModel"
    first_row = 1

    def heads(self, generator: torch.Generator) -> Named:
        """None."""
        return {}

    def objective(self) -> Objective:
        """The cross-entropy to the target's answers, or with total variation in it."""
        spec = self._spec
        alpha = spec.dpace_alpha if weighting_of(spec) == "dpace" else None
        lk = spec.loss == "lk"
        return Objective(1.0, 0.0, lk, spec.hard_weight, 1.0, spec.survival_floor, alpha)

    def drafted(
        self, hidden: torch.Tensor, before: torch.Tensor, weights: Named
    ) -> tuple[Drafted, torch.Tensor | None]:
        """Logits do not depend on other drafts."""
        return Drafted(hidden, self._target.lm_head), None

    def choose(
        self, hidden: torch.Tensor, bonus: torch.Tensor, weights: Named
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Each row's first choice."""
        return F.linear(hidden, self._target.lm_head).argmax(-1), None

    def fields(self) -> dict[str, object]:
        """None."""
        return {}
