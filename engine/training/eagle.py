"""EAGLE in training: every step takes a final hidden state, the target's or its own."""

import torch
import torch.nn.functional as F

from ...engine_core.model_config import ModelConfig
from ...engine_core.refusal import Refused, RefusedError
from ...engine_core.train_spec import TrainSpec
from .batches import Batch
from .dense import TargetOutput
from .draft_layer import layer_model, learnt_matrix
from .draft_vocab import draft_vocab
from .eagle_recipe import EagleRecipe, Fused
from .export import draft_config
from .recipe import Exported, Setting


class Eagle(EagleRecipe):
    """The target's last hidden state; embedding and head are the target's."""

    learns_features = True
    layer_prefix = "layers.0"

    def __init__(self, setting: Setting) -> None:
        vocab = draft_vocab(setting.counts, None, (), setting.target.device)
        super().__init__(setting, _layer(setting.spec, setting.target.config), vocab)

    @staticmethod
    def check(spec: TrainSpec, target: ModelConfig) -> None:
        """Raises RefusedError."""
        for name in ("draft_vocab_size", "feature_layers"):
            if getattr(spec, name) is not None:
                raise RefusedError(Refused(name, "EAGLE has none; leave it out, or train EAGLE3"))
        if spec.own_head:
            raise RefusedError(Refused("own_head", "EAGLE reads the target's head; leave it out"))
        _layer(spec, target)

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


def _layer(spec: TrainSpec, target: ModelConfig) -> ModelConfig:
    return layer_model(spec, target, 6)
