"""EAGLE's and EAGLE3's networks in plain torch: the reference, for any device and dtype."""

import torch
import torch.nn.functional as F

from ...engine_core.draft_config import DraftConfig
from ...kernels.rms_norm import rms_norm
from ..forward_batch import ForwardBatch
from ..kv_pool import KVPool
from ..rotary import RotaryTable
from .draft_net import DraftHidden
from .draft_weights import DraftLayer, DraftWeights
from .model import TargetModel
from .torch_layers import begin_pass, layer_to


class TorchDraft:
    """A draft that takes a hidden state and a token at each position.

    EAGLE joins both by ``fc``; what its layers give is recurrent and what the head reads. EAGLE3
    reduces the target's features by ``fc`` once, and its first attention takes in both.
    """

    def __init__(
        self,
        weights: DraftWeights,
        config: DraftConfig,
        target: TargetModel,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._config = config
        self._target = target
        self._dtype = dtype
        self._weights = weights_to(weights, dtype, device)
        if config.hot_tokens and weights.token_ids is not None:
            weights.head = target.output_head[weights.token_ids].to(device, dtype)
        self._embed = target.embedding if weights.embed is None else weights.embed
        model = config.model
        self._rotary = RotaryTable(model.rope, model.head_dim, model.context_length, device)

    @property
    def config(self) -> DraftConfig:
        """What it is."""
        return self._config

    @property
    def weight_bytes(self) -> int:
        """Bytes of its own weights in memory."""
        return sum(tensor.nbytes for tensor in self._weights.tensors())

    @property
    def dtype(self) -> torch.dtype:
        """Computation dtype."""
        return self._dtype

    @property
    def token_ids(self) -> torch.Tensor | None:
        """int64[Vd]: the target's id of each draft id."""
        return self._weights.token_ids

    @torch.inference_mode()
    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, H] of the target's features [T, W]; EAGLE takes them as they are."""
        weights, eps = self._weights, self._config.model.rms_norm_eps
        if self._config.algorithm == "EAGLE" or weights.fc is None:
            return features
        if weights.fc_input_norm is not None:
            features = rms_norm(features, weights.fc_input_norm, eps)
        if weights.chunk_norms:
            chunks = features.chunk(len(weights.chunk_norms), dim=-1)
            normed = [
                rms_norm(chunk, norm, eps)
                for chunk, norm in zip(chunks, weights.chunk_norms, strict=True)
            ]
            features = torch.cat(normed, dim=-1)
        return F.linear(features, weights.fc, weights.fc_bias)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, hidden: torch.Tensor | None, kv: KVPool) -> DraftHidden:
        """One pass of ``batch`` with ``hidden`` [T, H]."""
        if hidden is None:
            raise ValueError("hidden: this draft needs the target's features or its own states")
        model, weights = self._config.model, self._weights
        embedded = F.embedding(batch.input_ids, self._embed).to(self._dtype)
        stream = hidden
        if self._config.algorithm == "EAGLE" and weights.fc is not None:
            stream = F.linear(torch.cat((embedded, hidden), -1), weights.fc, weights.fc_bias)
        layers = begin_pass(model, batch, kv, self._rotary)
        for index, layer in enumerate(weights.layers):
            taken = self._taken(layer, stream, embedded)
            if index == 0 and self._config.norm_before_residual and layer.norm is not None:
                stream = rms_norm(stream, layer.norm, model.rms_norm_eps)
            stream = layers.run(index, layer.body, stream, taken)
        if weights.final_norm is None:
            return DraftHidden(stream, stream)
        normed = rms_norm(stream, weights.final_norm, model.rms_norm_eps)
        return DraftHidden(normed if self._config.norm_output else stream, normed)

    @torch.inference_mode()
    def logits(self, head_input: torch.Tensor) -> torch.Tensor:
        """float32[N, Vd] logits of rows [N, H]."""
        if self._weights.head is None:
            return self._target.logits(head_input)
        return F.linear(head_input, self._weights.head).float()

    def _taken(
        self, layer: DraftLayer, stream: torch.Tensor, embedded: torch.Tensor
    ) -> torch.Tensor:
        """What the layer's attention takes in."""
        eps = self._config.model.rms_norm_eps
        normed = stream if layer.norm is None else rms_norm(stream, layer.norm, eps)
        if layer.embed_norm is None:
            return normed
        return torch.cat((rms_norm(embedded, layer.embed_norm, eps), normed), dim=-1)


def weights_to(weights: DraftWeights, dtype: torch.dtype, device: torch.device) -> DraftWeights:
    """The weights themselves, their tensors replaced by copies on a device."""

    def to(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(device, dtype)

    weights.embed, weights.head = to(weights.embed), to(weights.head)
    weights.fc, weights.fc_bias = to(weights.fc), to(weights.fc_bias)
    weights.fc_input_norm, weights.final_norm = to(weights.fc_input_norm), to(weights.final_norm)
    weights.chunk_norms = [norm.to(device, dtype) for norm in weights.chunk_norms]
    if weights.token_ids is not None:
        weights.token_ids = weights.token_ids.to(device)
    for layer in weights.layers:
        layer.body = layer_to(layer.body, dtype, device)
        layer.norm, layer.embed_norm = to(layer.norm), to(layer.embed_norm)
    return weights
