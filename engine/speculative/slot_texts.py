"""The tokens with which requests enter their slots, on the device."""

import numpy as np
import torch

from ...engine_core.ids import i32
from ...engine_core.plan import SlotInit


class SlotTexts:
    """``tokens`` int32[S, L]: prompt and earlier output of the request in each slot.

    What lies behind them is of earlier requests, or whatever its user wrote there.
    """

    def __init__(self, slots: int, length: int, device: torch.device) -> None:
        self.tokens = torch.zeros(slots, length, dtype=torch.int32, device=device)

    def enter(self, init: SlotInit) -> None:
        """Copy a request's tokens to the device, in stream order."""
        tokens = np.concatenate((i32(init.prompt), i32(init.output)))
        tokens = tokens[: self.tokens.shape[1]]
        host = torch.from_numpy(tokens)
        if self.tokens.is_cuda:
            # The pinned copy is kept by torch's allocator until the stream has read it.
            host = host.pin_memory()
        self.tokens[init.slot, : len(tokens)].copy_(host, non_blocking=True)
