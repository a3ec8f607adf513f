"""The dense decoder in plain torch: the reference, and the path for any device and dtype."""

import torch
import torch.nn.functional as F

from ...engine_core.model_config import ModelConfig
from ...kernels.rms_norm import rms_norm
from ..forward_batch import ForwardBatch
from ..kv_pool import KVPool
from ..rotary import RotaryTable
from ..weights import TensorSource
from .decoder_weights import HeadWeights, read_head, read_layer
from .model import Reduce
from .torch_layers import begin_pass, layer_to


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

    @property
    def output_head(self) -> torch.Tensor:
        """The output head [V, H]."""
        return self._head.lm_head

    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """Hidden states [T, H] after the final norm."""
        return self.forward_capture(batch, kv, ())[0]

    @torch.inference_mode()
    def forward_capture(
        self, batch: ForwardBatch, kv: KVPool, capture_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``forward`` plus the streams entering the captured layers, side by side [T, A * H]."""
        layers = begin_pass(self._config, batch, kv, self._rotary, self._reduce)
        stream = F.embedding(batch.input_ids, self._head.embed)
        captured = [stream[:, :0]]
        for index, layer in enumerate(self._layers):
            if index in capture_layers:
                captured.append(stream)
            normed = rms_norm(stream, layer.input_norm, self._config.rms_norm_eps)
            stream = layers.run(index, layer, stream, normed)
        if len(self._layers) in capture_layers:
            captured.append(stream)
        hidden = rms_norm(stream, self._head.final_norm, self._config.rms_norm_eps)
        return hidden, torch.cat(captured, dim=1)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[N, V] logits of hidden rows [N, H]."""
        return F.linear(hidden, self._head.lm_head).float()


def head_to(head: HeadWeights, dtype: torch.dtype, device: torch.device) -> HeadWeights:
    """The head on a device, tied where it was."""
    embed = head.embed.to(device, dtype)
    lm_head = embed if head.lm_head is head.embed else head.lm_head.to(device, dtype)
    return HeadWeights(embed, head.final_norm.to(device, dtype), lm_head)
