"""The dense decoder on Triton kernels: nothing in a forward pass waits for the device."""

from collections.abc import Iterable, Mapping

import torch

from ...engine_core.model_config import ModelConfig
from ...kernels.embedding_gpu import embed
from ...kernels.linear_gpu import LinearConfig
from ..forward_batch import ForwardBatch
from ..gemm_table import GemmKey
from ..gemm_timer import Layer
from ..kv_pool import KVPool
from ..weights import TensorSource
from .decoder_weights import LayerWeights, read_head, read_layer
from .gpu_layers import GpuLayers
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
        self._dtype = dtype
        self._decides = decides
        self._parts = GpuLayers(config, dtype, device, reduce)
        self._head = head_to(read_head(source, config), dtype, device)
        self._layers: list[LayerWeights] = []
        for index in range(config.num_hidden_layers):
            layer = layer_to(read_layer(source, config, index), dtype, device)
            self._parts.adopt(layer)
            self._layers.append(layer)
            if device.type == "cuda":
                # Else the next layer's tensors settle in the copies' blocks, which stay for good.
                torch.cuda.empty_cache()

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
        chain: list[Layer] = [self._parts.matmuls(layer) for layer in self._layers]
        if self._decides:
            chain.append([("none", self._head.lm_head)])
        self._parts.tune(chain, rows)

    def choose(self, choices: Mapping[GemmKey, LinearConfig]) -> None:
        """Replace the choices of ``tune``."""
        self._parts.linear.choose(choices)

    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """Hidden states [T, H] after the final norm."""
        return self.forward_capture(batch, kv, ())[0]

    @torch.inference_mode()
    def forward_capture(
        self, batch: ForwardBatch, kv: KVPool, capture_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``forward`` plus the streams entering the captured layers, side by side [T, A * H]."""
        parts, table = self._parts, self._head.embed
        width = table.shape[1]
        features = table.new_empty(len(batch.input_ids), len(capture_layers) * width)
        # A captured stream is made where it stays, and nothing is added to it in place.
        places = {
            layer: features[:, i * width : (i + 1) * width]
            for i, layer in enumerate(capture_layers)
        }
        stream = embed(batch.input_ids, table, out=places.get(0), pdl=parts.pdl)
        normed = parts.norm(stream, self._layers[0].input_norm)
        after = [layer.input_norm for layer in self._layers[1:]] + [self._head.final_norm]
        for index, layer in enumerate(self._layers):
            aside = torch.empty_like(normed) if index in places else None
            # Nested, so that no name keeps a long prefill's tensors alive into the next matmul.
            stream, normed = parts.add(
                parts.attention(index, layer, normed, batch, kv),
                layer.o,
                layer.o_bias,
                stream,
                layer.post_norm,
                aside,
            )
            stream, normed = parts.add(
                parts.gated(layer, normed),
                layer.down,
                layer.down_bias,
                stream,
                after[index],
                places.get(index + 1),
            )
        return normed, features

    @torch.inference_mode()
    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of hidden rows [N, H] in the computation dtype."""
        return self._parts.linear.linear(hidden, self._head.lm_head)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[N, V] logits of hidden rows [N, H]."""
        return self.raw_logits(hidden).float()
