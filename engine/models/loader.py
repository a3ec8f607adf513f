"""From a model folder to a model that can run."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from ...engine_core.model_config import ModelConfig
from ...engine_core.tensor_shapes import IGNORABLE
from ..weights import Checkpoint, RandomTensors, TensorSource, WholeTensors
from .cpu_decoder import NativeDecoder, supports_cpu_kernels
from .model import Reduce, TargetModel
from .torch_decoder import TorchDecoder

LoadFormat = Literal["auto", "safetensors", "dummy"]


class Share(NamedTuple):
    """One rank's part of a model: what it takes of every tensor, how partial sums meet, and
    whether it is the rank that computes logits.
    """

    cut: Callable[[WholeTensors], TensorSource]
    reduce: Reduce
    decides: bool


def load_model(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat = "auto",
    native: bool = True,
    share: Share | None = None,
) -> TargetModel:
    """The model of ``folder``, computing in ``dtype`` on ``device``.

    ``load_format``: "auto" and "safetensors" read the folder's safetensors; "dummy" makes random
    weights on ``device`` and reads nothing. ``native`` False keeps to the torch reference where
    native kernels exist. ``share``: the part of a rank, for which ``config`` has the sizes. Raises
    WeightsError naming the tensor or file that is wrong.
    """
    native = native and (share is None or device.type != "cpu")  # CPU kernels run a whole model
    if load_format == "dummy":
        # Native kernels keep bfloat16 weights as they are: random ones are as large as real ones.
        keeps = native and supports_cpu_kernels(config, dtype, device)
        stored = torch.bfloat16 if keeps and config.torch_dtype == "bfloat16" else dtype
        return _build(RandomTensors(stored, device), config, dtype, device, native, share)
    checkpoint = Checkpoint(folder)
    model = _build(checkpoint, config, dtype, device, native, share)
    checkpoint.finish(IGNORABLE)
    return model


def _build(
    whole: WholeTensors,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    native: bool,
    share: Share | None,
) -> TargetModel:
    source = whole if share is None else share.cut(whole)
    reduce = None if share is None else share.reduce
    if native and supports_cpu_kernels(config, dtype, device):
        return NativeDecoder(source, config)
    if native and device.type == "cuda":
        # Loads triton, which machines without a GPU need not have.
        from .gpu_decoder import GpuDecoder

        decides = share is None or share.decides
        return GpuDecoder(source, config, dtype, device, reduce, decides)
    return TorchDecoder(source, config, dtype, device, reduce)
