"""What all batches of equal rows share: offsets, zeros and indices, as slices of one allocation."""

from typing import NamedTuple

import torch

_FIRST = 1024


class Constants(NamedTuple):
    """Of R rows with ``width`` tokens each, T in all; never written to.

    ``cu_q`` int32[R + 1]; ``zeros`` int64[T]; ``plain`` uint8[R], zeros;
    ``numbers`` int64[T], 0..T-1.
    """

    cu_q: torch.Tensor
    zeros: torch.Tensor
    plain: torch.Tensor
    numbers: torch.Tensor


class RowConstants:
    """Grows by doubling; what was handed out stays as it is, since captured graphs read it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._zeros = torch.zeros(0, dtype=torch.int64, device=device)
        self._numbers = torch.zeros(0, dtype=torch.int64, device=device)
        self._plain = torch.zeros(0, dtype=torch.uint8, device=device)
        self._offsets: dict[int, torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []

    def of(self, rows: int, width: int) -> Constants:
        """Constants of ``rows`` rows of ``width`` tokens."""
        tokens = rows * width
        if tokens > len(self._numbers):
            self._grow(max(tokens, 2 * len(self._numbers), _FIRST))
        offsets = self._offsets.get(width)
        if offsets is None or rows >= len(offsets):
            if offsets is not None:
                self._outgrown.append(offsets)
            most = len(self._numbers) // width + 1
            offsets = torch.arange(0, most * width, width, dtype=torch.int32, device=self._device)
            self._offsets[width] = offsets
        return Constants(
            offsets[: rows + 1], self._zeros[:tokens], self._plain[:rows], self._numbers[:tokens]
        )

    def _grow(self, tokens: int) -> None:
        self._outgrown += [self._zeros, self._numbers, self._plain]
        self._zeros = torch.zeros(tokens, dtype=torch.int64, device=self._device)
        self._numbers = torch.arange(tokens, device=self._device)
        self._plain = torch.zeros(tokens, dtype=torch.uint8, device=self._device)
