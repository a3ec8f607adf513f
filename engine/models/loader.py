"""From a model folder to a model that can run."""

from pathlib import Path
from typing import Literal

import torch

from ...engine_core.model_config import ModelConfig
from ..weights import Checkpoint, RandomTensors
from .decoder_weights import IGNORABLE
from .model import Model
from .torch_decoder import TorchDecoder

LoadFormat = Literal["auto", "safetensors", "dummy"]


def load_model(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat = "auto",
) -> Model:
    """The model of ``folder``, computing in ``dtype`` on ``device``.

    ``load_format``: "auto" and "safetensors" read the folder's safetensors; "dummy" makes random
    weights and reads nothing. Raises WeightsError naming the tensor or file that is wrong.
    """
    if load_format == "dummy":
        return TorchDecoder(RandomTensors(dtype), config, dtype, device)
    checkpoint = Checkpoint(folder)
    model = TorchDecoder(checkpoint, config, dtype, device)
    checkpoint.finish(IGNORABLE)
    return model
