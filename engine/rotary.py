"""Rotary frequencies and the cos/sin table that all layers share."""

import math

import torch

from ..engine_core.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """float32[head_dim / 2] radians per position (Llama 3.1's scaling for "llama3")."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    context = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    smooth = (context / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    slow = frequencies / rope.factor
    blended = (1 - smooth) * slow + smooth * frequencies
    scaled = torch.where(wavelengths > context / rope.low_freq_factor, slow, blended)
    return torch.where(wavelengths < context / rope.high_freq_factor, frequencies, scaled)


class RotaryTable:
    """cos and sin by position; grows by doubling, so that a long context costs nothing unused."""

    def __init__(
        self, rope: RopeConfig, head_dim: int, context_length: int, device: torch.device
    ) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim)
        self._context_length = context_length
        self._device = device
        self.cos = torch.empty(0)
        self.sin = torch.empty(0)
        self._grow(min(context_length, 2048))

    def reserve(self, positions: int) -> None:
        """Make ``cos`` and ``sin`` (float32[>= positions, head_dim / 2]) long enough."""
        if positions > self.cos.shape[0]:
            if positions > self._context_length:
                raise ValueError(
                    f"positions: {positions - 1} is outside the context of "
                    f"{self._context_length} tokens"
                )
            self._grow(min(self._context_length, max(positions, 2 * self.cos.shape[0])))

    def _grow(self, positions: int) -> None:
        angles = torch.outer(torch.arange(positions).float(), self._frequencies)
        self.cos = angles.cos().to(self._device)
        self.sin = angles.sin().to(self._device)
