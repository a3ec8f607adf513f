"""Target models: one decoder for the dense families, differences as config."""

from .loader import load_model
from .model import Model

__all__ = ["Model", "load_model"]
