"""The dense decoder on Triton kernels: nothing in a forward pass waits for the device."""

import math
from collections.abc import Iterable, Mapping

import torch

from ...engine_core.model_config import ModelConfig
from ...kernels.add_rms_norm_gpu import add_rms_norm
from ...kernels.embedding_gpu import embed
from ...kernels.linear import interleave_gate_up
from ...kernels.linear_gpu import INTERLEAVE, LinearConfig
from ...kernels.paged_attention_gpu import paged_attention
from ...kernels.qk_rope_write_gpu import qk_norm_rope_write
from ...kernels.rms_norm_gpu import rms_norm
from ..dependent_launch import launches_dependents
from ..forward_batch import ForwardBatch, RowGroup
from ..gemm_table import Epilogue, GemmKey
from ..gemm_timer import Layer
from ..kv_pool import KVPool
from ..rotary import RotaryTable
from ..weights import TensorSource
from .decoder_weights import LayerWeights, read_head, read_layer
from .gpu_linear import GpuLinear
from .model import Reduce
from .torch_decoder import head_to
from .torch_layers import layer_to


class GpuDecoder:
    """Llama, Mistral, Qwen2 and Qwen3 in ``dtype`` on a GPU (or in Triton's interpreter).

    A forward pass can be captured in a CUDA graph: launches depend on shapes and on the batch's
    ``groups`` alone. On Hopper and later a kernel is launched while the one before it ends: each
    waits before it touches what others write. Float32 matmuls keep to IEEE arithmetic (no TF32).
    ``reduce`` sums what o and down give over the ranks that share them, of which one ``decides``:
    the others compute no logits.
    """

    def __init__(
        self,
        source: TensorSource,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        reduce: Reduce | None = None,
        decides: bool = True,
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._reduce = reduce
        self._decides = decides
        self._pdl = launches_dependents(device)
        self._linear = GpuLinear(device, dtype)
        self._block = math.gcd(config.intermediate_size, INTERLEAVE)
        self._head = head_to(read_head(source, config), dtype, device)
        self._layers: list[LayerWeights] = []
        for index in range(config.num_hidden_layers):
            layer = layer_to(read_layer(source, config, index), dtype, device)
            self._layers.append(self._interleaved(layer))
            if device.type == "cuda":
                # Else the next layer's tensors settle in the copies' blocks, which stay for good.
                torch.cuda.empty_cache()
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

    @property
    def embedding(self) -> torch.Tensor:
        """The embedding table [V, H]."""
        return self._head.embed

    @property
    def output_head(self) -> torch.Tensor:
        """The output head [V, H]."""
        return self._head.lm_head

    def tune(self, rows: Iterable[int]) -> None:
        """Choose the matmuls of these numbers of tokens; before graphs are captured."""
        # Of several ranks' sums the residual is no part.
        mixing: Epilogue = "residual" if self._reduce is None else "none"
        chain: list[Layer] = [
            [
                ("none", layer.qkv),
                (mixing, layer.o),
                ("silu_mul", layer.gate_up),
                (mixing, layer.down),
            ]
            for layer in self._layers
        ]
        if self._decides:
            chain.append([("none", self._head.lm_head)])
        with torch.inference_mode():
            self._linear.tune(chain, self._block, rows)

    def choose(self, choices: Mapping[GemmKey, LinearConfig]) -> None:
        """Replace the choices of ``tune``."""
        self._linear.choose(choices)

    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """Hidden states [T, H] after the final norm."""
        return self.forward_capture(batch, kv, ())[0]

    @torch.inference_mode()
    def forward_capture(
        self, batch: ForwardBatch, kv: KVPool, capture_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """``forward`` plus the residual stream [T, H] entering each captured layer."""
        stream = embed(batch.input_ids, self._head.embed, pdl=self._pdl)
        captured: list[torch.Tensor] = []
        eps = self._config.rms_norm_eps
        normed = rms_norm(stream, self._layers[0].input_norm, eps, pdl=self._pdl)
        after = [layer.input_norm for layer in self._layers[1:]] + [self._head.final_norm]
        for index, layer in enumerate(self._layers):
            if index in capture_layers:
                captured.append(stream.clone())
            # Nested, so that no name keeps a long prefill's tensors alive into the next matmul.
            stream, normed = self._add(
                self._attention(index, layer, normed, batch, kv),
                layer.o,
                layer.o_bias,
                stream,
                layer.post_norm,
            )
            stream, normed = self._add(
                self._linear.linear_silu_mul(
                    normed, layer.gate_up, bias=layer.gate_up_bias, block=self._block
                ),
                layer.down,
                layer.down_bias,
                stream,
                after[index],
            )
        if len(self._layers) in capture_layers:
            captured.append(stream.clone())
        return normed, captured

    @torch.inference_mode()
    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of hidden rows [N, H] in the computation dtype."""
        return self._linear.linear(hidden, self._head.lm_head)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[N, V] logits of hidden rows [N, H]."""
        return self.raw_logits(hidden).float()

    def _interleaved(self, layer: LayerWeights) -> LayerWeights:
        """The layer itself; a gate and its up then fall into one tile of a matmul."""
        layer.gate_up = interleave_gate_up(layer.gate_up, self._block)
        if layer.gate_up_bias is not None:
            layer.gate_up_bias = interleave_gate_up(layer.gate_up_bias, self._block)
        return layer

    def _add(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stream: torch.Tensor,
        norm: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream [T, H] with x @ weight^T + bias added (maybe in place), and its norm."""
        eps = self._config.rms_norm_eps
        if self._reduce is not None:
            mixed = self._reduce(self._linear.linear(x, weight, bias=bias))
            # The kernel ahead is the collective's, which is not one of ours.
            return stream, add_rms_norm(mixed, stream, norm, eps, pdl=False)
        if self._linear.fuses_residual(len(x), weight):
            stream = self._linear.linear(x, weight, bias=bias, residual=stream)
            return stream, rms_norm(stream, norm, eps, pdl=self._pdl)
        mixed = self._linear.linear(x, weight, bias=bias)
        return stream, add_rms_norm(mixed, stream, norm, eps, pdl=self._pdl)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        normed: torch.Tensor,
        batch: ForwardBatch,
        kv: KVPool,
    ) -> torch.Tensor:
        """What each token's heads saw [T, heads * D]; writes the step's keys and values."""
        config = self._config
        key_cache, value_cache = kv.layer(index)
        query = qk_norm_rope_write(
            self._linear.linear(normed, layer.qkv),
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
            pdl=self._pdl,
        )
        context = torch.empty_like(query)
        groups = batch.groups or (RowGroup(0, len(batch.kv_lens), len(query)),)
        for group in groups:
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
                clear=group is groups[-1],  # the padding behind all rows
                pdl=self._pdl,
            )
        return context.flatten(1)
