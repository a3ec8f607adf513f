"""DFLASH's and DSPARK's networks on Triton kernels: nothing in a pass waits for the device."""

from collections.abc import Iterable, Mapping

import torch

from ...engine_core.draft_config import DraftConfig
from ...kernels.confidence_logits_gpu import confidence_logits
from ...kernels.embedding_gpu import embed
from ...kernels.greedy_argmax_gpu import draft_argmax
from ...kernels.inject_kv_gpu import inject_kv
from ...kernels.linear_gpu import LinearConfig
from ..forward_batch import ForwardBatch
from ..gemm_table import GemmKey
from ..gemm_timer import Layer
from ..kv_pool import KVPool
from .block_masks import BlockMasks
from .block_net import Draw
from .block_weights import BlockWeights
from .gpu_layers import GpuLayers
from .gpu_markov import GpuMarkov
from .model import TargetModel
from .torch_block import block_of, block_weights_to, read_before, stacked_extras


class GpuBlock:
    """As `torch_block.TorchBlock`, in passes that can be captured in a CUDA graph.

    As in `gpu_decoder.GpuDecoder`, launches depend on shapes and on the batch's ``groups`` alone.
    The target's tables are used where they lie, so both compute in one ``dtype``. Injection has a
    copy of all layers' key and value rows, so that one matmul serves them.
    """

    def __init__(
        self,
        weights: BlockWeights,
        config: DraftConfig,
        target: TargetModel,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Raises ValueError for a block that cannot be masked."""
        self._config = config
        self._block = block_of(config)
        self._dtype = dtype
        self._parts = GpuLayers(config.model, dtype, device)
        self._weights = block_weights_to(weights, dtype, device)
        self._masks = BlockMasks(config, self._block, device)
        self._embed, self._head = target.embedding, target.output_head
        layers = self._weights.layers
        self._kv = torch.cat([layer.qkv[config.model.q_size :] for layer in layers])
        self._kv_bias, self._k_norms = stacked_extras(self._weights, config)
        for layer in layers:
            self._parts.adopt(layer)
        self._markov: GpuMarkov | None = None
        if self._weights.markov is not None:
            hidden = config.model.hidden_size
            self._markov = GpuMarkov(self._weights.markov, hidden, self._parts)

    @property
    def config(self) -> DraftConfig:
        """What it is."""
        return self._config

    @property
    def weight_bytes(self) -> int:
        """Bytes of its own weights in memory."""
        kept = 0 if self._markov is None else self._markov.weight_bytes
        return kept + sum(tensor.nbytes for tensor in (*self._weights.tensors(), self._kv))

    @property
    def dtype(self) -> torch.dtype:
        """Computation dtype."""
        return self._dtype

    def tune(self, rows: Iterable[int]) -> None:
        """Choose the matmuls of passes of these numbers of tokens; before graphs are captured."""
        chain: list[Layer] = [self._parts.matmuls(layer) for layer in self._weights.layers]
        chain += [[("none", one)] for one in (self._weights.fc, self._kv, self._head)]
        if self._markov is not None:
            chain.append(self._markov.matmuls())
        self._parts.tune(chain, rows)

    def choose_matmuls(self, choices: Mapping[GemmKey, LinearConfig]) -> None:
        """Replace the choices of ``tune``."""
        self._parts.linear.choose(choices)

    @torch.inference_mode()
    def inject(
        self, features: torch.Tensor, positions: torch.Tensor, kv_slots: torch.Tensor, kv: KVPool
    ) -> None:
        """Write keys and values of T tokens from the target's features [T, W]."""
        parts, weights = self._parts, self._weights
        context = parts.norm(parts.linear.linear(features, weights.fc), weights.hidden_norm)
        inject_kv(
            parts.linear.linear(context, self._kv),
            self._k_norms,
            self._config.model.rms_norm_eps,
            parts.rotary.cos,
            parts.rotary.sin,
            positions,
            kv_slots,
            kv.data,
            bias=self._kv_bias,
            pdl=parts.pdl,
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """Normed hidden states [T, H] of a batch of blocks."""
        parts, layers = self._parts, self._weights.layers
        masks = self._masks.of(batch)
        stream = embed(batch.input_ids, self._embed, pdl=parts.pdl)
        if self._block.embed_scale != 1.0:
            stream.mul_(self._block.embed_scale)
        normed = parts.norm(stream, layers[0].input_norm)
        after = [layer.input_norm for layer in layers[1:]] + [self._weights.final_norm]
        for index, layer in enumerate(layers):
            context = parts.attention(index, layer, normed, batch, kv, masks[index])
            stream, normed = parts.add(context, layer.o, layer.o_bias, stream, layer.post_norm)
            stream, normed = parts.add(
                parts.gated(layer, normed), layer.down, layer.down_bias, stream, after[index]
            )
        return normed

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of rows [N, H], in the computation dtype."""
        return self._parts.linear.linear(hidden, self._head)

    @torch.inference_mode()
    def choose(
        self,
        hidden: torch.Tensor,
        bonus: torch.Tensor,
        tokens: torch.Tensor,
        draw: Draw | None = None,
    ) -> None:
        """Draft R blocks: fill ``tokens`` int64[D, R] from ``hidden`` [D, R, H]."""
        logits = self.logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)
        if self._markov is not None:
            self._markov.draft(hidden, logits, bonus, tokens, draw)
        elif draw is None:
            flat = logits.flatten(0, 1)
            draft_argmax(flat, None, tokens=tokens.view(-1), pdl=self._parts.pdl)
        else:
            for level, chosen in enumerate(tokens):
                draw(level, logits[level], chosen)

    @torch.inference_mode()
    def confidence(
        self, hidden: torch.Tensor, bonus: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor | None:
        """float32[R, D]: the confidence head's raw logits of drafts [D, R]; None without one."""
        head = self._weights.confidence
        if head is None:
            return None
        before = read_before(self._weights, self._block)
        return confidence_logits(
            head.weight, head.bias, before, hidden, bonus, tokens, pdl=self._parts.pdl
        )
