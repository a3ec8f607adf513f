"""The ranks that share a model, as a step sees them."""

from collections.abc import Sequence
from typing import Protocol

import torch


class Ranks(Protocol):
    """One rank among several; the leading one decides tokens, counts and lengths."""

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        ...

    def agree(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take over what the leading rank has in these contiguous int32 tensors.

        Every rank gives tensors of the same shapes. On CUDA it can be captured.
        """
        ...
