"""EAGLE3 in training: the first step takes streams that enter layers of the target."""

import torch
import torch.nn.functional as F

from ...engine_core.model_config import ModelConfig
from ...engine_core.refusal import Refused, RefusedError
from ...engine_core.train_spec import TrainSpec
from ...kernels.rms_norm import rms_norm
from .batches import Batch
from .dense import TargetOutput
from .draft_layer import layer_model, learnt_matrix, learnt_norm
from .draft_vocab import check_size, draft_vocab
from .eagle_recipe import EagleRecipe, Fused
from .export import draft_config
from .recipe import Exported, Setting


class Eagle3(EagleRecipe):
    """Streams entering some of the target's layers, fused; a head of its own or the target's."""

    fuses_by_kernels = True

    def __init__(self, setting: Setting) -> None:
        spec, target = setting.spec, setting.target.config
        self._feature_layers = _feature_layers(spec, target)
        self._owns_head = spec.own_head or spec.draft_vocab_size is not None
        vocab = draft_vocab(
            setting.counts, spec.draft_vocab_size, target.eos_token_ids, setting.target.device
        )
        super().__init__(setting, _layer(spec, target), vocab)

    @staticmethod
    def check(spec: TrainSpec, target: ModelConfig) -> None:
        """Raises RefusedError."""
        layers, last = _feature_layers(spec, target), target.num_hidden_layers
        if list(layers) != sorted(set(layers)) or not 1 <= layers[0] <= layers[-1] <= last:
            reason = f"must ascend within 1 to {last}, are {list(layers)}"
            raise RefusedError(Refused("feature_layers", reason))
        if spec.draft_vocab_size is not None:
            try:
                check_size(spec.draft_vocab_size, len(target.eos_token_ids), target.vocab_size)
            except ValueError as error:
                raise RefusedError(Refused("draft_vocab_size", str(error))) from None
        _layer(spec, target)

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


def _layer(spec: TrainSpec, target: ModelConfig) -> ModelConfig:
    return layer_model(spec, target, 4)


def _feature_layers(spec: TrainSpec, target: ModelConfig) -> tuple[int, ...]:
    return spec.feature_layers or default_feature_layers(target.num_hidden_layers)


def default_feature_layers(layers: int) -> tuple[int, ...]:
    """Early, middle and the last layer's input; fewer where the target has few layers."""
    return tuple(sorted({min(2, layers - 1) or 1, max(1, layers // 2), max(1, layers - 1)}))
