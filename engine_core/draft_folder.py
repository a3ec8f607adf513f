"""The folders that a draft model is read from: its own, and that of its target's tokenizer."""

import contextlib
from pathlib import Path

import msgspec

from .block_fields import BUNDLED, said
from .config import EngineConfig
from .model_path import ModelNotFound, resolve_draft, resolve_model


def draft_folder(config: EngineConfig, algorithm: str) -> Path:
    """The folder of the draft of ``algorithm`` beside ``config.model``.

    A DSPARK draft may come with its target: in its folder, whose config.json then says so, or in
    ``dspark/`` there. Raises ModelNotFound, RefusedError.
    """
    path, revision = (
        config.speculative_draft_model_path,
        config.speculative_draft_model_revision,
    )
    if path is None and algorithm == "DSPARK":
        with contextlib.suppress(ModelNotFound):  # of the target: what follows says more
            found = _bundled(resolve_model(config.model, config.revision))
            if found is not None:
                return found
    return resolve_draft(algorithm, config.model, path, revision)


def tokenizer_folder(config: EngineConfig, algorithm: str) -> Path | None:
    """The folder of the target's tokenizer, for drafts that may name a token of it; None for
    others, and where it is not found. Raises RefusedError.
    """
    if algorithm != "DFLASH":
        return None
    if config.tokenizer_path is not None:
        return Path(config.tokenizer_path).expanduser()
    with contextlib.suppress(ModelNotFound):
        return resolve_model(config.model, config.revision)
    return None


def _bundled(target: Path) -> Path | None:
    try:
        fields = said((target / "config.json").read_bytes())
    except (OSError, msgspec.MsgspecError):
        return None  # reading the target says more of what is wrong
    if any(name in fields for name in BUNDLED):
        return target
    beside = target / "dspark"
    return beside if (beside / "config.json").is_file() else None
