"""Compiled functions, made at first use: loading the compiler takes seconds."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` for shapes that hardly ever change."""
    return torch.compile(function, dynamic=False)
