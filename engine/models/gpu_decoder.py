"""The dense decoder on Triton kernels: nothing in a forward pass waits for the device."""

import torch
import torch.nn.functional as F

from ...engine_core.model_config import ModelConfig
from ...kernels.add_rms_norm_gpu import add_rms_norm
from ...kernels.embedding_gpu import embed
from ...kernels.paged_attention_gpu import paged_attention
from ...kernels.qk_rope_write_gpu import qk_norm_rope_write
from ...kernels.rms_norm_gpu import rms_norm
from ...kernels.silu_mul_gpu import silu_mul
from ..forward_batch import ForwardBatch, RowGroup
from ..kv_pool import KVPool
from ..rotary import RotaryTable
from ..weights import TensorSource
from .decoder_weights import LayerWeights, read_head, read_layer
from .torch_decoder import head_to, layer_to


class GpuDecoder:
    """Llama, Mistral, Qwen2 and Qwen3 in ``dtype`` on a GPU (or in Triton's interpreter).

    A forward pass can be captured in a CUDA graph: launches depend on shapes and on the batch's
    ``groups`` alone. Float32 matmuls keep to IEEE arithmetic (no TF32).
    """

    def __init__(
        self,
        source: TensorSource,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._head = head_to(read_head(source, config), dtype, device)
        self._layers = [
            layer_to(read_layer(source, config, i), dtype, device)
            for i in range(config.num_hidden_layers)
        ]
        self._rotary = RotaryTable(config.rope, config.head_dim, config.context_length, device)
        # A table that grew would move away from under captured graphs.
        self._rotary.reserve(config.context_length)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""
        tensors = {self._head.embed, self._head.final_norm, self._head.lm_head}
        tensors.update(tensor for layer in self._layers for tensor in layer.tensors())
        return sum(tensor.nbytes for tensor in tensors)

    @property
    def dtype(self) -> torch.dtype:
        """Computation dtype."""
        return self._dtype

    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """Hidden states [T, H] after the final norm."""
        return self.forward_capture(batch, kv, ())[0]

    @torch.inference_mode()
    def forward_capture(
        self, batch: ForwardBatch, kv: KVPool, capture_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """``forward`` plus the residual stream [T, H] entering each captured layer."""
        eps = self._config.rms_norm_eps
        stream = embed(batch.input_ids, self._head.embed)
        captured: list[torch.Tensor] = []
        normed = rms_norm(stream, self._layers[0].input_norm, eps)
        after = [layer.input_norm for layer in self._layers[1:]] + [self._head.final_norm]
        for index, layer in enumerate(self._layers):
            if index in capture_layers:
                captured.append(stream.clone())
            mixed = self._attention(index, layer, normed, batch, kv)
            normed = add_rms_norm(mixed, stream, layer.post_norm, eps)
            gated = silu_mul(F.linear(normed, layer.gate_up, layer.gate_up_bias))
            mixed = F.linear(gated, layer.down, layer.down_bias)
            normed = add_rms_norm(mixed, stream, after[index], eps)
        if len(self._layers) in capture_layers:
            captured.append(stream.clone())
        return normed, captured

    @torch.inference_mode()
    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of hidden rows [N, H] in the computation dtype."""
        return F.linear(hidden, self._head.lm_head)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[N, V] logits of hidden rows [N, H]."""
        return self.raw_logits(hidden).float()

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        normed: torch.Tensor,
        batch: ForwardBatch,
        kv: KVPool,
    ) -> torch.Tensor:
        config = self._config
        key_cache, value_cache = kv.layer(index)
        query = qk_norm_rope_write(
            F.linear(normed, layer.qkv),
            layer.q_norm,
            layer.k_norm,
            config.rms_norm_eps,
            self._rotary.cos,
            self._rotary.sin,
            batch.positions,
            batch.kv_slots,
            key_cache,
            value_cache,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=layer.qkv_bias,
        )
        context = torch.empty_like(query)
        # In rising order: a call clears the tokens behind its rows.
        for group in batch.groups or (RowGroup(0, len(batch.kv_lens), len(query)),):
            paged_attention(
                query,
                key_cache,
                value_cache,
                batch.positions,
                batch.cu_q[group.begin : group.end + 1],
                batch.kv_lens[group.begin : group.end],
                batch.page_table,
                batch.tree_bits,
                batch.is_tree[group.begin : group.end],
                kv.page_size,
                config.head_dim**-0.5,
                config.sliding_windows[index],
                slots=None if batch.slots is None else batch.slots[group.begin : group.end],
                max_q=group.max_q,
                max_kv=batch.page_table.shape[1] * kv.page_size,
                out=context,
            )
        return F.linear(context.flatten(1), layer.o, layer.o_bias)
