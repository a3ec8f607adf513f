"""What DFLASH and DSPARK have in common in training: the blocks, their features, their loss.

Everything is learnt against the target's own answers over the text: its distribution at each place,
and its first choice, which in its own greedy text is the text's next token.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ...engine_core.model_config import ModelConfig
from ...engine_core.train_spec import TrainSpec, unroll_of, weighting_of
from .batches import Batch
from .block_backbone import BlockBackbone
from .block_layout import Blocks, behind, draw_anchors, every_anchor
from .block_loss import BlockLoss, Drafted, Objective, block_loss
from .block_setup import block_model, check_block, feature_layers, mask_token
from .block_weighting import decay_weights
from .draft_layer import copy_leaves
from .export import draft_config
from .losses import chunk_size, first_choices, surprise
from .recipe import Exported, Setting, StepResult

Named = dict[str, torch.Tensor]


class Proposed(NamedTuple):
    """Of all anchors R of a batch: ``tokens`` int64[B, R, K], and float32[B, R, K] raw logits of a
    confidence head. ``agree`` bool[B, R, K]: whether the target chooses the token there.
    """

    tokens: torch.Tensor
    confidence: torch.Tensor | None
    agree: torch.Tensor


class BlockRecipe(ABC):
    """A block draft. Row 0 of a block holds its anchor; ``first_row`` proposes the first token."""

    architecture: str
    first_row: int

    def __init__(self, setting: Setting) -> None:
        spec, target = setting.spec, setting.target
        self._spec = spec
        self._target = target
        self._model = block_model(spec, target.config)
        self._drafts = unroll_of(spec)
        self._mask_id = mask_token(spec, target.config)
        self._feature_layers = feature_layers(spec, target.config)
        self._backbone = BlockBackbone(
            self._model, target, self._drafts + self.first_row, self._mask_id, setting.compiled
        )
        generator = torch.Generator().manual_seed(spec.seed)
        width = len(self._feature_layers) * target.config.hidden_size
        self._scale = self._feature_scale(setting.sample)
        self.parameters = self._backbone.initial(width, generator) | self.heads(generator)

    @staticmethod
    def check(spec: TrainSpec, target: ModelConfig) -> None:
        """Raises RefusedError."""
        check_block(spec, target)

    @property
    def matrices(self) -> frozenset[str]:
        """Matrices between hidden states."""
        outside = ("markov_head.markov_w", "confidence_head")
        return frozenset(
            name
            for name, tensor in self.parameters.items()
            if tensor.ndim == 2 and not name.startswith(outside)
        )

    @abstractmethod
    def heads(self, generator: torch.Generator) -> Named:
        """Parameters beside the backbone's."""

    @abstractmethod
    def objective(self) -> Objective:
        """What the loss of a drafted token is."""

    @abstractmethod
    def drafted(
        self, hidden: torch.Tensor, before: torch.Tensor, weights: Named
    ) -> tuple[Drafted, torch.Tensor | None]:
        """N blocks as they are learnt, and float32[N, K] of a confidence head.

        ``hidden`` [N, K, H]: of the rows that propose; ``before`` int64[N, K]: the text's token
        before each proposed one.
        """

    @abstractmethod
    def choose(
        self, hidden: torch.Tensor, bonus: torch.Tensor, weights: Named
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Greedy tokens int64[N, K] of blocks behind ``bonus`` int64[N], and raw confidence."""

    @abstractmethod
    def fields(self) -> dict[str, object]:
        """config.json's fields beside those of all block drafts."""

    def step(self, batch: Batch) -> StepResult:
        """The loss of blocks at random anchors."""
        spec, drafts = self._spec, self._drafts
        hidden_of, features = self.features(batch.ids)
        unlikely = surprise(hidden_of, self._target.lm_head, batch.ids)
        blocks = draw_anchors(batch.own, spec.anchors, drafts, unlikely, spec.start_focus)
        weights = self.cast()
        hidden = self._backbone.forward(batch.ids, features, blocks.anchors, weights, True)
        rows = hidden[:, :, self.first_row :].flatten(0, 1)

        def gather(values: torch.Tensor, offset: int) -> torch.Tensor:
            return behind(values, blocks.anchors, offset, drafts).flatten(0, 1)

        text, own = gather(batch.ids, 1), gather(batch.own, 1)
        base = torch.where(own, 1.0, spec.prompt_weight) * blocks.weight.flatten()[:, None]
        decay = decay_weights(drafts, spec.decay_gamma, text.device)
        by_place = weighting_of(spec) == "decay"
        weight = base * decay if by_place else base
        drafted, confidence = self.drafted(rows.contiguous(), gather(batch.ids, 0), weights)
        found = block_loss(drafted, gather(hidden_of, 0), text, weight, self.objective())
        norm = (weight * found.alive).sum() if by_place else base[:, 0].sum()
        loss = found.loss / norm
        if confidence is not None:
            loss = loss + spec.confidence_weight * _confidence_loss(confidence, found, base * decay)
        return self._result(batch, blocks, loss, found.agree)

    @torch.no_grad()
    def agreement(self, batch: Batch) -> StepResult:
        """Agreement at every anchor, of blocks that go on from their own choices."""
        return StepResult(torch.zeros(()), self.propose(batch).agree, 0)

    @torch.no_grad()
    def propose(self, batch: Batch) -> Proposed:
        """What is drafted greedily behind every token of a batch, the last K excepted."""
        drafts = self._drafts
        hidden_of, features = self.features(batch.ids)
        weights = self.cast()
        top = first_choices(hidden_of, self._target.lm_head)
        tokens: list[torch.Tensor] = []
        confidences: list[torch.Tensor] = []
        agrees: list[torch.Tensor] = []
        total = batch.ids.shape[1] - drafts
        for part, blocks in every_anchor(batch.ids, min(self._spec.anchors, total), drafts):
            hidden = self._backbone.forward(batch.ids, features, blocks.anchors, weights, False)
            shape = (*blocks.anchors.shape, drafts)
            rows = hidden[:, :, self.first_row :].flatten(0, 1).contiguous()
            bonus = batch.ids.gather(1, blocks.anchors).flatten()
            found: list[tuple[torch.Tensor, torch.Tensor | None]] = []
            size = chunk_size(rows, self._target.lm_head)
            for begin in range(0, len(rows), size):
                here = slice(begin, begin + size)
                found.append(self.choose(rows[here], bonus[here], weights))
            kept = part.stop - part.start
            chosen = torch.cat([one for one, _ in found]).view(shape)[:, :kept]
            tokens.append(chosen)
            agrees.append(chosen == behind(top, blocks.anchors, 0, drafts)[:, :kept])
            scores = [score for _, score in found if score is not None]
            if scores:
                confidences.append(torch.cat(scores).view(shape)[:, :kept])
        confidence = torch.cat(confidences, dim=1) if confidences else None
        return Proposed(torch.cat(tokens, dim=1), confidence, torch.cat(agrees, dim=1))

    @torch.no_grad()
    def features(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's hidden states before its head, and the captured streams side by side."""
        layers = self._feature_layers
        output = self._target.forward(ids, tuple(sorted(set(layers))))
        streams = dict(zip(sorted(set(layers)), output.streams, strict=True))
        return output.hidden, torch.cat([streams[layer] for layer in layers], dim=-1)

    def cast(self) -> Named:
        """The parameters in the computation's type; a confidence head stays float32."""
        made = {
            name: tensor if name.startswith("confidence_head") else tensor.to(self._target.dtype)
            for name, tensor in self.parameters.items()
        }
        scaled = self.parameters["fc.weight"] * self._scale
        return made | {"fc.weight": scaled.to(self._target.dtype)}

    def adopt(self, tensors: Named) -> None:
        """See Recipe."""
        copy_leaves(self.parameters, tensors)
        self.parameters["fc.weight"].data.div_(self._scale)

    def export(self, dtype: torch.dtype) -> Exported:
        """z-lab's and SpecForge's format, which SGLang serves."""
        model, target = self._model, self._target.config
        block = self._drafts + (1 if self.architecture == "DFlashDraftModel" else 0)
        sliding = [
            "sliding_attention" if window else "full_attention" for window in model.sliding_windows
        ]
        own = self.fields()
        fields = draft_config(self.architecture, model, self._spec)
        fields |= {
            "block_size": block,
            "dflash_config": {
                "mask_token_id": self._mask_id,
                "target_layer_ids": [layer - 1 for layer in self._feature_layers],
                **own,
            },
            "layer_types": sliding,
            "num_target_layers": target.num_hidden_layers,
            **own,
        }
        if any(model.sliding_windows):
            fields["sliding_window"] = max(model.sliding_windows)
        leaves = self.parameters | {"fc.weight": self.parameters["fc.weight"] * self._scale}
        tensors = {
            name: tensor.detach().to(torch.float32 if name.startswith("confidence_head") else dtype)
            for name, tensor in leaves.items()
        }
        return Exported(fields, tensors)

    def _result(
        self, batch: Batch, blocks: Blocks, loss: torch.Tensor, agree: torch.Tensor
    ) -> StepResult:
        count, length = batch.ids.shape
        shape = count, length - self._drafts
        drafted = torch.zeros(shape, dtype=torch.bool, device=agree.device)
        drafted.scatter_(1, blocks.anchors, blocks.valid)
        wide = torch.zeros((*shape, self._drafts), dtype=torch.bool, device=agree.device)
        places = blocks.anchors[..., None].expand(-1, -1, self._drafts)
        wide.scatter_(1, places, agree.view(places.shape))
        return StepResult(loss, wide, 0, drafted)

    def _feature_scale(self, sample: torch.Tensor) -> torch.Tensor:
        """float32[W] that evens out the features: dimensions differ by hundreds, and layers too."""
        made = []
        for stream in self.features(sample)[1].float().chunk(len(self._feature_layers), dim=-1):
            length = stream.square().mean(-1, keepdim=True).sqrt()
            size = (stream / (length + 1e-6)).square().mean((0, 1)).sqrt()
            made.append(1.0 / ((size + 1e-3) * length.median()))
        return torch.cat(made)


def _confidence_loss(
    confidence: torch.Tensor, found: BlockLoss, weight: torch.Tensor
) -> torch.Tensor:
    """How far confidence is from the chance that a draft is accepted."""
    weight = weight * found.alive
    loss = F.binary_cross_entropy_with_logits(confidence, found.chance, reduction="none")
    return (loss * weight).sum() / weight.sum()
