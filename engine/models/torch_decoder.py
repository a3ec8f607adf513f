"""The dense decoder in plain torch: the reference, and the path for any device and dtype."""

from dataclasses import fields

import torch
import torch.nn.functional as F

from ...engine_core.model_config import ModelConfig
from ...kernels.paged_attention import paged_attention
from ...kernels.rms_norm import rms_norm
from ...kernels.rotary import apply_rotary
from ...kernels.silu_mul import silu_mul
from ..forward_batch import ForwardBatch
from ..kv_pool import KVPool
from ..rotary import RotaryTable
from ..weights import TensorSource
from .decoder_weights import HeadWeights, LayerWeights, read_head, read_layer
from .model import Reduce


class TorchDecoder:
    """Llama, Mistral, Qwen2 and Qwen3 in ``dtype`` on ``device``.

    ``reduce`` sums what o and down give over the ranks that share them.
    """

    def __init__(
        self,
        source: TensorSource,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        reduce: Reduce | None = None,
    ) -> None:
        self._config = config
        self._reduce = reduce
        self._dtype = dtype
        self._head = head_to(read_head(source, config), dtype, device)
        self._layers = [
            layer_to(read_layer(source, config, i), dtype, device)
            for i in range(config.num_hidden_layers)
        ]
        self._rotary = RotaryTable(config.rope, config.head_dim, config.context_length, device)
        tensors = {self._head.embed, self._head.final_norm, self._head.lm_head}
        tensors.update(tensor for layer in self._layers for tensor in layer.tensors())
        self._weight_bytes = sum(tensor.nbytes for tensor in tensors)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""
        return self._weight_bytes

    @property
    def dtype(self) -> torch.dtype:
        """Computation dtype."""
        return self._dtype

    @property
    def embedding(self) -> torch.Tensor:
        """The embedding table [V, H]."""
        return self._head.embed

    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """Hidden states [T, H] after the final norm."""
        return self.forward_capture(batch, kv, ())[0]

    @torch.inference_mode()
    def forward_capture(
        self, batch: ForwardBatch, kv: KVPool, capture_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``forward`` plus the streams entering the captured layers, side by side [T, A * H]."""
        self._rotary.reserve(int(batch.positions.max()) + 1)
        cos, sin = self._rotary.cos[batch.positions], self._rotary.sin[batch.positions]
        stream = F.embedding(batch.input_ids, self._head.embed)
        captured = [stream[:, :0]]
        for index, layer in enumerate(self._layers):
            if index in capture_layers:
                captured.append(stream)
            stream = stream + self._attention(index, layer, stream, batch, kv, cos, sin)
            normed = rms_norm(stream, layer.post_norm, self._config.rms_norm_eps)
            gated = silu_mul(F.linear(normed, layer.gate_up, layer.gate_up_bias))
            stream = stream + self._summed(F.linear(gated, layer.down, layer.down_bias))
        if len(self._layers) in capture_layers:
            captured.append(stream)
        hidden = rms_norm(stream, self._head.final_norm, self._config.rms_norm_eps)
        return hidden, torch.cat(captured, dim=1)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[N, V] logits of hidden rows [N, H]."""
        return F.linear(hidden, self._head.lm_head).float()

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        stream: torch.Tensor,
        batch: ForwardBatch,
        kv: KVPool,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        config = self._config
        normed = rms_norm(stream, layer.input_norm, config.rms_norm_eps)
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias)
        query, key, value = (
            part.view(part.shape[0], -1, config.head_dim)
            for part in torch.split(qkv, [config.q_size, config.kv_size, config.kv_size], dim=-1)
        )
        if layer.q_norm is not None and layer.k_norm is not None:
            query = rms_norm(query, layer.q_norm, config.rms_norm_eps)
            key = rms_norm(key, layer.k_norm, config.rms_norm_eps)
        query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
        key_cache, value_cache = kv.layer(index)
        key_cache[batch.kv_slots] = key
        value_cache[batch.kv_slots] = value
        context = paged_attention(
            query,
            key_cache,
            value_cache,
            batch.positions,
            batch.cu_q,
            batch.kv_lens,
            batch.page_table,
            batch.tree_bits,
            batch.is_tree,
            kv.page_size,
            config.head_dim**-0.5,
            config.sliding_windows[index],
        )
        return self._summed(F.linear(context.flatten(1), layer.o, layer.o_bias))

    def _summed(self, partial: torch.Tensor) -> torch.Tensor:
        return partial if self._reduce is None else self._reduce(partial)


def head_to(head: HeadWeights, dtype: torch.dtype, device: torch.device) -> HeadWeights:
    """The head on a device, tied where it was."""
    embed = head.embed.to(device, dtype)
    lm_head = embed if head.lm_head is head.embed else head.lm_head.to(device, dtype)
    return HeadWeights(embed, head.final_norm.to(device, dtype), lm_head)


def layer_to(layer: LayerWeights, dtype: torch.dtype, device: torch.device) -> LayerWeights:
    """The layer itself, its tensors replaced by copies on a device."""
    for field in fields(layer):
        tensor = getattr(layer, field.name)
        if tensor is not None:
            setattr(layer, field.name, tensor.to(device, dtype))
    return layer
