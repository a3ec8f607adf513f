"""Sampling parameters by request slot, as columns that samplers gather from."""

from typing import Protocol

import numpy as np
import torch

from ...engine_core.plan import SlotInit
from .features import EDITS, Feature, features_of


class Edits(Protocol):
    """Where a device keeps penalties, biases and minimum lengths."""

    def enter(self, init: SlotInit, features: Feature) -> None:
        """Take over a request's edits; ``forget`` came before."""
        ...

    def forget(self, slot: int) -> None:
        """The slot's request is gone."""
        ...


class SlotTable:
    """Columns over S slots. ``features`` uint8[S] stays on the host, which knows it anyway, and
    ``featured`` counts the slots that have any; the other columns are on the device: float32[S]
    or as noted (``sampled`` is bool[S]). ``logprobs`` (k) holds only the slots that ask for them,
    ``edits`` what the device keeps elsewhere.
    """

    def __init__(self, max_slots: int, device: torch.device, edits: Edits) -> None:
        def column(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(max_slots, dtype=dtype, device=device)

        self.features = np.zeros(max_slots, dtype=np.uint8)
        self.featured = 0
        self.sampled = column(torch.bool)
        self.temperatures = column(torch.float32)
        self.top_ks = column(torch.int32)
        self.top_ps = column(torch.float32)
        self.min_ps = column(torch.float32)
        self.seeds = column(torch.int64)
        self._edits = edits
        self.logprobs: dict[int, int] = {}

    def enter(self, init: SlotInit) -> None:
        """Take over a new request's parameters; what the slot held before is forgotten."""
        slot, params = init.slot, init.params
        self._forget(slot)
        features = features_of(params, init.eos_ids)
        self.features[slot] = features
        self.featured += features != Feature.NONE
        if Feature.SAMPLED in features:
            self.sampled[slot] = True
            self.temperatures[slot] = params.temperature
            self.top_ks[slot] = params.top_k
            self.top_ps[slot] = params.top_p
            self.min_ps[slot] = params.min_p
            self.seeds[slot] = _signed(init.seed)
        if features & EDITS:
            self._edits.enter(init, features)
        if params.logprobs is not None:
            self.logprobs[slot] = params.logprobs

    def reset(self) -> None:
        """Forget every slot."""
        for slot in np.flatnonzero(self.features).tolist():
            self._forget(slot)

    def _forget(self, slot: int) -> None:
        features = int(self.features[slot])
        if features:
            self.sampled[slot] = False
            self.features[slot] = 0
            self.featured -= 1
        if features & EDITS:
            self._edits.forget(slot)
        self.logprobs.pop(slot, None)


def _signed(seed: int) -> int:
    """The 64 bits of a seed as int64."""
    seed &= 2**64 - 1
    return seed - 2**64 if seed >= 2**63 else seed
