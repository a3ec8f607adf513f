"""Makes Triton's interpreter fit for the tests: NumPy 2.4, and no patching at every call."""

import importlib
from typing import Any

interpreter: Any = importlib.import_module("triton.runtime.interpreter")


def accept_one_element_bounds() -> None:
    """Triton 3.6 calls int() on an array of one element, which NumPy 2.4 refuses."""
    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def patch_language_once() -> None:
    """Patch triton.language once a module: doing and undoing it takes 8 ms at every call."""
    patch, patched = interpreter._patch_lang, set[int]()

    class Patched:
        def restore(self) -> None: ...

    def patch_once(function: Any) -> Any:
        if id(function.__globals__) not in patched:
            patched.add(id(function.__globals__))
            patch(function)
        return Patched()

    interpreter._patch_lang = patch_once


if not getattr(interpreter, "_outrider_tests", False):
    interpreter._outrider_tests = True
    accept_one_element_bounds()
    patch_language_once()
