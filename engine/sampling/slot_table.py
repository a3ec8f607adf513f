"""Sampling parameters by request slot, as columns that processors gather from."""

from enum import IntFlag

import numpy as np
import torch

from ...engine_core.plan import SlotInit
from ...engine_core.sampling_params import SamplingParams
from .penalty_counts import PenaltyCounts


class Feature(IntFlag):
    """What a request asks for beyond the argmax of the raw logits (one byte a slot)."""

    NONE = 0
    SAMPLED = 1
    PENALTIES = 2
    LOGIT_BIAS = 4
    MIN_TOKENS = 8
    LOGPROBS = 16


# Plain ints: an IntFlag operand costs numpy microseconds.
EDITS = int(Feature.PENALTIES | Feature.LOGIT_BIAS | Feature.MIN_TOKENS)
PROCESSED = EDITS | int(Feature.SAMPLED)
AFTERWARDS = int(Feature.PENALTIES | Feature.LOGPROBS)


def features_of(params: SamplingParams, eos_ids: tuple[int, ...]) -> Feature:
    """The features that a request's parameters switch on."""
    found = Feature.NONE
    if not params.greedy:
        found |= Feature.SAMPLED
    if params.penalized:
        found |= Feature.PENALTIES
    if params.logit_bias:
        found |= Feature.LOGIT_BIAS
    if params.min_new_tokens > 0 and eos_ids:
        found |= Feature.MIN_TOKENS
    if params.logprobs is not None:
        found |= Feature.LOGPROBS
    return found


class SlotTable:
    """Columns over S slots. ``features`` uint8[S] stays on the host, which knows it anyway, and
    ``featured`` counts the slots that have any; the other columns are on the device: float32[S]
    or as noted (``sampled`` is bool[S]). ``biases``, ``masked`` (token ids int64, values) and
    ``logprobs`` (k) hold only the slots that ask for them.
    """

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device) -> None:
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
        self.min_new_tokens = column(torch.int32)
        self.repetition = column(torch.float32)
        self.presence = column(torch.float32)
        self.frequency = column(torch.float32)
        self.counts = PenaltyCounts(max_slots, vocab_size, device)
        self.biases: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.masked: dict[int, torch.Tensor] = {}
        self.logprobs: dict[int, int] = {}
        self._device = device

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
        if Feature.PENALTIES in features:
            self.repetition[slot] = params.repetition_penalty
            self.presence[slot] = params.presence_penalty
            self.frequency[slot] = params.frequency_penalty
            self.counts.open(slot, init.prompt, init.output)
        if Feature.LOGIT_BIAS in features:
            ids = torch.tensor(list(params.logit_bias), device=self._device)
            values = torch.tensor(list(params.logit_bias.values()), device=self._device)
            self.biases[slot] = (ids, values)
        if Feature.MIN_TOKENS in features:
            self.min_new_tokens[slot] = params.min_new_tokens
            self.masked[slot] = torch.tensor(init.eos_ids, device=self._device)
        if params.logprobs is not None:
            self.logprobs[slot] = params.logprobs

    def reset(self) -> None:
        """Forget every slot."""
        for slot in np.flatnonzero(self.features).tolist():
            self._forget(slot)

    def _forget(self, slot: int) -> None:
        if self.features[slot]:
            self.sampled[slot] = False
            self.features[slot] = 0
            self.featured -= 1
        self.counts.close(slot)
        for held in (self.biases, self.masked, self.logprobs):
            held.pop(slot, None)


def _signed(seed: int) -> int:
    """The 64 bits of a seed as int64."""
    seed &= 2**64 - 1
    return seed - 2**64 if seed >= 2**63 else seed
