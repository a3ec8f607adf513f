"""From a draft's folder to a network that drafts for a target."""

from pathlib import Path

import msgspec
import torch

from ...engine_core.draft_config import DraftConfig
from ...engine_core.memory_parts import OVERRUN_TOKENS
from ..weights import Checkpoint, RandomTensors, WeightsError
from .decoder_weights import IGNORABLE
from .draft_net import DraftNet
from .draft_weights import (
    DraftTensors,
    DraftWeights,
    read_draft,
    read_token_ids,
    spread_token_ids,
)
from .loader import LoadFormat, load_model
from .model import GpuModel, TargetModel
from .standalone_draft import GpuStandaloneDraft, StandaloneDraft
from .torch_draft import TorchDraft

# What checkpoints hold of the target, and what only training reads.
_UNUSED = ("embed_tokens.weight", "lm_head.weight", "t2d")


def load_draft(
    folder: Path,
    config: DraftConfig,
    target: TargetModel,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat = "auto",
    native: bool = True,
) -> DraftNet:
    """The draft of ``folder`` for ``target``, whose embedding and head it may share.

    Positions may run ``OVERRUN_TOKENS`` past the draft's context. ``load_format`` and ``native``
    as for ``load_model``. Raises WeightsError naming the tensor or file that is wrong.
    """
    longer = config.model.context_length + OVERRUN_TOKENS
    model = msgspec.structs.replace(config.model, context_length=longer)
    config = msgspec.structs.replace(config, model=model)
    if config.algorithm == "STANDALONE":
        small = load_model(folder, model, dtype, device, load_format, native)
        if isinstance(small, GpuModel):
            return GpuStandaloneDraft(config, small)
        return StandaloneDraft(config, small)
    weights = _read(folder, config, dtype, device, load_format)
    if native and device.type == "cuda":
        # Loads triton, which machines without a GPU need not have.
        from .gpu_draft import GpuDraft

        return GpuDraft(weights, config, target, dtype, device)
    return TorchDraft(weights, config, target, dtype, device)


def _read(
    folder: Path,
    config: DraftConfig,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat,
) -> DraftWeights:
    if load_format == "dummy":
        weights = read_draft(RandomTensors(dtype, device), config)
        weights.token_ids = spread_token_ids(config)
        return weights
    _refuse_pickles(folder)
    checkpoint = Checkpoint(folder)
    tensors = DraftTensors(checkpoint)
    try:
        weights = read_draft(tensors, config)
        if config.algorithm == "EAGLE3":
            weights.token_ids = read_token_ids(tensors, config)
    except WeightsError as error:
        text = str(error)
        raise WeightsError(text if str(folder) in text else f"{folder}: {text}") from None
    tensors.finish((*_UNUSED, *IGNORABLE))
    return weights


def _refuse_pickles(folder: Path) -> None:
    if not (folder / "model.safetensors").is_file() and (folder / "pytorch_model.bin").is_file():
        raise WeightsError(
            f"{folder}: has its weights in pytorch_model.bin, which can run code when it is read; "
            'convert it: python -c "import torch, safetensors.torch as s; s.save_file('
            "torch.load('pytorch_model.bin', weights_only=True), 'model.safetensors')\""
        )
