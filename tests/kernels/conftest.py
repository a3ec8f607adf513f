"""Lets the Triton interpreter run loops whose bounds are tensors under NumPy 2.4."""

import importlib
from typing import Any


def accept_one_element_bounds() -> None:
    """Triton 3.6 calls int() on an array of one element, which NumPy 2.4 refuses."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


accept_one_element_bounds()
