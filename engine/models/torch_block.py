"""DFLASH's and DSPARK's networks in plain torch: the reference, for any device and dtype."""

import torch
import torch.nn.functional as F

from ...engine_core.draft_config import BlockConfig, DraftConfig
from ...kernels.confidence_logits import confidence_logits
from ...kernels.embedding import embed
from ...kernels.greedy_argmax import draft_argmax
from ...kernels.inject_kv import inject_kv
from ...kernels.rms_norm import rms_norm
from ..forward_batch import ForwardBatch
from ..kv_pool import KVPool
from ..rotary import RotaryTable
from .block_heads import draft_by_markov
from .block_masks import BlockMasks
from .block_net import Draw
from .block_weights import BlockWeights, ConfidenceWeights, MarkovWeights
from .model import TargetModel
from .torch_layers import begin_pass, layer_to


class TorchBlock:
    """A block draft; see `block_net.BlockNet`."""

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
        self._target = target
        self._dtype = dtype
        self._weights = block_weights_to(weights, dtype, device)
        self._masks = BlockMasks(config, self._block, device)
        model = config.model
        self._rotary = RotaryTable(model.rope, model.head_dim, model.context_length, device)
        self._kv_bias, self._k_norms = stacked_extras(self._weights, config)

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

    @torch.inference_mode()
    def inject(
        self, features: torch.Tensor, positions: torch.Tensor, kv_slots: torch.Tensor, kv: KVPool
    ) -> None:
        """Write keys and values of T tokens from the target's features [T, W]."""
        if not len(positions):
            return
        weights, model = self._weights, self._config.model
        eps = model.rms_norm_eps
        context = rms_norm(F.linear(features, weights.fc), weights.hidden_norm, eps)
        parts = [F.linear(context, layer.qkv[model.q_size :]) for layer in weights.layers]
        self._rotary.reserve(int(positions.max()) + 1)
        inject_kv(
            torch.cat(parts, dim=1), self._k_norms, eps, self._rotary.cos, self._rotary.sin,
            positions, kv_slots, kv.data, bias=self._kv_bias,
        )  # fmt: skip

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """Normed hidden states [T, H] of a batch of blocks."""
        model, weights = self._config.model, self._weights
        stream = embed(batch.input_ids, self._target.embedding).to(self._dtype)
        if self._block.embed_scale != 1.0:
            stream = stream * self._block.embed_scale
        layers = begin_pass(model, batch, kv, self._rotary, masks=self._masks.of(batch))
        for index, layer in enumerate(weights.layers):
            taken = rms_norm(stream, layer.input_norm, model.rms_norm_eps)
            stream = layers.run(index, layer, stream, taken)
        return rms_norm(stream, weights.final_norm, model.rms_norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[N, V] logits of rows [N, H]."""
        return self._target.logits(hidden)

    @torch.inference_mode()
    def choose(
        self,
        hidden: torch.Tensor,
        bonus: torch.Tensor,
        tokens: torch.Tensor,
        draw: Draw | None = None,
    ) -> None:
        """Draft R blocks: fill ``tokens`` int64[D, R] from ``hidden`` [D, R, H]."""
        weights = self._weights
        logits = self.logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)
        if weights.markov is not None:
            base = logits.to(self._dtype)
            draft_by_markov(weights.markov, hidden, base, bonus, tokens, draw)
        elif draw is None:
            draft_argmax(logits.flatten(0, 1), None, tokens=tokens.view(-1))
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
        return confidence_logits(head.weight, head.bias, before, hidden, bonus, tokens)


def block_of(config: DraftConfig) -> BlockConfig:
    """What a block draft's configuration says of its blocks. Raises ValueError for other drafts."""
    if config.block is None:
        raise ValueError(f"{config.algorithm} drafts no blocks")
    return config.block


def read_before(weights: BlockWeights, block: BlockConfig) -> torch.Tensor | None:
    """[V, r]: what the confidence head reads of the token before, None if nothing.

    Raises ValueError for a head that needs a Markov head's embeddings, without such a head.
    """
    if not block.confidence_with_markov:
        return None
    if weights.markov is None:
        raise ValueError("confidence_head_with_markov: there is no Markov head")
    return weights.markov.w1


def stacked_extras(
    weights: BlockWeights, config: DraftConfig
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Of all layers the bias of keys and values, one behind the other, and the key norms [N, D]."""
    biases = [layer.qkv_bias for layer in weights.layers if layer.qkv_bias is not None]
    norms = [layer.k_norm for layer in weights.layers if layer.k_norm is not None]
    bias = torch.cat([part[config.model.q_size :] for part in biases]) if biases else None
    return bias, torch.stack(norms) if norms else None


def block_weights_to(
    weights: BlockWeights, dtype: torch.dtype, device: torch.device
) -> BlockWeights:
    """The weights themselves, their tensors replaced by copies on a device."""

    def to(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(device, dtype)

    weights.fc = weights.fc.to(device, dtype)
    weights.hidden_norm = weights.hidden_norm.to(device, dtype)
    weights.final_norm = weights.final_norm.to(device, dtype)
    weights.layers = [layer_to(layer, dtype, device) for layer in weights.layers]
    markov, head = weights.markov, weights.confidence
    if markov is not None:
        weights.markov = MarkovWeights(
            markov.w1.to(device, dtype),
            markov.w2.to(device, dtype),
            *map(to, (markov.gate, markov.gate_bias, markov.joint, markov.joint_bias)),
        )
    if head is not None:
        weights.confidence = ConfidenceWeights(
            head.weight.to(device, torch.float32), head.bias.to(device, torch.float32)
        )
    return weights
