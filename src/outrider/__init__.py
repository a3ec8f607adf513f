"""Outrider: LLM inference with speculative decoding at its core."""

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncClient", "Client", "GrammarSpec", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from .engine_core.grammar_spec import GrammarSpec as GrammarSpec
    from .engine_core.sampling_params import SamplingParams as SamplingParams
    from .frontend.client import AsyncClient as AsyncClient
    from .frontend.client import Client as Client
    from .frontend.llm import LLM as LLM

_LAZY = {
    "LLM": ".frontend.llm",
    "Client": ".frontend.client",
    "AsyncClient": ".frontend.client",
    "GrammarSpec": ".engine_core.grammar_spec",
    "SamplingParams": ".engine_core.sampling_params",
}


def __getattr__(name: str) -> object:
    """Import the public names on first use: ``import outrider`` stays fast and torch-free."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
