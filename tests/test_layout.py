"""The five layers import in one direction, and the links that make them one package resolve."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("engine", "engine_core", "cython_ext", "kernels", "frontend", "models")

# Siblings that each layer may import.
ALLOWED: dict[str, set[str]] = {
    "engine": {"engine_core", "cython_ext", "kernels"},
    "engine_core": {"cython_ext"},
    "cython_ext": set(),
    "kernels": set(),
    "frontend": {"engine_core"},
}
# The only frontend modules that may reach the engine (in the process they start).
ENGINE_FROM_FRONTEND = {"launch.py", "llm.py"}
NO_TORCH = ("engine_core", "frontend", "cython_ext")


def sibling_imports(source: str, depth: int, layer: str) -> set[str]:
    """Names of the layers that a module of ``layer`` imports, relative or absolute.

    ``depth``: folders between the package root and the module, the layer's own included.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            if node.level > depth:
                names = [node.module] if node.module else [alias.name for alias in node.names]
                found |= {name.split(".")[0] for name in names}
            elif node.level == 0 and node.module and node.module.split(".")[0] == "outrider":
                found |= set(node.module.split(".")[1:2])
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "outrider":
                    found |= set(parts[1:2])
    return found - {layer}


def files_of(layer: str) -> list[Path]:
    return sorted((ROOT / layer).rglob("*.py"))


@pytest.mark.parametrize("layer", sorted(ALLOWED))
def test_layers_import_in_one_direction(layer: str) -> None:
    wrong = []
    for path in files_of(layer):
        allowed = set(ALLOWED[layer])
        if layer == "frontend" and path.name in ENGINE_FROM_FRONTEND:
            allowed.add("engine")
        depth = len(path.relative_to(ROOT).parts) - 1
        found = sibling_imports(path.read_text(), depth, layer)
        wrong += [f"{path.relative_to(ROOT)} imports {n}" for n in found - allowed if n in FOLDERS]
    assert not wrong


def test_the_layer_check_sees_planted_imports() -> None:
    planted = "from ..engine.worker import X\nfrom outrider.frontend import y\nfrom .plan import Z"
    assert sibling_imports(planted, 1, "engine_core") == {"engine", "frontend"}
    nested = "from ..plan import Z\nfrom ...kernels import k\nimport outrider.models"
    assert sibling_imports(nested, 2, "engine") == {"kernels", "models"}


@pytest.mark.parametrize("layer", NO_TORCH)
def test_torch_free_layers_never_import_torch(layer: str) -> None:
    for path in files_of(layer):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            assert not [n for n in names if n.split(".")[0] in ("torch", "transformers")], path


@pytest.mark.parametrize("folder", FOLDERS)
def test_links_resolve_home(folder: str) -> None:
    link = ROOT / "src" / "outrider" / folder
    assert link.is_symlink()
    assert link.resolve() == ROOT / folder
    code = (
        f"import sys; from outrider import {folder} as found;"
        f"assert {str(link)!r} in found.__path__, found.__path__;"
        f"assert {folder!r} not in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_kernels_stays_a_namespace() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_importing_the_name_and_the_core_loads_no_torch() -> None:
    code = (
        "import sys, outrider, outrider.frontend.cli, outrider.engine_core.core;"
        "assert 'torch' not in sys.modules, 'torch'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_exactly_what_is_exported() -> None:
    import outrider

    assert set(outrider.__all__) == {*outrider._LAZY, "__version__"}
    for name in outrider.__all__:
        assert getattr(outrider, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = outrider.nothing
