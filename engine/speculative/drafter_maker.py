"""From a configuration to the drafter that runs on the device."""

from itertools import pairwise

import torch

from ...engine_core.config import CoreConfig
from ...engine_core.drafter_loader import make_drafter_object, refuse_maker
from ...engine_core.drafter_spec import DrafterSpec
from ...engine_core.refusal import Refused, RefusedError
from ..kv_pool import KVPool
from ..models import Model
from .checked_drafter import CheckedDrafter
from .device_drafter import DeviceDrafter, DrafterContext, LoadedModel, SurvivalDrafter


def make_drafter(
    config: CoreConfig,
    page_table: torch.Tensor,
    target: Model,
    kv: KVPool,
    draft: LoadedModel | None,
) -> DeviceDrafter | None:
    """The drafter on the device that ``config`` asks for, over slots whose pages, of ``target``'s
    pool ``kv``, are ``page_table`` int32[slots, P]; None where it asks for none.

    Raises RefusedError naming the implementation, for one that cannot be made or used.
    """
    spec = config.drafter
    if spec is None or not spec.on_device:
        return None
    slots, pages = page_table.shape
    context = DrafterContext(
        config=config.engine,
        slots=slots,
        length=pages * kv.page_size,
        device=page_table.device,
        page_table=page_table,
        target=target,
        layers=len(kv.data),
        vocab_size=config.worker.vocab_size,
        draft=draft,
    )
    return load_device_drafter(spec, context, config.ragged.planned)


def load_device_drafter(
    spec: DrafterSpec, context: DrafterContext, survival: bool = False
) -> DeviceDrafter:
    """Import what the spec names for the device, and make it; ``survival``: it has to be a
    SurvivalDrafter. Raises RefusedError."""
    made = make_drafter_object(spec, spec.on_device, context)
    if isinstance(made, Refused):
        raise RefusedError(made)
    if not isinstance(made, DeviceDrafter):
        reason = f"made {type(made).__name__}, which is no DeviceDrafter"
        raise RefusedError(refuse_maker(spec, spec.on_device, reason))
    layers = made.feature_layers
    if not _are_layers(layers, context.layers):
        reason = (
            f"made a drafter with feature_layers {layers!r}; they must be None, () or ascending "
            f"layers from 0 to {context.layers}"
        )
        raise RefusedError(refuse_maker(spec, spec.on_device, reason))
    if survival and not isinstance(made, SurvivalDrafter):
        reason = (
            f"made {type(made).__name__}, which has no confidence; its spec says gives_survival"
        )
        raise RefusedError(refuse_maker(spec, spec.on_device, reason))
    if spec.built_in:
        return made
    return CheckedDrafter(made, spec.name, context.vocab_size, spec.tree)


def _are_layers(layers: object, count: int) -> bool:
    if layers is None:
        return True
    if not isinstance(layers, tuple) or not all(type(layer) is int for layer in layers):
        return False
    inside = all(0 <= layer <= count for layer in layers)
    return inside and all(low < high for low, high in pairwise(layers))
