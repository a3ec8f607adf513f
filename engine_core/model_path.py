"""Where a model's files are: the embedded model, a local folder or a Hugging Face id."""

import re
from pathlib import Path

from .refusal import Refused, RefusedError

EMBEDDED = {"pycoder": "pycoder-11m"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*")
# Code and other weight formats are never fetched: nothing here would read them.
_WANTED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


class ModelNotFound(ValueError):
    """No model of that name; the message lists every place that was looked at."""


def resolve_model(name: str, revision: str | None = None) -> Path:
    """The folder of model ``name``.

    ``pycoder`` is the model that ships with the package; a path with a config.json is taken as it
    is; otherwise ``name`` is a Hugging Face id, taken from the local cache or downloaded.
    ``revision`` (branch, tag or commit) applies to Hugging Face ids only. Raises ModelNotFound;
    RefusedError for a revision of anything else.
    """
    embedded = EMBEDDED.get(name)
    folder = Path(name).expanduser()
    if revision is not None and (embedded is not None or folder.is_dir()):
        what = "the embedded model" if embedded is not None else "the folder"
        raise RefusedError(
            Refused("revision", f"{what} {name!r} has no revisions; leave revision out")
        )
    if embedded is not None:
        return _embedded_folder(name, embedded)
    looked = [f"the embedded models ({', '.join(EMBEDDED)})", f"the folder {str(folder)!r}"]
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return folder
        raise ModelNotFound(
            f"model: the folder {str(folder)!r} exists but has no config.json; give the folder "
            "that holds config.json and the *.safetensors files"
        )
    if not _HUB_ID.fullmatch(name):
        raise ModelNotFound(_message(name, looked, "it is not a Hugging Face id (owner/name)"))
    return _from_hub(name, revision, looked)


def _embedded_folder(name: str, folder_name: str) -> Path:
    folder = Path(__file__).parent.parent / "models" / folder_name
    if not (folder / "config.json").is_file():
        # In a source checkout the module's own folder may be reached through a link.
        folder = Path(__file__).resolve().parent.parent / "models" / folder_name
    if (folder / "config.json").is_file():
        return folder
    raise ModelNotFound(
        f"model: the embedded model {name!r} is missing from this installation (looked for "
        f"{str(folder / 'config.json')!r}); install outrider again"
    )


def _from_hub(name: str, revision: str | None, looked: list[str]) -> Path:
    where = f"{name} at {revision}" if revision else name
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise ModelNotFound(
            _message(name, looked, "huggingface_hub is not installed (pip install huggingface_hub)")
        ) from None
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
        raise ModelNotFound(_message(name, looked, reason)) from None


def _message(name: str, looked: list[str], reason: str) -> str:
    return (
        f"model: {name!r} was not found. Looked for: {'; '.join(looked)}. Reason: {reason}. "
        "Give `pycoder`, a folder with config.json and *.safetensors, or a Hugging Face id that "
        "is cached or reachable (HF_TOKEN for gated models; HF_HUB_OFFLINE must be unset)."
    )
