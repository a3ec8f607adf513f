"""Page-locked blocks for copies to and from a device."""

import torch

_RING = 4  # more blocks than steps that can be in flight


class PinnedRing:
    """Page-locked int32 blocks taken in turn, each free again once its step is over."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._blocks = [torch.empty(0, dtype=torch.int32) for _ in range(_RING)]
        self._next = 0

    def take(self, size: int) -> torch.Tensor:
        """int32[size], on the host."""
        at, self._next = self._next, (self._next + 1) % _RING
        if self._blocks[at].shape[0] < size:
            self._blocks[at] = torch.empty(
                max(size, 1024), dtype=torch.int32, pin_memory=self._pinned
            )
        return self._blocks[at][:size]
