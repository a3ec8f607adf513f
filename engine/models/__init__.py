"""Target models: one decoder for the dense families, differences as config."""

from .loader import LoadFormat, load_model
from .model import GpuModel, Model

__all__ = ["GpuModel", "LoadFormat", "Model", "load_model"]
