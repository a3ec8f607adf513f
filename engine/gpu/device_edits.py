"""Penalties, biases, minimum lengths and bans by slot, as kernels read them on a GPU."""

import numpy as np
import numpy.typing as npt
import torch

from ...engine_core.ids import i32
from ...engine_core.plan import SlotInit
from ..sampling.features import Feature
from .device_bans import DeviceBans

_FIRST_ROOM = 512


class DeviceEdits:
    """State of S slots, written in stream order and never waited for.

    The fields are those of `edit_logits`, and in ``bans`` those of `mask_banned`. ``history``
    int32[S, V] is allocated with the first request that has penalties, the lists with the first
    that has a bias or a minimum length, and again when a request lists more than fit. ``layout``
    then changes, as it does with ``bans``: a graph that was captured for another one reads memory
    that is gone. A rank that does not decide keeps nothing but ``layout``, since all ranks capture
    a graph together.
    """

    def __init__(
        self, slots: int, vocab_size: int, device: torch.device, decides: bool = True
    ) -> None:
        def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.layout = 0
        self._decides = decides
        self._counts = False
        self._list_room = 0
        self.penalized = zeros(torch.bool, slots)
        self.penalties = zeros(torch.float32, slots, 4)
        self.history = zeros(torch.int32, 0, vocab_size)
        self.min_new_tokens = zeros(torch.int32, slots)
        self.list_bounds = zeros(torch.int32, slots, 3)
        self.list_ids = zeros(torch.int32, slots, 0)
        self.list_values = zeros(torch.float32, slots, 0)
        self.bans = DeviceBans(slots, vocab_size, device, decides, self._write)
        self._slots = slots
        self._device = device

    def enter(self, init: SlotInit, features: Feature) -> None:
        """Take over a request's edits; ``forget`` came before."""
        slot = init.slot
        if Feature.PENALTIES in features:
            self._count()
            if self._decides:
                self._penalize(init)
        if Feature.MIN_TOKENS in features and self._decides:
            self.min_new_tokens[slot] = init.params.min_new_tokens
        if features & (Feature.LOGIT_BIAS | Feature.MIN_TOKENS):
            ends = init.eos_ids if Feature.MIN_TOKENS in features else ()
            self._list(slot, init.params.logit_bias, ends)
        if Feature.BANS in features:
            self.layout += self.bans.enter(init)

    def forget(self, slot: int) -> None:
        """The slot's request is gone."""
        if not self._decides:
            return
        self.penalized[slot] = False
        self.min_new_tokens[slot] = 0
        self.list_bounds[slot] = 0
        self.bans.forget(slot)

    def _count(self) -> None:
        """Make room for the tokens of all slots, once."""
        if self._counts:
            return
        self._counts = True
        self.layout += 1
        if self._decides:
            self.history = self._make_history(self.history.shape[1])

    def _penalize(self, init: SlotInit) -> None:
        slot, params, vocab = init.slot, init.params, self.history.shape[1]
        counts = 2 * np.bincount(i32(init.output), minlength=vocab)
        counts[i32(init.prompt)] |= 1
        self._write(self.history[slot], counts.astype(np.int32))
        # As a CPU rounds them: 1 / repetition in float32.
        repetition = np.float32(params.repetition_penalty)
        self._write(
            self.penalties[slot],
            np.array(
                [
                    np.float32(1) / repetition,
                    repetition,
                    params.frequency_penalty,
                    params.presence_penalty,
                ],
                dtype=np.float32,
            ),
        )
        self.penalized[slot] = True

    def _make_history(self, vocab: int) -> torch.Tensor:
        try:
            return torch.zeros(self._slots, vocab, dtype=torch.int32, device=self._device)
        except torch.OutOfMemoryError as error:
            raise RuntimeError(
                f"the counts of penalties take {4 * self._slots * vocab} bytes, which are not "
                "free; lower --mem-fraction-static or --max-running-requests"
            ) from error

    def _list(self, slot: int, bias: dict[int, float], ends: tuple[int, ...]) -> None:
        """Biases first, end tokens last, those that are both in the middle."""
        last = sorted(set(ends), key=lambda token: token not in bias)
        ids = [token for token in bias if token not in last] + last
        if len(ids) > self._list_room:
            self._grow(len(ids))
        if not self._decides:
            return
        values = [bias.get(token, 0.0) for token in ids]
        self._write(self.list_ids[slot, : len(ids)], np.array(ids, dtype=np.int32))
        self._write(self.list_values[slot, : len(ids)], np.array(values, dtype=np.float32))
        bounds = np.array([len(ids) - len(last), len(bias), len(ids)], dtype=np.int32)
        self._write(self.list_bounds[slot], bounds)

    def _grow(self, needed: int) -> None:
        room = max(_FIRST_ROOM, 1 << (needed - 1).bit_length())
        if self._decides:
            more = (0, room - self._list_room)
            self.list_ids = torch.nn.functional.pad(self.list_ids, more)
            self.list_values = torch.nn.functional.pad(self.list_values, more)
        self._list_room = room
        self.layout += 1

    def _write(
        self, target: torch.Tensor, values: npt.NDArray[np.int32] | npt.NDArray[np.float32]
    ) -> None:
        """Copy without waiting for the steps in flight, which pageable memory would."""
        source = torch.from_numpy(values)
        if self._device.type == "cuda":
            source = source.pin_memory()
        target.copy_(source, non_blocking=True)
