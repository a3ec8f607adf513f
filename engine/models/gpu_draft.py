"""EAGLE's and EAGLE3's networks on Triton kernels: nothing in a pass waits for the device."""

from collections.abc import Iterable, Mapping

import torch

from ...engine_core.draft_config import DraftConfig
from ...kernels.draft_input_gpu import draft_input
from ...kernels.linear_gpu import LinearConfig
from ..forward_batch import ForwardBatch
from ..gemm_table import GemmKey
from ..gemm_timer import Layer
from ..kv_pool import KVPool
from .draft_net import DraftHidden
from .draft_weights import DraftWeights
from .gpu_layers import GpuLayers
from .model import TargetModel
from .torch_draft import weights_to


class GpuDraft:
    """As `torch_draft.TorchDraft`, in passes that can be captured in a CUDA graph.

    As in `gpu_decoder.GpuDecoder`, launches depend on shapes and on the batch's ``groups`` alone.
    The target's tables are used where they lie, so both compute in one ``dtype``.
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
        self._dtype = dtype
        self._parts = GpuLayers(config.model, dtype, device)
        self._weights = weights_to(weights, dtype, device)
        if config.hot_tokens and weights.token_ids is not None:
            weights.head = target.output_head[weights.token_ids].to(device, dtype)
        self._embed = target.embedding if weights.embed is None else weights.embed
        self._head = target.output_head if weights.head is None else weights.head
        for layer in weights.layers:
            self._parts.adopt(layer.body)
        self._chunk_norms = torch.stack(weights.chunk_norms) if weights.chunk_norms else None

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

    def tune(self, rows: Iterable[int]) -> None:
        """Choose the matmuls of passes of these numbers of tokens; before graphs are captured."""
        chain: list[Layer] = [self._parts.matmuls(layer.body) for layer in self._weights.layers]
        chain += [[("none", one)] for one in (self._weights.fc, self._head) if one is not None]
        self._parts.tune(chain, rows)

    def choose(self, choices: Mapping[GemmKey, LinearConfig]) -> None:
        """Replace the choices of ``tune``."""
        self._parts.linear.choose(choices)

    @torch.inference_mode()
    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, H] of the target's features [T, W]; EAGLE takes them as they are."""
        parts, weights = self._parts, self._weights
        if self._config.algorithm == "EAGLE" or weights.fc is None:
            return features
        if weights.fc_input_norm is not None:
            features = parts.norm(features, weights.fc_input_norm)
        if self._chunk_norms is not None:
            chunks = features.reshape(len(features), *self._chunk_norms.shape)
            features = parts.norm(chunks, self._chunk_norms).flatten(1)
        return parts.linear.linear(features, weights.fc, bias=weights.fc_bias)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, hidden: torch.Tensor | None, kv: KVPool) -> DraftHidden:
        """One pass of ``batch`` with ``hidden`` [T, H], which it leaves alone."""
        if hidden is None:
            raise ValueError("hidden: this draft needs the target's features or its own states")
        parts, weights = self._parts, self._weights
        stream, taken = self._enter(batch.input_ids, hidden)
        after = [layer.norm for layer in weights.layers[1:]] + [weights.final_norm]
        for index, layer in enumerate(weights.layers):
            body = layer.body
            stream, normed = parts.add(
                parts.attention(index, body, taken, batch, kv),
                body.o,
                body.o_bias,
                stream,
                body.post_norm,
                torch.empty_like(hidden) if index == 0 else None,
            )
            stream, taken = parts.add(
                parts.gated(body, normed), body.down, body.down_bias, stream, after[index]
            )
        return DraftHidden(taken if self._config.norm_output else stream, taken)

    @torch.inference_mode()
    def logits(self, head_input: torch.Tensor) -> torch.Tensor:
        """Logits [N, Vd] of rows [N, H], in the computation dtype."""
        return self._parts.linear.linear(head_input, self._head)

    def _enter(self, ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream [T, H] that enters the first layer, and what its attention takes in."""
        parts, weights = self._parts, self._weights
        eps, first = self._config.model.rms_norm_eps, weights.layers[0]
        if self._config.algorithm == "EAGLE":
            assert weights.fc is not None, "EAGLE's drafts have one"
            pair = draft_input(ids, self._embed, hidden, None, None, eps, pdl=parts.pdl)
            stream = parts.linear.linear(pair, weights.fc, bias=weights.fc_bias)
            return stream, stream if first.norm is None else parts.norm(stream, first.norm)
        pair = draft_input(
            ids, self._embed, hidden, first.embed_norm, first.norm, eps, pdl=parts.pdl
        )
        normed = pair[:, self._embed.shape[1] :]
        return normed if self._config.norm_before_residual else hidden, pair
