"""Tokenizing external corpora in the frontend: from a JSONL file, or inline documents."""

from collections.abc import Sequence
from typing import NamedTuple

from ..engine_core.refusal import Refused, RefusedError
from .corpus_file import CorpusFileError, read_corpus
from .tokenizer import Tokenizer


class Corpus(NamedTuple):
    """Tokenized documents; ``token_count`` includes a separator between two of them."""

    documents: list[list[int]]
    token_count: int
    note: str = ""


def corpus_from_file(path: str, tokenizer: Tokenizer, max_tokens: int) -> Corpus:
    """Read a corpus file. Raises RefusedError for one that is broken or over ``max_tokens``."""
    try:
        documents = read_corpus(path, lambda text: tokenizer.encode(text, False), max_tokens)
    except CorpusFileError as error:
        raise RefusedError(Refused("file_path", str(error))) from None
    return Corpus(documents, _count(documents))


def corpus_from_texts(texts: Sequence[str], tokenizer: Tokenizer, max_tokens: int) -> Corpus:
    """Tokenize inline documents, up to the first that would exceed ``max_tokens``.

    Raises RefusedError when nothing is left.
    """
    documents: list[list[int]] = []
    total = 0
    for number, text in enumerate(texts):
        tokens = tokenizer.encode(text, False)
        if not tokens:
            continue
        total += len(tokens) + (1 if documents else 0)
        if total > max_tokens:
            note = (
                f"Truncated: only {number} of {len(texts)} documents fit into {max_tokens} tokens."
            )
            return Corpus(_some(documents), _count(documents), note)
        documents.append(tokens)
    return Corpus(_some(documents), _count(documents))


def _some(documents: list[list[int]]) -> list[list[int]]:
    if documents:
        return documents
    raise RefusedError(Refused("documents", "hold no token that fits; send at least one text"))


def _count(documents: list[list[int]]) -> int:
    return sum(map(len, documents)) + max(len(documents) - 1, 0)
