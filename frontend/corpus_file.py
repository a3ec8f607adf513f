"""External corpus files: JSON lines, each a string that is one document."""

from collections.abc import Callable
from pathlib import Path

import msgspec


class CorpusFileError(ValueError):
    """A corpus file that cannot be used; the text names the file, the line and the remedy."""


def read_corpus(
    path: str | Path, encode: Callable[[str], list[int]], max_tokens: int
) -> list[list[int]]:
    """Read and tokenize a corpus file; blank lines and empty documents are skipped.

    `encode` must add no special tokens. `max_tokens` bounds the documents' tokens with one
    separator between two of them. Raises CorpusFileError; nothing is cut off silently.
    """
    documents: list[list[int]] = []
    total = 0
    for number, text in _read_lines(Path(path)):
        tokens = encode(text)
        if not tokens:
            continue
        total += len(tokens) + (1 if documents else 0)
        if total > max_tokens:
            raise CorpusFileError(
                f"{path}, line {number}: the corpus exceeds {max_tokens} tokens; shorten it or "
                "raise --speculative-ngram-external-corpus-max-tokens"
            )
        documents.append(tokens)
    if not documents:
        raise CorpusFileError(f"{path}: no document with a token in it")
    return documents


def _read_lines(path: Path) -> list[tuple[int, str]]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CorpusFileError(f"{path}: cannot be read: {error.strerror}") from error
    return [
        (number, _read_document(path, number, line))
        for number, line in enumerate(raw.split(b"\n"), start=1)
        if line.strip()
    ]


def _read_document(path: Path, number: int, line: bytes) -> str:
    try:
        return msgspec.json.decode(line, type=str)
    except (msgspec.ValidationError, UnicodeDecodeError) as error:
        raise CorpusFileError(
            f"{path}, line {number}: a line must be one JSON string: {error}"
        ) from error
    except msgspec.DecodeError as error:
        raise CorpusFileError(f"{path}, line {number}: bad JSON: {error}") from error
