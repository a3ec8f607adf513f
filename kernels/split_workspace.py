"""Scratch memory of matmuls whose K is split between programs."""

from typing import Protocol

import torch

from .linear_config import row_tier


class SplitConfig(Protocol):
    """A matmul configuration that knows its scratch memory."""

    def scratch(self, block_m: int, n: int, k: int) -> tuple[int, int]:
        """(float32 sums, tiles) that parts of a tile leave for each other; (0, 0) unsplit."""


class SplitWorkspace:
    """What the parts of a split K leave for each other: partial sums and arrival counters.

    Kernels of one stream may share it: each leaves the counters at zero. Allocate it before a CUDA
    graph is captured, with the most sums and the most tiles that a matmul needs.
    """

    def __init__(self, device: torch.device | str, elements: int, tiles: int) -> None:
        self.partial = torch.empty(elements, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(tiles, dtype=torch.int32, device=device)

    @classmethod
    def need(cls, rows: int, n: int, k: int, config: SplitConfig) -> tuple[int, int]:
        """(elements, tiles) that x [rows, k] @ weight [n, k]^T uses, (0, 0) without a split."""
        return config.scratch(row_tier(rows), n, k)

    @classmethod
    def of(
        cls,
        workspace: "SplitWorkspace | None",
        device: torch.device,
        need: tuple[int, int],
    ) -> "SplitWorkspace | None":
        """``workspace`` or a new one, None where none is needed. ValueError if it is too small."""
        elements, tiles = need
        if not elements:
            return None
        if workspace is None:
            return cls(device, elements, tiles)
        if workspace.partial.numel() < elements or workspace.arrived.numel() < tiles:
            raise ValueError(f"the workspace is too small for {elements} sums in {tiles} tiles")
        return workspace
