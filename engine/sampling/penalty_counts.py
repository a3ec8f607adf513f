"""Token counts of the requests that have penalties, and of no others."""

import numpy as np
import torch

from ...engine_core.ids import i32


class PenaltyCounts:
    """A pool of rows: ``output`` int32[K, V], how often a token was generated; ``in_prompt``
    bool[K, V]. ``row_of`` int64[S] maps slots to rows, -1 for those without one.
    """

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._free: list[int] = []
        self._held: dict[int, int] = {}  # what row_of says, without asking the device
        self.row_of = torch.full((max_slots,), -1, dtype=torch.int64, device=device)
        self.output = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)

    def open(self, slot: int, prompt: bytes, output: bytes) -> None:
        """Give the slot a row that counts ``prompt`` and ``output`` (int32 bytes)."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._held[slot] = row
        self.row_of[slot] = row
        self.output[row] = torch.bincount(self._ids(output), minlength=self._vocab_size)
        self.in_prompt[row] = False
        self.in_prompt[row, self._ids(prompt)] = True

    def close(self, slot: int) -> None:
        """Take the slot's row back, if it has one."""
        row = self._held.pop(slot, None)
        if row is not None:
            self._free.append(row)
            self.row_of[slot] = -1

    def add(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count generated tokens: int64[n] each; every slot has a row."""
        ones = torch.ones(len(tokens), dtype=torch.int32, device=self._device)
        self.output.index_put_((self.row_of[slots], tokens), ones, accumulate=True)

    def _grow(self) -> None:
        rows = self.output.shape[0]
        added = max(4, rows)
        fresh = torch.zeros(added, self._vocab_size, dtype=torch.int32, device=self._device)
        self.output = torch.cat((self.output, fresh))
        self.in_prompt = torch.cat((self.in_prompt, fresh.bool()))
        self._free.extend(range(rows + added - 1, rows - 1, -1))

    def _ids(self, buffer: bytes) -> torch.Tensor:
        return torch.from_numpy(i32(buffer).astype(np.int64)).to(self._device)
