"""Page-locked blocks for copies to and from a device."""

from typing import NamedTuple

import torch

from ...engine_core.ids import I32

RING = 4  # more blocks than steps that can be in flight


class HostBlock(NamedTuple):
    """int32[N] on the host, for torch and for the rest."""

    tensor: torch.Tensor
    array: I32


class PinnedRing:
    """Page-locked int32 blocks taken in turn, each free again once its step is over."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._blocks = [torch.empty(0, dtype=torch.int32) for _ in range(RING)]
        # As they were last taken: most steps ask for what the one before asked for.
        self._taken = [HostBlock(block, block.numpy()) for block in self._blocks]
        self._next = 0

    def take(self, size: int) -> HostBlock:
        """int32[size], on the host."""
        at, self._next = self._next, (self._next + 1) % RING
        taken = self._taken[at]
        if taken.array.size == size:
            return taken
        if self._blocks[at].shape[0] < size:
            self._blocks[at] = torch.empty(
                max(size, 1024), dtype=torch.int32, pin_memory=self._pinned
            )
        tensor = self._blocks[at][:size]
        taken = self._taken[at] = HostBlock(tensor, tensor.numpy())
        return taken
