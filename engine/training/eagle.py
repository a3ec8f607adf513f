"""EAGLE and EAGLE3 in training: one layer, unrolled over its own output.

Row p of step i takes the token of position p + 1 + i at rope position p + i and predicts token
p + 2 + i. Step 0 takes the target's feature of position p, later steps the step before's output.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import torch
import torch.nn.functional as F

from ...engine_core.model_config import ModelConfig
from ...engine_core.refusal import Refused, RefusedError
from ...engine_core.train_spec import unroll_of
from ...kernels.rms_norm import rms_norm
from ...kernels.silu_mul import silu_mul
from ..rotary import RotaryTable
from .batches import Batch
from .chain_attention import Keys, attention_for
from .chain_loss import ChainLoss
from .compiled import compiled
from .dense import TargetOutput, rotate, split_heads
from .draft_vocab import DraftVocab, draft_vocab
from .export import draft_config
from .losses import Wanted, agreement
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
        loss = ChainLoss(self._spec, batch.ids, batch.own_from, rows)
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


class Eagle3(EagleRecipe):
    """Streams entering some of the target's layers, fused; a head of its own or the target's."""

    fuses_by_kernels = True

    def __init__(self, setting: Setting) -> None:
        target = setting.target.config
        layers = setting.spec.feature_layers or default_feature_layers(target.num_hidden_layers)
        if list(layers) != sorted(set(layers)) or not 1 <= layers[0] <= layers[-1] <= (
            target.num_hidden_layers
        ):
            raise RefusedError(
                Refused(
                    "feature_layers",
                    f"must ascend within 1 to {target.num_hidden_layers}, are {list(layers)}",
                )
            )
        self._feature_layers = layers
        self._owns_head = setting.spec.own_head or setting.spec.draft_vocab_size is not None
        try:
            vocab = draft_vocab(
                setting.counts,
                setting.spec.draft_vocab_size,
                target.eos_token_ids,
                setting.target.device,
            )
        except ValueError as error:
            raise RefusedError(Refused("draft_vocab_size", str(error))) from None
        super().__init__(setting, layer_model(setting, 4), vocab)

    def initial(self, generator: torch.Generator, sample: torch.Tensor) -> dict[str, torch.Tensor]:
        """Norms that even out the streams' dimensions, some of which are hundreds of times larger
        than others; the target's final norm, and its head's rows for a head of its own.
        """
        hidden, device = self._model.hidden_size, self._target.device
        eps = self._model.rms_norm_eps
        width = len(self._feature_layers) * self._target.config.hidden_size
        made = {"fc.weight": learnt_matrix((hidden, width), generator, device)}
        for index, stream in enumerate(self._target.forward(sample, self._feature_layers).streams):
            normed = rms_norm(stream.float(), torch.ones(stream.shape[-1], device=device), eps)
            size = normed.square().mean((0, 1)).sqrt()
            made[f"fc_norm.{index}.weight"] = (1.0 / (size + 1e-3)).requires_grad_()
        made |= self._layer_parameters(generator, 2 * hidden)
        for name in ("midlayer.hidden_norm", "midlayer.input_layernorm"):
            made[f"{name}.weight"] = learnt_norm(hidden, device)
        made["norm.weight"] = self._target.final_norm.detach().float().clone().requires_grad_()
        if self._owns_head:
            rows = self._target_head[: self._vocab.size].detach().float().clone()
            made["lm_head.weight"] = rows.requires_grad_()
        return made

    def features(self, batch: Batch) -> tuple[TargetOutput, torch.Tensor]:
        """The captured streams side by side."""
        output = self._target.forward(batch.ids, self._feature_layers)
        return output, torch.cat(output.streams, dim=-1)

    def fuse(self, features: torch.Tensor, weights: Fused) -> torch.Tensor:
        """Every stream normed, then all by fc."""
        eps = self._model.rms_norm_eps
        chunks = features.chunk(len(self._feature_layers), dim=-1)
        normed = [
            rms_norm(chunk, weights[f"fc_norm.{index}.weight"], eps)
            for index, chunk in enumerate(chunks)
        ]
        return F.linear(torch.cat(normed, dim=-1), weights["fc.weight"])

    def enter(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        weights: Fused,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Attention reads the normed embedding and the normed hidden state, side by side."""
        eps = self._model.rms_norm_eps
        normed = (
            rms_norm(embedded, weights["input_layernorm.weight"], eps),
            rms_norm(hidden, weights["hidden_norm.weight"], eps),
        )
        return (hidden, *self._qkv(torch.cat(normed, dim=-1), weights, cos, sin))

    def leave(
        self, stream: torch.Tensor, context: torch.Tensor, weights: Fused
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The un-normed stream is passed on, the normed one read by the head."""
        stream = self._after(stream, context, weights)
        return stream, rms_norm(stream, weights["norm.weight"], self._model.rms_norm_eps)

    def export(self, dtype: torch.dtype) -> Exported:
        """SGLang's and vLLM's EAGLE3 format."""
        target = self._target.config
        fields = draft_config("LlamaForCausalLMEagle3", self._model, self._spec)
        fields |= {
            "draft_vocab_size": self._vocab.size if self._owns_head else None,
            "target_hidden_size": target.hidden_size,
            "num_aux_hidden_states": len(self._feature_layers),
            "fc_norm": True,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [i - 1 for i in self._feature_layers],
                "use_aux_hidden_state": True,
            },
        }
        tensors = {name: p.detach().to(dtype) for name, p in self.parameters.items()}
        return Exported(fields, tensors | self._vocab.maps())


class Eagle(EagleRecipe):
    """The target's last hidden state; embedding and head are the target's."""

    learns_features = True
    layer_prefix = "layers.0"

    def __init__(self, setting: Setting) -> None:
        for name in ("draft_vocab_size", "feature_layers"):
            if getattr(setting.spec, name) is not None:
                raise RefusedError(Refused(name, "EAGLE has none; it is EAGLE3's"))
        if setting.spec.own_head:
            raise RefusedError(Refused("own_head", "EAGLE reads the target's head"))
        vocab = draft_vocab(setting.counts, None, (), setting.target.device)
        super().__init__(setting, layer_model(setting, 6), vocab)

    def initial(self, generator: torch.Generator, sample: torch.Tensor) -> dict[str, torch.Tensor]:
        """A matrix for the pair, which at first keeps the hidden state as it is, and a layer
        without a norm at its entry.
        """
        hidden = self._model.hidden_size
        fc = learnt_matrix((hidden, 2 * hidden), generator, self._target.device)
        fc.data[:, hidden:] = torch.eye(hidden)
        return {"fc.weight": fc, **self._layer_parameters(generator, hidden)}

    def features(self, batch: Batch) -> tuple[TargetOutput, torch.Tensor]:
        """The hidden state after the final norm."""
        output = self._target.forward(batch.ids)
        return output, output.hidden

    def fuse(self, features: torch.Tensor, weights: Fused) -> torch.Tensor:
        """As they are."""
        # Like a later step's input, so that one compiled function serves all steps.
        return features.contiguous().requires_grad_()

    def enter(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        weights: Fused,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The stream is fc of the pair, embedding first."""
        stream = F.linear(torch.cat((embedded, hidden), dim=-1), weights["fc.weight"])
        return (stream, *self._qkv(stream, weights, cos, sin))

    def leave(
        self, stream: torch.Tensor, context: torch.Tensor, weights: Fused
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One tensor is both passed on and read by the head."""
        stream = self._after(stream, context, weights)
        return stream, stream

    def export(self, dtype: torch.dtype) -> Exported:
        """SGLang's and vLLM's EAGLE format."""
        fields = draft_config("LlamaForCausalLMEagle", self._model, self._spec)
        tensors = {name: p.detach().to(dtype) for name, p in self.parameters.items()}
        return Exported(fields, tensors)


def default_feature_layers(layers: int) -> tuple[int, ...]:
    """Early, middle and the last layer's input; fewer where the target has few layers."""
    return tuple(sorted({min(2, layers - 1) or 1, max(1, layers // 2), max(1, layers - 1)}))


def layer_model(setting: Setting, widening: int) -> ModelConfig:
    """A Llama layer as wide as the target. Raises RefusedError."""
    spec, target = setting.spec, setting.target.config
    if spec.hidden_size not in (None, target.hidden_size):
        raise RefusedError(
            Refused(
                "hidden_size",
                f"must be the target's ({target.hidden_size}), whose embedding the draft reads",
            )
        )
    if spec.num_hidden_layers not in (None, 1):
        raise RefusedError(Refused("num_hidden_layers", f"{spec.algorithm} is trained with 1"))
    heads = spec.num_attention_heads or target.num_attention_heads
    kv_heads = spec.num_key_value_heads or target.num_key_value_heads
    head_dim = spec.head_dim or target.head_dim
    check_heads(heads, kv_heads, head_dim)
    return msgspec.structs.replace(
        target,
        architecture="llama",
        intermediate_size=spec.intermediate_size or widening * target.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tie_word_embeddings=False,
        sliding_windows=(0,),
    )


def check_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    """Raises RefusedError for heads that attention cannot have."""
    if heads % kv_heads:
        reason = f"{kv_heads} does not divide the {heads} query heads; give one that does"
        raise RefusedError(Refused("num_key_value_heads", reason))
    if head_dim % 2:
        reason = f"{head_dim} is odd, which rotary embeddings cannot turn; give an even one"
        raise RefusedError(Refused("head_dim", reason))


def learnt_matrix(
    size: tuple[int, int], generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """float32[out, in], drawn on the CPU so that devices agree."""
    drawn: torch.Tensor = torch.randn(size, generator=generator) * size[1] ** -0.5
    return drawn.to(device).requires_grad_()


def learnt_norm(size: int, device: torch.device) -> torch.Tensor:
    """Ones."""
    return torch.ones(size, device=device, requires_grad=True)
