"""Where a model's files are: the embedded model, a local folder or a Hugging Face id."""

import re
from pathlib import Path

from .refusal import Refused, RefusedError

EMBEDDED = {"pycoder": "pycoder-11m"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*")
# Code and other weight formats are never fetched: nothing here would read them.
# A draft with a mask_embedding.pt is refused, for which the file must be there; nobody opens it.
_WANTED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "mask_embedding.pt")


class ModelNotFound(ValueError):
    """No model of that name; the message names the flag and lists every place looked at."""


def resolve_model(name: str, revision: str | None = None, field: str = "model") -> Path:
    """The folder of model ``name``, which the flag ``field`` asks for.

    ``pycoder`` is the model that ships with the package; a path with a config.json is taken as it
    is; otherwise ``name`` is a Hugging Face id, taken from the local cache or downloaded.
    ``revision`` (branch, tag or commit) applies to Hugging Face ids only. Raises ModelNotFound;
    RefusedError for a revision of anything else.
    """
    embedded = EMBEDDED.get(name)
    folder = Path(name).expanduser()
    if revision is not None and (embedded is not None or folder.is_dir()):
        what = "the embedded model" if embedded is not None else "the folder"
        flag = "revision" if field == "model" else field.replace("_path", "_revision")
        raise RefusedError(Refused(flag, f"{what} {name!r} has no revisions; leave {flag} out"))
    if embedded is not None:
        found = _embedded_folder(embedded)
        if found is not None:
            return found
        raise ModelNotFound(
            f"{field}: the embedded model {name!r} is missing from this installation (looked for "
            f"models/{embedded}/config.json); install outrider again"
        )
    looked = [f"the embedded models ({', '.join(EMBEDDED)})", f"the folder {str(folder)!r}"]
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return folder
        raise ModelNotFound(
            f"{field}: the folder {str(folder)!r} exists but has no config.json; give the folder "
            "that holds config.json and the *.safetensors files"
        )
    if folder.is_file():
        raise ModelNotFound(
            f"{field}: {name!r} is a file; give the folder that holds config.json and the "
            "*.safetensors files"
        )
    if not _HUB_ID.fullmatch(name):
        raise _missing(field, name, looked, "it is not a Hugging Face id (owner/name)")
    return _from_hub(field, name, revision, looked)


def resolve_draft(algorithm: str, model: str, path: str | None, revision: str | None) -> Path:
    """The folder of the draft that ``algorithm`` needs beside the target ``model``.

    ``path`` and ``revision`` as those of ``resolve_model``; without a path it is the draft that
    ships with an embedded target. Raises ModelNotFound, RefusedError.
    """
    field = "speculative_draft_model_path"
    if path is not None:
        return resolve_model(path, revision, field)
    if model in EMBEDDED:
        found = _embedded_folder(f"{EMBEDDED[model]}-{algorithm.lower()}")
        if found is not None:
            return found
    raise ModelNotFound(
        f"{field}: {algorithm} needs one; no draft of it ships with {model!r}: give a folder with "
        "config.json and *.safetensors, or a Hugging Face id"
    )


def _embedded_folder(folder_name: str) -> Path | None:
    # In a source checkout the module's own folder may be reached through a link.
    for source in (Path(__file__), Path(__file__).resolve()):
        folder = source.parent.parent / "models" / folder_name
        if (folder / "config.json").is_file():
            return folder
    return None


def _from_hub(field: str, name: str, revision: str | None, looked: list[str]) -> Path:
    where = f"{name} at {revision}" if revision else name
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        reason = "huggingface_hub is not installed (pip install huggingface_hub)"
        raise _missing(field, name, looked, reason) from None
    patterns = list(_WANTED)
    try:
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=patterns, local_files_only=True
            )
        )
    except (LocalEntryNotFoundError, OSError, ValueError):
        looked.append(f"the local Hugging Face cache ({where})")
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, OSError, ValueError) as error:
        looked.append(f"the Hugging Face hub ({where})")
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise _missing(field, name, looked, reason) from None


def _missing(field: str, name: str, looked: list[str], reason: str) -> ModelNotFound:
    return ModelNotFound(
        f"{field}: {name!r} was not found. Looked for: {'; '.join(looked)}. "
        f"Reason: {reason.rstrip('.')}. Give `pycoder`, a folder with config.json and "
        "*.safetensors, or a Hugging Face id that is cached or reachable "
        "(HF_TOKEN for gated models; HF_HUB_OFFLINE must be unset)."
    )
