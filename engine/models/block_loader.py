"""From a block draft's folder to a network that drafts for a target."""

from pathlib import Path

import msgspec
import torch

from ...engine_core.draft_config import DraftConfig
from ...engine_core.memory_parts import OVERRUN_TOKENS
from ..weights import RandomTensors
from .block_checkpoint import read_block, read_block_weights
from .block_net import BlockNet
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
