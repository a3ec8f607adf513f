"""Penalties, biases, minimum lengths and bans by slot, as the CPU's processors read them."""

import torch

from ...engine_core.ids import I32
from ...engine_core.plan import SlotInit
from .features import Feature
from .penalty_counts import PenaltyCounts
from .slot_bans import SlotBans


class SlotEdits:
    """Columns over S slots, float32[S] or as noted. ``biases`` and ``masked`` (token ids int64,
    values) hold only the slots that ask for them, ``counts`` and ``bans`` likewise.
    """

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device) -> None:
        def column(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(max_slots, dtype=dtype, device=device)

        self.min_new_tokens = column(torch.int32)
        self.repetition = column(torch.float32)
        self.presence = column(torch.float32)
        self.frequency = column(torch.float32)
        self.counts = PenaltyCounts(max_slots, vocab_size, device)
        self.biases: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.masked: dict[int, torch.Tensor] = {}
        self.bans: dict[int, SlotBans] = {}
        self._vocab_size = vocab_size
        self._device = device

    def enter(self, init: SlotInit, features: Feature) -> None:
        """Take over a request's edits; ``forget`` came before."""
        slot, params = init.slot, init.params
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
        if Feature.BANS in features:
            self.bans[slot] = SlotBans(params, init.output, self._vocab_size, self._device)

    def emitted(self, slots: I32, accept_cu: I32, tokens: I32) -> None:
        """Note what a step's rows emitted: slots int32[R], accept_cu int32[R + 1], tokens [A]."""
        for row, slot in enumerate(slots.tolist() if self.bans else ()):
            if slot in self.bans:
                self.bans[slot].push(tokens[accept_cu[row] : accept_cu[row + 1]].tolist())

    def forget(self, slot: int) -> None:
        """The slot's request is gone."""
        self.counts.close(slot)
        self.biases.pop(slot, None)
        self.masked.pop(slot, None)
        self.bans.pop(slot, None)
