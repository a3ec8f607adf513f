"""From a block draft's folder to a network that drafts for a target."""

from pathlib import Path

import msgspec
import torch

from ...engine_core.block_tensors import is_spare
from ...engine_core.draft_config import DraftConfig
from ...engine_core.draft_names import our_name
from ...engine_core.memory_parts import OVERRUN_TOKENS
from ..weights import Checkpoint, RandomTensors, WeightsError
from .block_net import BlockNet
from .block_weights import BlockWeights, read_block
from .draft_loader import error_in, refuse_pickles
from .draft_weights import DraftTensors
from .loader import LoadFormat
from .model import TargetModel


def load_block_draft(
    folder: Path,
    config: DraftConfig,
    target: TargetModel,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat = "auto",
    native: bool = True,
) -> BlockNet:
    """The DFLASH or DSPARK draft of ``folder`` for ``target``, whose embedding and head it uses.

    Positions, ``load_format`` and ``native`` as for ``load_draft``. Raises WeightsError naming the
    tensor or file that is wrong.
    """
    longer = config.model.context_length + OVERRUN_TOKENS
    model = msgspec.structs.replace(config.model, context_length=longer)
    config = msgspec.structs.replace(config, model=model)
    if load_format == "dummy":
        weights = read_block(RandomTensors(dtype, device), config)
    else:
        weights = read_block_weights(folder, config)
    if native and device.type == "cuda":
        # Loads triton, which machines without a GPU need not have.
        from .gpu_block import GpuBlock

        return GpuBlock(weights, config, target, dtype, device)
    from .torch_block import TorchBlock

    return TorchBlock(weights, config, target, dtype, device)


def read_block_weights(folder: Path, config: DraftConfig) -> BlockWeights:
    """What the folder's checkpoint holds of a DFLASH or DSPARK draft. Raises WeightsError."""
    refuse_pickles(folder)
    checkpoint = Checkpoint(folder)
    try:
        weights = read_block(DraftTensors(checkpoint), config)
    except WeightsError as error:
        raise error_in(folder, error) from None
    checkpoint.finish(spare_names(checkpoint, config))
    return weights


def spare_names(checkpoint: Checkpoint, config: DraftConfig) -> tuple[str, ...]:
    """Tensors that a block draft's checkpoint may hold though nobody reads them."""
    return tuple(name for name in checkpoint.names if is_spare(our_name(name), config))
