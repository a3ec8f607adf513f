"""From a draft's folder to a network that drafts for a target."""

from pathlib import Path

import msgspec
import torch

from ...engine_core.draft_config import DraftConfig
from ...engine_core.memory_parts import OVERRUN_TOKENS
from ...engine_core.tensor_shapes import IGNORABLE, UNUSED
from ..weights import Checkpoint, RandomTensors, WeightsError
from .cpu_decoder import supports_cpu_kernels
from .cpu_draft import NativeDraft
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


def load_draft(
    folder: Path,
    config: DraftConfig,
    target: TargetModel,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat = "auto",
    native: bool = True,
    token_map: tuple[int, ...] | None = None,
    int8: bool = False,
) -> DraftNet:
    """The draft of ``folder`` for ``target``, whose embedding and head it may share; block drafts
    are ``load_block_draft``'s.

    ``token_map``: the target's id of each draft id, for ``hot_tokens``. Positions may run
    ``OVERRUN_TOKENS`` past the draft's context. ``int8``: see NativeDraft; for the CPU's own
    kernels alone. ``load_format`` and ``native`` as for ``load_model``. Raises WeightsError naming
    the tensor or file that is wrong.
    """
    longer = config.model.context_length + OVERRUN_TOKENS
    model = msgspec.structs.replace(config.model, context_length=longer)
    config = msgspec.structs.replace(config, model=model)
    if config.algorithm == "STANDALONE":
        small = load_model(folder, model, dtype, device, load_format, native)
        if isinstance(small, GpuModel):
            return GpuStandaloneDraft(config, small)
        return StandaloneDraft(config, small)
    on_cpu = native and supports_cpu_kernels(model, dtype, device)
    if load_format == "dummy":
        # Native kernels keep bfloat16 weights as they are: random ones are as large as real ones.
        stored = torch.bfloat16 if on_cpu and model.torch_dtype == "bfloat16" else dtype
        weights = _random_weights(config, stored, device)
    else:
        weights = read_weights(folder, config)
    if config.hot_tokens:
        weights.token_ids = _hot_ids(config, token_map)
    if on_cpu:
        return NativeDraft(weights, config, target, int8=int8)
    if int8:
        raise ValueError("int8: only the CPU's own kernels read such a draft")
    if native and device.type == "cuda":
        # Loads triton, which machines without a GPU need not have.
        from .gpu_draft import GpuDraft

        return GpuDraft(weights, config, target, dtype, device)
    return TorchDraft(weights, config, target, dtype, device)


def read_weights(folder: Path, config: DraftConfig) -> DraftWeights:
    """What the folder's checkpoint holds of an EAGLE or EAGLE3 draft. Raises WeightsError."""
    refuse_pickles(folder)
    checkpoint = Checkpoint(folder)
    try:
        tensors = DraftTensors(checkpoint)
        weights = read_draft(tensors, config)
        if config.algorithm == "EAGLE3":
            weights.token_ids = read_token_ids(tensors, config)
    except WeightsError as error:
        raise error_in(folder, error) from None
    tensors.finish((*UNUSED, *IGNORABLE))
    return weights


def _random_weights(config: DraftConfig, dtype: torch.dtype, device: torch.device) -> DraftWeights:
    weights = read_draft(RandomTensors(dtype, device), config)
    weights.token_ids = spread_token_ids(config)
    return weights


def _hot_ids(config: DraftConfig, token_map: tuple[int, ...] | None) -> torch.Tensor:
    size = config.draft_vocab_size
    if token_map is None or len(token_map) != size:
        found = "none is given" if token_map is None else f"the one given has {len(token_map)}"
        raise WeightsError(
            f"hot_vocab_size: the draft proposes {size} tokens of a token map, but {found}; name "
            "the draft's own by --speculative-token-map"
        )
    return torch.tensor(token_map)


def error_in(folder: Path, error: WeightsError) -> WeightsError:
    """The same error, naming the folder."""
    text = str(error)
    return error if str(folder) in text else WeightsError(f"{folder}: {text}")


def refuse_pickles(folder: Path) -> None:
    """Raise WeightsError for a checkpoint in a format that can run code."""
    if not (folder / "model.safetensors").is_file() and (folder / "pytorch_model.bin").is_file():
        raise WeightsError(
            f"{folder}: has its weights in pytorch_model.bin, which can run code when it is read; "
            'convert it: python -c "import torch, safetensors.torch as s; s.save_file('
            "torch.load('pytorch_model.bin', weights_only=True), 'model.safetensors')\""
        )
