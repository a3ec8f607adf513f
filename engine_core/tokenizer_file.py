"""Where a model's tokenizer lies."""

from pathlib import Path

from .config import EngineConfig
from .model_path import resolve_model


def tokenizer_file(config: EngineConfig) -> Path | None:
    """Its tokenizer.json; None without one or with skip_tokenizer_init.

    Raises ModelNotFound, or ValueError for a ``tokenizer_path`` that is no folder.
    """
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer_path is not None:
        folder = Path(config.tokenizer_path).expanduser()
        if not folder.is_dir():
            raise ValueError(f"tokenizer_path: {config.tokenizer_path!r} is not a folder")
    else:
        folder = resolve_model(config.model, config.revision)
    path = folder / "tokenizer.json"
    return path if path.is_file() else None
