"""Target models: one decoder for the dense families, differences as config."""

from .loader import LoadFormat, load_model
from .model import Model

__all__ = ["LoadFormat", "Model", "load_model"]
