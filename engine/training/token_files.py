"""From files to token ids: text, JSON lines and ready-made ids, split by the hash of a document."""

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

Tokens = NDArray[np.int32]
_TEXT = (".txt", ".md", ".py", ".pyi", ".pyx", ".rst")
_READ = (*_TEXT, ".jsonl", ".npy", ".bin")
_BATCH = 2000


class DataError(ValueError):
    """Training data that cannot be used; the message names the file."""


class Split(NamedTuple):
    """Token streams int32[n], documents joined by EOS."""

    train: Tokens
    selection: Tokens


class _Line(msgspec.Struct):
    """A line of a JSON lines file; other keys are ignored."""

    text: str | None = None
    prompt: str | None = None


def which_split(text: str, selection: Sequence[int], excluded: Sequence[int]) -> str:
    """ "train", "selection" or "excluded", by the first byte of the SHA-1 of ``text``."""
    first = hashlib.sha1(text.encode(), usedforsecurity=False).digest()[0]
    if first in excluded:
        return "excluded"
    return "selection" if first in selection else "train"


def read_split(
    sources: Sequence[str],
    tokenizer: Tokenizer | None,
    eos: int,
    vocab_size: int,
    selection: Sequence[int],
    excluded: Sequence[int],
) -> Split:
    """All of ``sources``: documents by their hash, files of ids to ``train``.

    Raises DataError, also for ids that are not below ``vocab_size``.
    """
    parts: dict[str, list[Tokens]] = {"train": [], "selection": [], "excluded": []}
    for path in _files(sources):
        if path.suffix in (".npy", ".bin"):
            parts["train"].append(read_ids(path, vocab_size))
            continue
        if tokenizer is None:
            raise DataError(f"{path}: text needs the target's tokenizer.json, which it lacks")
        for texts in _batches(_documents(path)):
            # Tokenizers releases the interpreter and uses all cores for a batch.
            for text, encoding in zip(texts, tokenizer.encode_batch(texts), strict=True):
                ids = np.array([*encoding.ids, eos], dtype=np.int32)
                parts[which_split(text, selection, excluded)].append(ids)
    train, kept = (_joined(parts[name]) for name in ("train", "selection"))
    for ids in (train, kept):
        if len(ids) and int(ids.max()) >= vocab_size:
            raise DataError(
                f"data: token id {int(ids.max())} is outside the target's vocabulary of "
                f"{vocab_size}; the tokenizer belongs to another model"
            )
    return Split(train, kept)


def read_ids(path: Path, vocab_size: int) -> Tokens:
    """A flat file of token ids: .npy of any integer type, .bin of uint16. Raises DataError."""
    try:
        if path.suffix == ".npy":
            loaded = np.load(path, allow_pickle=False)
        else:
            loaded = np.fromfile(path, dtype=np.uint16)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as token ids ({error})") from None
    if loaded.ndim != 1 or not np.issubdtype(loaded.dtype, np.integer):
        raise DataError(
            f"{path}: must be a flat array of integers, is {loaded.dtype}{loaded.shape}"
        )
    ids = cast(Tokens, loaded.astype(np.int32))
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise DataError(f"{path}: has token ids outside the vocabulary of {vocab_size}")
    return ids


def _files(sources: Sequence[str]) -> Iterator[Path]:
    for source in sources:
        path = Path(source).expanduser()
        if path.is_dir():
            found = _files_below(path)
            if not found:
                raise DataError(f"data: no file of {', '.join(_READ)} in the folder {path}")
            yield from found
        elif path.is_file():
            yield path
        else:
            raise DataError(f"data: {source!r} is no file and no folder")


def _files_below(folder: Path) -> list[Path]:
    """Every file that can be read, links followed; JSON lines only if they begin with a text, which
    logs do not. A folder that several paths lead to, be it a link back up, is read once.
    """
    seen = {folder.resolve()}
    found: list[Path] = []
    for name, inner, files in os.walk(folder, followlinks=True):
        here = Path(name)
        found += [here / file for file in files if (here / file).suffix in _READ]
        new = {(here / sub).resolve(): sub for sub in sorted(inner, reverse=True)}
        inner[:] = sorted(sub for real, sub in new.items() if real not in seen)
        seen.update(new)
    return sorted(path for path in found if path.is_file() and not _is_log(path))


def _is_log(path: Path) -> bool:
    if path.suffix != ".jsonl":
        return False
    with path.open("rb") as lines:
        first = next((line for line in lines if line.strip()), b"")
    with contextlib.suppress(msgspec.MsgspecError):  # what is wrong with it is said when it is read
        return msgspec.json.decode(first, type=_Line) == _Line()
    return False


def _documents(path: Path) -> Iterator[str]:
    if path.suffix != ".jsonl":
        try:
            yield path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read as UTF-8 text ({error})") from None
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = msgspec.json.decode(line, type=_Line)
            except msgspec.MsgspecError as error:
                raise DataError(f"{path}: line {number}: {error}") from None
            text = record.text if record.text is not None else record.prompt
            if text is None:
                raise DataError(f'{path}: line {number}: has neither "text" nor "prompt"')
            yield text


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in documents:
        batch.append(text)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _joined(parts: list[Tokens]) -> Tokens:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
