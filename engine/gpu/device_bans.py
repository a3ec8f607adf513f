"""Tokens that requests rule out, by request slot, as `mask_banned` reads them on a GPU."""

from collections.abc import Callable

import numpy as np
import torch

from ...engine_core.ids import I32, i32
from ...engine_core.plan import SlotInit
from ...engine_core.sampling_params import SamplingParams
from ...engine_core.token_bans import MAX_BAN_TOKENS

_FIRST_BANS = 64
_FIRST_TOKENS = 512


class DeviceBans:
    """State of S slots, written in stream order and never waited for.

    The fields are those of `mask_banned`; they get their room with the first request that needs
    it, and more when it does not suffice. ``write`` copies a host array to the device.
    """

    def __init__(
        self,
        slots: int,
        vocab_size: int,
        device: torch.device,
        decides: bool,
        write: Callable[[torch.Tensor, I32], None],
    ) -> None:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.disallowed = zeros(slots, 0)
        self.ban_counts = zeros(slots)
        self.ban_bounds = zeros(slots, 1)
        self.ban_tokens = zeros(slots, 0)
        self.tails = zeros(slots, MAX_BAN_TOKENS)
        self._words = 0
        self._bans = 0
        self._tokens = 0
        self._slots = slots
        self._vocab_size = vocab_size
        self._decides = decides
        self._write = write

    @property
    def used(self) -> bool:
        """Whether any request so far has ruled out tokens."""
        return bool(self._words or self._bans)

    def enter(self, init: SlotInit) -> bool:
        """Take over a request's bans; returns whether the fields were allocated anew."""
        params = init.params
        moved = self._make_room(params)
        if self._decides:
            if params.allowed_token_ids is not None:
                self._write(self.disallowed[init.slot], self._bits(params.allowed_token_ids))
            if params.bad_words_ids:
                self._ban(init)
        return moved

    def forget(self, slot: int) -> None:
        """The slot's request is gone."""
        self.ban_counts[slot] = 0
        self.disallowed[slot] = 0

    def _make_room(self, params: SamplingParams) -> bool:
        words = -(-self._vocab_size // 32) if params.allowed_token_ids is not None else 0
        bans = len(params.bad_words_ids)
        sizes = (
            max(self._words, words),
            _room(self._bans, bans, _FIRST_BANS),
            _room(self._tokens, sum(map(len, params.bad_words_ids)), _FIRST_TOKENS),
        )
        if sizes == (self._words, self._bans, self._tokens):
            return False
        self._words, self._bans, self._tokens = sizes
        if self._decides:
            self.disallowed = _widened(self.disallowed, self._words)
            self.ban_bounds = _widened(self.ban_bounds, self._bans + 1)
            self.ban_tokens = _widened(self.ban_tokens, self._tokens)
        return True

    def _bits(self, allowed: tuple[int, ...]) -> I32:
        """int32[W] with the bits of all other tokens."""
        out = np.ones(32 * self._words, dtype=np.uint8)
        out[list(allowed)] = 0
        return np.packbits(out, bitorder="little").view("<i4").astype(np.int32)

    def _ban(self, init: SlotInit) -> None:
        bans, slot = init.params.bad_words_ids, init.slot
        bounds = np.cumsum([0, *map(len, bans)]).astype(np.int32)
        self._write(self.ban_bounds[slot, : len(bounds)], bounds)
        tokens = np.concatenate(bans).astype(np.int32)
        self._write(self.ban_tokens[slot, : len(tokens)], tokens)
        tail = np.full(MAX_BAN_TOKENS, -1, dtype=np.int32)
        newest = i32(init.output)[-MAX_BAN_TOKENS:]
        tail[len(tail) - len(newest) :] = newest
        self._write(self.tails[slot], tail)
        self.ban_counts[slot] = len(bans)


def _room(held: int, needed: int, first: int) -> int:
    """Entries to have: those held if they suffice, else a power of two."""
    return held if needed <= held else max(first, 1 << (needed - 1).bit_length())


def _widened(field: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(field, (0, width - field.shape[1]))
