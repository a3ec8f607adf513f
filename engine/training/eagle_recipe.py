"""What EAGLE and EAGLE3 have in common in training: one layer, unrolled over its own output.

Row p of step i takes the token of position p + 1 + i at rope position p + i and predicts token
p + 2 + i. Step 0 takes the target's feature of position p, later steps the step before's output.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ...engine_core.model_config import ModelConfig
from ...engine_core.train_spec import unroll_of
from ...kernels.rms_norm import rms_norm
from ...kernels.silu_mul import silu_mul
from ..rotary import RotaryTable
from .batches import Batch
from .chain_attention import Keys, attention_for
from .chain_loss import ChainLoss
from .compiled import compiled
from .dense import TargetOutput, rotate, split_heads
from .draft_layer import copy_leaves, learnt_matrix, learnt_norm
from .draft_vocab import DraftVocab
from .losses import Wanted, agreement, start_weights, surprise
from .recipe import Exported, Setting, StepResult

Fused = dict[str, torch.Tensor]


class Passed(NamedTuple):
    """A step's output [B, R, H]: what the next step takes in, and what the head reads."""

    recurrent: torch.Tensor
    head_input: torch.Tensor


class EagleRecipe(ABC):
    """What the two have in common: the unroll, the head, the loss."""

    def __init__(self, setting: Setting, model: ModelConfig, vocab: DraftVocab) -> None:
        self._spec = setting.spec
        self._target = setting.target
        self._model = model
        self._vocab = vocab
        self._unroll = unroll_of(setting.spec)
        compile_ = setting.compiled
        self._enter = compiled(self.enter) if compile_ else self.enter
        fuses = compile_ and self.fuses_by_kernels
        self._fuse = compiled(self.fuse) if fuses else self.fuse
        self._leave = compiled(self.leave) if compile_ else self.leave
        self._rotary = RotaryTable(
            model.rope, model.head_dim, model.context_length, setting.target.device
        )
        self._attention = attention_for(setting.target.device, model.head_dim)
        head = setting.target.lm_head
        self._target_head = head if vocab.order is None else head[vocab.order]
        self.parameters = self.initial(
            torch.Generator().manual_seed(setting.spec.seed), setting.sample
        )

    @property
    def matrices(self) -> frozenset[str]:
        """All but norms and the head."""
        return frozenset(
            name
            for name, tensor in self.parameters.items()
            if tensor.ndim == 2 and "head" not in name
        )

    @abstractmethod
    def initial(self, generator: torch.Generator, sample: torch.Tensor) -> dict[str, torch.Tensor]:
        """The first parameters, on the target's device; ``sample``: rows of text [B, T]."""

    @abstractmethod
    def features(self, batch: Batch) -> tuple[TargetOutput, torch.Tensor]:
        """The target's output, and the features [B, T, W] of it that the draft takes."""

    @abstractmethod
    def fuse(self, features: torch.Tensor, weights: Fused) -> torch.Tensor:
        """Hidden states [B, R, H] of step 0."""

    @abstractmethod
    def enter(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        weights: Fused,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The residual stream [B, R, H], and queries, keys and values [B, heads, R, D]."""

    @abstractmethod
    def leave(
        self, stream: torch.Tensor, context: torch.Tensor, weights: Fused
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What follows attention: a Passed."""

    def adopt(self, tensors: dict[str, torch.Tensor]) -> None:
        """See Recipe."""
        copy_leaves(self.parameters, tensors)

    @abstractmethod
    def export(self, dtype: torch.dtype) -> Exported:
        """See Recipe."""

    def step(self, batch: Batch) -> StepResult:
        """The loss of all steps of a batch."""
        rows = batch.ids.shape[1] - self._unroll
        output, features = self.features(batch)
        wanted = self._wanted(output)
        weights = self.fused()
        head = self._head()
        # A row drafts behind the token after its own.
        unlikely = surprise(output.hidden, self._target.lm_head, batch.ids)[:, 1 : 1 + rows]
        own = F.pad(batch.own, (0, 1))[:, 2 : 2 + rows]
        fits = own | ~own.any(1, keepdim=True)
        starts = start_weights(unlikely, fits, self._spec.start_focus)
        starts = torch.where(fits, starts, 1.0)
        loss = ChainLoss(self._spec, batch.ids, batch.own, rows, starts)
        places = self._vocab.places(batch.ids)
        for index, passed in self._steps(batch.ids, features[:, :rows], weights, True):
            here = Wanted(*(part[:, 1 + index : 1 + index + rows] for part in wanted))
            weight = loss.weights(2 + index, here, self._vocab.size)
            # The last step predicts one token past the text's end, which is never compared.
            text = places[:, 2 + index : 2 + index + rows]
            if text.shape[1] < rows:
                text = F.pad(text, (0, rows - text.shape[1]), value=-1)
            loss.add(passed.head_input, head, here, weight, text)
            if self._spec.feature_weight and self.learns_features:
                real = output.hidden[:, 1 + index : 1 + index + rows]
                distance = F.smooth_l1_loss(
                    passed.recurrent.float(), real.float(), reduction="none"
                ).mean(-1)
                loss.add_plain(self._spec.feature_weight * (distance * weight).sum())
        total, agree = loss.result()
        return StepResult(total, agree, -1)

    learns_features = False
    fuses_by_kernels = False

    @torch.no_grad()
    def agreement(self, batch: Batch) -> StepResult:
        """Agreement alone."""
        rows = batch.ids.shape[1] - self._unroll
        output, features = self.features(batch)
        top = F.linear(output.hidden, self._target_head).argmax(-1)
        weights, head = self.fused(), self._head()
        agrees = [
            agreement(passed.head_input, head, top[:, 1 + index : 1 + index + rows])
            for index, passed in self._steps(batch.ids, features[:, :rows], weights, False)
        ]
        return StepResult(torch.zeros(()), torch.stack(agrees, dim=-1), -1)

    def unrolled(self, batch: Batch) -> list[Passed]:
        """Every step's output, for tests."""
        rows = batch.ids.shape[1] - self._unroll
        _, features = self.features(batch)
        return [
            passed for _, passed in self._steps(batch.ids, features[:, :rows], self.fused(), False)
        ]

    def _steps(
        self, ids: torch.Tensor, features: torch.Tensor, weights: Fused, learning: bool
    ) -> Iterator[tuple[int, Passed]]:
        # Compiled again without gradients, measuring would take longer than it does uncompiled.
        enter, leave = (self._enter, self._leave) if learning else (self.enter, self.leave)
        rows = features.shape[1]
        hidden = (self._fuse if learning else self.fuse)(features, weights)
        made: list[Keys] = []
        for index in range(self._unroll):
            embedded = F.embedding(ids[:, 1 + index : 1 + index + rows], self._target.embedding)
            self._rotary.reserve(index + rows)
            cos = self._rotary.cos[index : index + rows]
            sin = self._rotary.sin[index : index + rows]
            stream, query, key, value = enter(embedded, hidden, weights, cos, sin)
            made.append(Keys(key, value))
            context = self._attention(query, made[0], made[1:])
            passed = Passed(*leave(stream, context, weights))
            yield index, passed
            hidden = passed.recurrent

    def _wanted(self, output: TargetOutput) -> Wanted:
        with torch.no_grad():
            logits = F.linear(output.hidden, self._target_head)
            return Wanted(logits[..., : self._vocab.size], logits.argmax(-1))

    def fused(self) -> Fused:
        """The parameters in the computation's type, q/k/v and gate/up in one matrix each."""
        dtype = self._target.dtype
        cast = {name: tensor.to(dtype) for name, tensor in self.parameters.items()}
        layer = self.layer_prefix
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        cast["qkv"] = torch.cat([cast.pop(f"{attention}.{n}_proj.weight") for n in "qkv"])
        cast["gate_up"] = torch.cat([cast.pop(f"{mlp}.{n}_proj.weight") for n in ("gate", "up")])
        cast["o"] = cast.pop(f"{attention}.o_proj.weight")
        cast["down"] = cast.pop(f"{mlp}.down_proj.weight")
        return {name.removeprefix(f"{layer}."): tensor for name, tensor in cast.items()}

    layer_prefix = "midlayer"

    def _head(self) -> torch.Tensor:
        own = self.parameters.get("lm_head.weight")
        if own is not None:
            return own.to(self._target.dtype)
        return self._target_head[: self._vocab.size]

    def _qkv(
        self, entering: torch.Tensor, weights: Fused, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads, kv_heads = self._model.num_attention_heads, self._model.num_key_value_heads
        query, key, value = split_heads(F.linear(entering, weights["qkv"]), heads, kv_heads)
        return rotate(query, cos, sin), rotate(key, cos, sin), value

    def _after(self, stream: torch.Tensor, context: torch.Tensor, weights: Fused) -> torch.Tensor:
        stream = stream + F.linear(context.transpose(1, 2).flatten(2), weights["o"])
        normed = rms_norm(
            stream, weights["post_attention_layernorm.weight"], self._model.rms_norm_eps
        )
        return stream + F.linear(silu_mul(F.linear(normed, weights["gate_up"])), weights["down"])

    def _layer_parameters(
        self, generator: torch.Generator, entering: int
    ) -> dict[str, torch.Tensor]:
        model, layer = self._model, self.layer_prefix
        hidden, inner = model.hidden_size, model.intermediate_size
        device = self._target.device
        sizes = {
            "self_attn.q_proj": (model.q_size, entering),
            "self_attn.k_proj": (model.kv_size, entering),
            "self_attn.v_proj": (model.kv_size, entering),
            "self_attn.o_proj": (hidden, model.q_size),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        made = {
            f"{layer}.{name}.weight": learnt_matrix(size, generator, device)
            for name, size in sizes.items()
        }
        # The layer adds nothing at first.
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            made[f"{layer}.{name}.weight"].data.zero_()
        made[f"{layer}.post_attention_layernorm.weight"] = learnt_norm(hidden, device)
        return made
