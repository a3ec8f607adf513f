"""The arrays between a CPU's steps and their drafter, allocated once like those of the steps."""

from typing import NamedTuple

import numpy as np
import torch

from ..engine_core.ids import I32, U8
from .speculative.device_drafter import DraftRows

_MAX_CACHED_SHAPES = 1024


class Grids(NamedTuple):
    """Of R rows that emitted up to W tokens each: what `Verdict` says of these fields."""

    slots: torch.Tensor
    kinds: torch.Tensor
    tokens: torch.Tensor
    path: torch.Tensor


class DraftBuffers:
    """Room for R rows and T nodes, grown when a step needs more.

    ``slots``, ``caps``, ``cu_q``, ``proposed``, ``tokens`` and ``parents``: the rows that are
    drafted for; ``counts``, ``all_slots`` and ``kinds``: all of a step's. Tensors that share their
    memory are made once a shape and kept.
    """

    def __init__(self) -> None:
        self._rows = self._tokens = 0
        self._drafts: dict[tuple[int, int], DraftRows] = {}
        self._grids: dict[tuple[int, int], tuple[I32, I32, Grids]] = {}
        self.reserve_rows(64)
        self._reserve_tokens(1024)

    def reserve_rows(self, rows: int) -> None:
        """Make room for this many rows; contents may be lost."""
        if rows <= self._rows:
            return
        self._rows = rows
        self._drafts.clear()
        self._grids.clear()
        self.slots: I32 = np.zeros(rows, dtype=np.int32)
        self.caps: I32 = np.zeros(rows, dtype=np.int32)
        self.cu_q: I32 = np.zeros(rows + 1, dtype=np.int32)
        self.proposed: I32 = np.zeros(rows, dtype=np.int32)
        self._depths: I32 = np.zeros(rows, dtype=np.int32)
        self.counts: I32 = np.zeros(rows, dtype=np.int32)
        self.all_slots: I32 = np.zeros(rows, dtype=np.int32)
        self.kinds: U8 = np.zeros(rows, dtype=np.uint8)

    def _reserve_tokens(self, tokens: int) -> None:
        if tokens <= self._tokens:
            return
        self._tokens = tokens
        self._drafts.clear()
        self.tokens: I32 = np.zeros(tokens, dtype=np.int32)
        self.parents: I32 = np.zeros(tokens, dtype=np.int32)

    def rows(self, rows: int, seq_lens: torch.Tensor) -> DraftRows:
        """The first rows, with what is to be written set to 0; valid until the next step."""
        total = int(self.cu_q[rows])
        self._reserve_tokens(total)
        for written in (self.tokens[:total], self.parents[:total]):
            written.fill(0)
        for written in (self.proposed[:rows], self._depths[:rows]):
            written.fill(0)
        drafts = self._drafts.get((rows, total))
        if drafts is None:
            if len(self._drafts) >= _MAX_CACHED_SHAPES:
                self._drafts.clear()
            drafts = self._drafts[rows, total] = DraftRows(
                torch.from_numpy(self.slots[:rows]),
                torch.from_numpy(self.cu_q[: rows + 1]),
                torch.from_numpy(self.caps[:rows]),
                seq_lens,
                torch.from_numpy(self.tokens[:total]),
                torch.from_numpy(self.parents[:total]),
                torch.from_numpy(self.proposed[:rows]),
                torch.from_numpy(self._depths[:rows]),
            )
        return drafts

    def grids(self, rows: int, width: int) -> tuple[I32, I32, Grids]:
        """int32[rows, width] of tokens and of nodes, and the tensors of what all rows have."""
        found = self._grids.get((rows, width))
        if found is None:
            if len(self._grids) >= _MAX_CACHED_SHAPES:
                self._grids.clear()
            tokens, path = np.zeros((2, rows, width), dtype=np.int32)
            found = self._grids[rows, width] = (
                tokens,
                path,
                Grids(
                    torch.from_numpy(self.all_slots[:rows]),
                    torch.from_numpy(self.kinds[:rows]),
                    torch.from_numpy(tokens),
                    torch.from_numpy(path),
                ),
            )
        return found
