"""What a layer of a dense decoder does behind its input norm, in plain torch."""

from collections.abc import Sequence
from dataclasses import fields
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F

from ...engine_core.model_config import ModelConfig
from ...kernels.paged_attention import paged_attention
from ...kernels.rms_norm import rms_norm
from ...kernels.rotary import apply_rotary
from ...kernels.silu_mul import silu_mul
from ..forward_batch import ForwardBatch, RowMask
from ..kv_pool import KVPool
from ..rotary import RotaryTable
from .decoder_weights import LayerBody
from .model import Reduce

BodyT = TypeVar("BodyT", bound=LayerBody)


class LayerPass(NamedTuple):
    """What all layers of one forward pass have in common.

    ``cos``, ``sin`` float32[T, head_dim / 2] of the batch's positions. ``reduce`` sums what o and
    down give over the ranks that share them. ``masks``: of each layer, else the batch's own rule
    and the windows of ``config`` hold.
    """

    config: ModelConfig
    batch: ForwardBatch
    kv: KVPool
    cos: torch.Tensor
    sin: torch.Tensor
    reduce: Reduce | None = None
    masks: Sequence[RowMask] | None = None

    def run(
        self, index: int, layer: LayerBody, stream: torch.Tensor, taken: torch.Tensor
    ) -> torch.Tensor:
        """The stream [T, H] behind layer ``index``, whose attention takes in ``taken`` [T, …]."""
        stream = stream + self._attention(index, layer, taken)
        normed = rms_norm(stream, layer.post_norm, self.config.rms_norm_eps)
        gated = silu_mul(F.linear(normed, layer.gate_up, layer.gate_up_bias))
        return stream + self._summed(F.linear(gated, layer.down, layer.down_bias))

    def _attention(self, index: int, layer: LayerBody, taken: torch.Tensor) -> torch.Tensor:
        config, batch, kv = self.config, self.batch, self.kv
        qkv = F.linear(taken, layer.qkv, layer.qkv_bias)
        query, key, value = (
            part.view(part.shape[0], -1, config.head_dim)
            for part in torch.split(qkv, [config.q_size, config.kv_size, config.kv_size], dim=-1)
        )
        if layer.q_norm is not None and layer.k_norm is not None:
            query = rms_norm(query, layer.q_norm, config.rms_norm_eps)
            key = rms_norm(key, layer.k_norm, config.rms_norm_eps)
        query, key = (apply_rotary(part, self.cos, self.sin) for part in (query, key))
        key_cache, value_cache = kv.layer(index)
        key_cache[batch.kv_slots] = key
        value_cache[batch.kv_slots] = value
        mask = batch.mask(config.sliding_windows[index])
        if self.masks is not None:
            mask = self.masks[index]
        context = paged_attention(
            query,
            key_cache,
            value_cache,
            mask.positions,
            batch.cu_q,
            batch.kv_lens,
            batch.page_table,
            mask.tree_bits,
            mask.is_tree,
            kv.page_size,
            config.head_dim**-0.5,
            mask.window,
        )
        return self._summed(F.linear(context.flatten(1), layer.o, layer.o_bias))

    def _summed(self, partial: torch.Tensor) -> torch.Tensor:
        return partial if self.reduce is None else self.reduce(partial)


def begin_pass(
    config: ModelConfig,
    batch: ForwardBatch,
    kv: KVPool,
    rotary: RotaryTable,
    reduce: Reduce | None = None,
    masks: Sequence[RowMask] | None = None,
) -> LayerPass:
    """The pass of ``batch``, with as much of the rotary table as it needs."""
    positions = batch.rotated
    rotary.reserve(int(positions.max()) + 1)
    cos, sin = rotary.cos[positions], rotary.sin[positions]
    return LayerPass(config, batch, kv, cos, sin, reduce, masks)


def layer_to(layer: BodyT, dtype: torch.dtype, device: torch.device) -> BodyT:
    """The layer itself, its tensors replaced by copies on a device."""
    for field in fields(layer):
        tensor = getattr(layer, field.name)
        if tensor is not None:
            setattr(layer, field.name, tensor.to(device, dtype))
    return layer
