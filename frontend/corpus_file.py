"""External corpus files: JSON lines, each a string that is one document."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec

MAX_BYTES_PER_TOKEN = 64  # a file above this many bytes for each allowed token is not read


class CorpusFileError(ValueError):
    """A corpus file that cannot be used; the text names the file, the line and the remedy."""


def read_corpus(
    path: str | Path, encode: Callable[[str], list[int]], max_tokens: int
) -> list[list[int]]:
    """Read and tokenize a corpus file; blank lines and empty documents are skipped.

    `encode` must add no special tokens. `max_tokens` bounds the documents' tokens with one
    separator between two of them, and with MAX_BYTES_PER_TOKEN what is read. Raises
    CorpusFileError; nothing is cut off silently.
    """
    documents: list[list[int]] = []
    total = 0
    for number, text in _read_lines(Path(path), max_tokens * MAX_BYTES_PER_TOKEN):
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


def _read_lines(path: Path, max_bytes: int) -> list[tuple[int, str]]:
    try:
        raw = _read_regular(path, max_bytes + 1)
    except OSError as error:
        raise CorpusFileError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > max_bytes:
        raise CorpusFileError(
            f"{path}: the file exceeds {max_bytes} bytes; shorten it or raise "
            "--speculative-ngram-external-corpus-max-tokens"
        )
    return [
        (number, _read_document(path, number, line))
        for number, line in enumerate(raw.split(b"\n"), start=1)
        if line.strip()
    ]


def _read_regular(path: Path, limit: int) -> bytes:
    """At most ``limit`` bytes. Opening waits for nothing, neither for a pipe's other end."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise CorpusFileError(f"{path}: cannot be read: not a regular file; name a file")
        return file.read(limit)


def _read_document(path: Path, number: int, line: bytes) -> str:
    try:
        return msgspec.json.decode(line, type=str)
    except (msgspec.ValidationError, UnicodeDecodeError) as error:
        raise CorpusFileError(
            f"{path}, line {number}: a line must be one JSON string: {error}"
        ) from error
    except msgspec.DecodeError as error:
        raise CorpusFileError(f"{path}, line {number}: bad JSON: {error}") from error
