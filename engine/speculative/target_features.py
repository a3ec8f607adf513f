"""The target's forward pass, and what a drafter takes of it."""

import torch

from ..forward_batch import ForwardBatch
from ..kv_pool import KVPool
from ..models import Model
from .device_drafter import DeviceDrafter


def run_target(
    model: Model, batch: ForwardBatch, kv: KVPool, drafter: DeviceDrafter | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [T, H] of a step's tokens, and the drafter's features [T, W] of them."""
    layers = None if drafter is None else drafter.feature_layers
    if layers is None:
        hidden = model.forward(batch, kv)
        return hidden, hidden.new_empty(len(hidden), 0)
    hidden, features = model.forward_capture(batch, kv, layers)
    return hidden, features if layers else hidden
