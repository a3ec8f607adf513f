"""The target's features as block drafts take them in."""

from itertools import pairwise

import torch

from ...engine_core.draft_config import DraftConfig


def captured_layers(config: DraftConfig) -> tuple[int, ...]:
    """The draft's feature layers as a target captures them: ascending, each once."""
    return tuple(sorted(set(config.feature_layers)))


def captured_width(config: DraftConfig) -> int:
    """Width of the features of ``captured_layers``."""
    return config.feature_size // len(config.feature_layers) * len(captured_layers(config))


def fold_fc(fc: torch.Tensor, config: DraftConfig) -> torch.Tensor:
    """``fc`` [H, K * H] for features of ``captured_layers``: a layer named twice counts twice."""
    layers = captured_layers(config)
    if all(low < high for low, high in pairwise(config.feature_layers)):
        return fc
    folded = fc.new_zeros(len(fc), len(layers), fc.shape[1] // len(config.feature_layers))
    folded = folded.float()
    parts = fc.chunk(len(config.feature_layers), dim=1)
    for layer, part in zip(config.feature_layers, parts, strict=True):
        folded[:, layers.index(layer)] += part
    return folded.flatten(1).to(fc.dtype)
