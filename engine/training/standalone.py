"""STANDALONE in training: a small causal model learns the target's distributions."""

import msgspec
import torch
import torch.nn.functional as F

from ...engine_core.model_config import ModelConfig
from ...engine_core.refusal import Refused, RefusedError
from ...engine_core.train_spec import TrainSpec, unroll_of
from ...kernels.rms_norm import rms_norm
from ..rotary import RotaryTable
from .batches import Batch
from .chain_loss import ChainLoss
from .compiled import compiled
from .dense import Weights, decoder_layer
from .draft_layer import check_heads, copy_leaves, learnt_norm, learnt_qwen3_layer
from .export import draft_config
from .losses import Wanted, agreement
from .recipe import Exported, Setting, StepResult

_EMBED = "model.embed_tokens.weight"


class Standalone:
    """A Qwen3 with tied embeddings. Row p takes token p and predicts token p + 1."""

    def __init__(self, setting: Setting) -> None:
        self._spec = setting.spec
        self._target = setting.target
        self._model = standalone_model(setting.spec, setting.target.config)
        self._steps = unroll_of(setting.spec)
        device = setting.target.device
        self._rotary = RotaryTable(
            self._model.rope, self._model.head_dim, self._model.context_length, device
        )
        self._layer = compiled(decoder_layer) if setting.compiled else decoder_layer
        self.parameters = self._initial(torch.Generator().manual_seed(setting.spec.seed))

    @staticmethod
    def check(spec: TrainSpec, target: ModelConfig) -> None:
        """Raises RefusedError."""
        for name in ("draft_vocab_size", "feature_layers"):
            if getattr(spec, name) is not None:
                reason = "STANDALONE has none; leave it out, or train EAGLE3"
                raise RefusedError(Refused(name, reason))
        if spec.own_head:
            raise RefusedError(Refused("own_head", "STANDALONE always has one; leave it out"))
        standalone_model(spec, target)

    @property
    def matrices(self) -> frozenset[str]:
        """All but norms and the embedding."""
        return frozenset(n for n, p in self.parameters.items() if p.ndim == 2 and n != _EMBED)

    def step(self, batch: Batch) -> StepResult:
        """The loss of every row but the last, whose prediction nothing follows."""
        ids, rows = batch.ids, batch.ids.shape[1] - 1
        with torch.no_grad():
            hidden = self._target.forward(ids).hidden[:, :rows]
            logits = F.linear(hidden, self._target.lm_head)
        wanted = Wanted(logits, logits.argmax(-1))
        head_input, head = self.forward(ids, True)
        loss = ChainLoss(self._spec, ids, batch.own, rows)
        weight = loss.weights(1, wanted, self._model.vocab_size)
        loss.add(head_input[:, :rows].contiguous(), head, wanted, weight, ids[:, 1:])
        total, agree = loss.result()
        return StepResult(total, self._chains(agree[..., 0]), 0)

    @torch.no_grad()
    def agreement(self, batch: Batch) -> StepResult:
        """Agreement alone."""
        rows = batch.ids.shape[1] - 1
        top = F.linear(self._target.forward(batch.ids).hidden, self._target.lm_head).argmax(-1)
        head_input, head = self.forward(batch.ids, False)
        agree = agreement(head_input[:, :rows], head, top[:, :rows])
        return StepResult(torch.zeros(()), self._chains(agree), 0)

    def forward(self, ids: torch.Tensor, learning: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [B, T, H] after the final norm, and the head [V, H]."""
        model, dtype = self._model, self._target.dtype
        layer = self._layer if learning else decoder_layer
        cast = {name: tensor.to(dtype) for name, tensor in self.parameters.items()}
        self._rotary.reserve(ids.shape[1])
        cos, sin = self._rotary.cos[: ids.shape[1]], self._rotary.sin[: ids.shape[1]]
        stream = F.embedding(ids, cast[_EMBED])
        for index in range(model.num_hidden_layers):
            stream = layer(
                stream,
                cos,
                sin,
                _layer_weights(cast, index),
                model.num_attention_heads,
                model.num_key_value_heads,
                model.rms_norm_eps,
                0,
            )
        return rms_norm(stream, cast["model.norm.weight"], model.rms_norm_eps), cast[_EMBED]

    def adopt(self, tensors: dict[str, torch.Tensor]) -> None:
        """See Recipe."""
        copy_leaves(self.parameters, tensors)

    def export(self, dtype: torch.dtype) -> Exported:
        """An ordinary Qwen3 checkpoint."""
        fields = draft_config("Qwen3ForCausalLM", self._model, self._spec)
        return Exported(fields, {n: p.detach().to(dtype) for n, p in self.parameters.items()})

    def _chains(self, agree: torch.Tensor) -> torch.Tensor:
        """bool[B, R, S] from bool[B, T - 1]: step i of row r is what row r + i says."""
        rows = agree.shape[1] - self._steps + 1
        return torch.stack([agree[:, i : i + rows] for i in range(self._steps)], dim=-1)

    def _initial(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        model, device = self._model, self._target.device
        hidden = model.hidden_size
        embed = torch.randn(model.vocab_size, hidden, generator=generator) * 0.02
        made = {_EMBED: embed.to(device).requires_grad_()}
        for index in range(model.num_hidden_layers):
            made |= learnt_qwen3_layer(f"model.layers.{index}", model, generator, device)
        made["model.norm.weight"] = learnt_norm(hidden, device)
        return made


def _layer_weights(cast: dict[str, torch.Tensor], index: int) -> Weights:
    """In the order of ``tensors_of``."""

    def named(name: str) -> torch.Tensor:
        return cast[f"model.layers.{index}.{name}.weight"]

    qkv = torch.cat([named(f"self_attn.{part}_proj") for part in "qkv"])
    gate_up = torch.cat([named(f"mlp.{part}_proj") for part in ("gate", "up")])
    return (
        named("input_layernorm"),
        qkv,
        None,
        named("self_attn.q_norm"),
        named("self_attn.k_norm"),
        named("self_attn.o_proj"),
        None,
        named("post_attention_layernorm"),
        gate_up,
        None,
        named("mlp.down_proj"),
        None,
    )


def standalone_model(spec: TrainSpec, target: ModelConfig) -> ModelConfig:
    """A Qwen3 half as wide as the target, of two layers, unless flags say otherwise.

    Raises RefusedError for heads that attention cannot have.
    """
    hidden = spec.hidden_size or max(8, target.hidden_size // 2)
    heads = spec.num_attention_heads or target.num_attention_heads
    kv_heads = spec.num_key_value_heads or min(heads, target.num_key_value_heads)
    layers = spec.num_hidden_layers or 2
    head_dim = spec.head_dim or max(8, hidden // heads)
    check_heads(heads, kv_heads, head_dim)
    return msgspec.structs.replace(
        target,
        architecture="qwen3",
        hidden_size=hidden,
        intermediate_size=spec.intermediate_size or 3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=True,
        tie_word_embeddings=True,
        sliding_windows=(0,) * layers,
    )
