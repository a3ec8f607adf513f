"""A draft's vocabulary: the target's most frequent tokens, or all of them."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class DraftVocab:
    """``ids`` int64[Vd] ascending: the target's id of each draft id; None for all V.

    ``order`` int64[V]: the draft's ids, then the others. ``place`` int64[V] is its inverse: an id
    is in the draft's vocabulary if its place is below Vd.
    """

    size: int
    ids: torch.Tensor | None
    order: torch.Tensor | None
    place: torch.Tensor | None

    def places(self, tokens: torch.Tensor) -> torch.Tensor:
        """Draft ids of the target's tokens; Vd and above for those outside."""
        return tokens if self.place is None else self.place[tokens]

    def maps(self) -> dict[str, torch.Tensor]:
        """``d2t`` int64[Vd], target id - draft id; ``t2d`` bool[V]."""
        if self.ids is None or self.order is None:
            return {}
        ids = self.ids.cpu()
        mask = torch.zeros(len(self.order), dtype=torch.bool)
        mask[ids] = True
        return {"d2t": ids - torch.arange(len(ids)), "t2d": mask}


def check_size(size: int, always: int, total: int) -> None:
    """Raises ValueError for a size that ``always`` tokens fill, or that is above ``total``."""
    if not always < size <= total:
        raise ValueError(f"must be above {always} and at most {total}, is {size}")


def draft_vocab(
    counts: NDArray[np.int64], size: int | None, always: tuple[int, ...], device: torch.device
) -> DraftVocab:
    """The ``size`` most frequent tokens, ``always`` among them; ties go to the lower id.

    ``counts`` [V]. Raises ValueError for a size that is not within the vocabulary.
    """
    total = len(counts)
    if size is None or size == total:
        return DraftVocab(total, None, None, None)
    check_size(size, len(always), total)
    ranked = counts.copy()
    ranked[list(always)] = np.iinfo(np.int64).max
    chosen = np.sort(np.argsort(-ranked, kind="stable")[:size])
    rest = np.setdiff1d(np.arange(total), chosen)
    order = torch.from_numpy(np.concatenate([chosen, rest]))
    place = torch.empty(total, dtype=torch.int64)
    place[order] = torch.arange(total)
    return DraftVocab(size, torch.from_numpy(chosen).to(device), order.to(device), place.to(device))
