"""The layers of a block draft in training: a Qwen3 whose context is the target's own features.

block_drafts.md 1.2: a token's features, joined by ``fc`` and normed, are every layer's context
without further norm; the blocks' rows pass through norms, attention and MLP.
"""

import torch
import torch.nn.functional as F

from ...engine_core.model_config import ModelConfig
from ...kernels.rms_norm import rms_norm
from ...kernels.silu_mul import silu_mul
from ..rotary import RotaryTable
from .block_attention import DENSE, attention_for, block_visible
from .block_layout import block_ids, block_positions
from .compiled import compiled
from .dense import DenseTarget, rotate
from .draft_layer import learnt_matrix, learnt_norm, learnt_qwen3_layer

Named = dict[str, torch.Tensor]


class BlockBackbone:
    """Blocks of ``rows`` rows of a draft ``model`` under a ``target``."""

    def __init__(
        self, model: ModelConfig, target: DenseTarget, rows: int, mask_id: int, compile_: bool
    ) -> None:
        self._model = model
        self._target = target
        self._rows = rows
        self._mask_id = mask_id
        self._compile = compile_
        self._attention = attention_for(target.device, model.head_dim)
        self._rotary = RotaryTable(model.rope, model.head_dim, model.context_length, target.device)

    def initial(self, features: int, generator: torch.Generator) -> Named:
        """Parameters of layers that add nothing at first, over ``features`` numbers a token."""
        model, device = self._model, self._target.device
        hidden = model.hidden_size
        made = {
            "fc.weight": learnt_matrix((hidden, features), generator, device),
            "hidden_norm.weight": learnt_norm(hidden, device),
            "norm.weight": self._target.final_norm.detach().float().clone().requires_grad_(),
        }
        for index in range(model.num_hidden_layers):
            made |= learnt_qwen3_layer(f"layers.{index}", model, generator, device)
        return made

    def forward(
        self,
        ids: torch.Tensor,
        features: torch.Tensor,
        anchors: torch.Tensor,
        weights: Named,
        learning: bool,
    ) -> torch.Tensor:
        """Normed hidden states [B, A, rows, H] of blocks at ``anchors`` [B, A] of the text ``ids``
        [B, T], whose features are [B, T, W]. ``weights``: parameters in the computation's type.
        """
        model, eps = self._model, self._model.rms_norm_eps
        tokens, rows = ids.shape[1], self._rows
        # Compiled again without gradients, measuring would take longer than it does uncompiled.
        fast = self._compile and learning
        enter, leave = (compiled(_enter), compiled(_leave)) if fast else (_enter, _leave)
        attention = self._attention if learning else DENSE
        positions = block_positions(anchors, rows)
        self._rotary.reserve(tokens)
        cos, sin = self._rotary.cos, self._rotary.sin
        text = cos[:tokens], sin[:tokens]
        block = cos[positions][:, None], sin[positions][:, None]
        masks = {
            window: attention.mask(
                block_visible(anchors, tokens, rows, window), positions, tokens + positions.shape[1]
            )
            for window in sorted(set(model.sliding_windows))
        }
        context = F.linear(features, weights["fc.weight"])
        context = rms_norm(context, weights["hidden_norm.weight"], eps)
        stream = F.embedding(block_ids(ids, anchors, rows, self._mask_id), self._target.embedding)
        for index in range(model.num_hidden_layers):
            layer = _layer_weights(weights, index)
            query, key, value = enter(
                stream, context, block, text, layer, model.num_key_value_heads, eps
            )
            attended = attention.attend(query, key, value, masks[model.sliding_windows[index]])
            stream = leave(stream, attended, layer, eps)
        hidden = rms_norm(stream, weights["norm.weight"], eps)
        return hidden.view(*anchors.shape, rows, model.hidden_size)


Pair = tuple[torch.Tensor, torch.Tensor]


def _enter(
    stream: torch.Tensor,
    context: torch.Tensor,
    block: Pair,
    text: Pair,
    weights: Named,
    kv_heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [B, heads, Q, D] of the blocks; keys and values [B, KV heads, T + Q, D] of the text
    and the blocks. ``block``, ``text``: their rotary rows.
    """
    size = weights["q_norm"].shape[0]
    normed = rms_norm(stream, weights["input_layernorm"], eps)
    query = _heads(F.linear(normed, weights["q_proj"]), size)
    query = rotate(rms_norm(query, weights["q_norm"], eps), *block)
    keys, values = [], []
    packed = torch.cat((weights["k_proj"], weights["v_proj"]))
    for entering, angles in ((context, text), (normed, block)):
        both = _heads(F.linear(entering, packed), size)
        key, value = both[:, :kv_heads], both[:, kv_heads:]
        keys.append(rotate(rms_norm(key, weights["k_norm"], eps), *angles))
        values.append(value)
    return query, torch.cat(keys, dim=2), torch.cat(values, dim=2)


def _leave(
    stream: torch.Tensor, attended: torch.Tensor, weights: Named, eps: float
) -> torch.Tensor:
    """What follows attention, whose answer is [B, heads, Q, D]."""
    stream = stream + F.linear(attended.transpose(1, 2).flatten(2), weights["o_proj"])
    normed = rms_norm(stream, weights["post_attention_layernorm"], eps)
    packed = torch.cat((weights["gate_proj"], weights["up_proj"]))
    return stream + F.linear(silu_mul(F.linear(normed, packed)), weights["down_proj"])


def _heads(packed: torch.Tensor, size: int) -> torch.Tensor:
    """[B, heads, T, size] of [B, T, heads * size]."""
    return packed.view(*packed.shape[:-1], -1, size).transpose(1, 2)


def _layer_weights(weights: Named, index: int) -> Named:
    """A layer's, by the last part of their names."""
    prefix = f"layers.{index}."
    return {
        name.split(".")[-2]: tensor for name, tensor in weights.items() if name.startswith(prefix)
    }
