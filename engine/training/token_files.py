"""From files to token ids: text, JSON lines and ready-made ids, split by the hash of a document."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

Tokens = NDArray[np.int32]
_TEXT = (".txt", ".md", ".py", ".pyi", ".pyx", ".rst")
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
    """"train", "selection" or "excluded", by the first byte of the SHA-1 of ``text``."""
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
        raise DataError(f"{path}: must be a flat array of integers, is {loaded.dtype}{loaded.shape}")
    ids = cast(Tokens, loaded.astype(np.int32))
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise DataError(f"{path}: has token ids outside the vocabulary of {vocab_size}")
    return ids


def _files(sources: Sequence[str]) -> Iterator[Path]:
    for source in sources:
        path = Path(source).expanduser()
        if path.is_dir():
            wanted = (*_TEXT, ".jsonl", ".npy", ".bin")
            found = sorted(p for p in path.rglob("*") if p.is_file() and p.suffix in wanted)
            if not found:
                raise DataError(f"data: no file of {', '.join(wanted)} in the folder {path}")
            yield from found
        elif path.is_file():
            yield path
        else:
            raise DataError(f"data: {source!r} is no file and no folder")


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
