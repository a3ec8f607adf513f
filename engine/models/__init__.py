"""Target models: one decoder for the dense families, differences as config."""

from .loader import LoadFormat, Share, load_model
from .model import GpuModel, Model, TargetModel

__all__ = ["GpuModel", "LoadFormat", "Model", "Share", "TargetModel", "load_model"]
