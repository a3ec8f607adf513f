"""The weights of block drafts: DFLASH's and DSPARK's."""

from dataclasses import dataclass, field, fields

import torch

from .decoder_weights import LayerWeights


@dataclass(slots=True)
class MarkovWeights:
    """DSPARK's Markov head (block_drafts.md 2.5), of rank r over V tokens and H channels.

    ``w1``, ``w2`` [V, r]. ``gate`` [r, H + r] or ``joint`` [3r, 2r + H] with their biases, by the
    head's kind; None for the others.
    """

    w1: torch.Tensor
    w2: torch.Tensor
    gate: torch.Tensor | None = None
    gate_bias: torch.Tensor | None = None
    joint: torch.Tensor | None = None
    joint_bias: torch.Tensor | None = None


@dataclass(slots=True)
class ConfidenceWeights:
    """DSPARK's confidence head, float32: ``weight`` [H] or [H + r], ``bias`` []."""

    weight: torch.Tensor
    bias: torch.Tensor


@dataclass(slots=True)
class BlockWeights:
    """Matrices are [out, in], in the checkpoint's dtype; in float32 where reading them computes
    something: Gemma's norms are here as 1 + w, value scales in the value rows of ``qkv``.

    ``fc`` [H, W] joins the target's features of a position, in the order of ``feature_layers``
    whatever the checkpoint's is; ``hidden_norm`` [H] is behind it. Embedding and head are the
    target's.
    """

    fc: torch.Tensor
    hidden_norm: torch.Tensor
    final_norm: torch.Tensor
    layers: list[LayerWeights] = field(default_factory=list)
    markov: MarkovWeights | None = None
    confidence: ConfidenceWeights | None = None

    def tensors(self) -> list[torch.Tensor]:
        """All that exist."""
        some: list[torch.Tensor | None] = [self.fc, self.hidden_norm, self.final_norm]
        for layer in self.layers:
            some += layer.tensors()
        for head in (self.markov, self.confidence):
            if head is not None:
                some += [getattr(head, field.name) for field in fields(head)]
        return [tensor for tensor in some if tensor is not None]
