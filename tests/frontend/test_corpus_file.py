"""Corpus files: JSON strings line by line, every refusal with its line."""

import os
from pathlib import Path

import pytest

from outrider.frontend.corpus_file import CorpusFileError, read_corpus


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def write(folder: Path, data: bytes) -> Path:
    path = folder / "corpus.jsonl"
    path.write_bytes(data)
    return path


def test_strings_are_documents_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    path = write(tmp_path, '"ab"\n\n  \r\n""\n"\\u00e9\u00e9"\r\n'.encode())
    assert read_corpus(path, encode, 100) == [[97, 98], [233, 233]]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'"a"\n{"text": "b"}\n', "line 2: a line must be one JSON string"),
        (b'"a"\n\n3\n', "line 3: a line must be one JSON string"),
        (b'"a"\n"b\n', "line 2: bad JSON"),
        (b'"a" "b"\n', "line 1: bad JSON"),
        (b'"\xff"\n', "line 1:"),
        (b'"a"\n"bcd"\n', "line 2: the corpus exceeds 4 tokens"),
        (b'\n""\n', "no document"),
        (b"", "no document"),
    ],
)
def test_refusals_name_the_line(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(CorpusFileError, match=message):
        read_corpus(write(tmp_path, data), encode, 4)


def test_separators_count(tmp_path: Path) -> None:
    path = write(tmp_path, b'"a"\n"b"\n')
    assert read_corpus(path, encode, 3) == [[97], [98]]
    with pytest.raises(CorpusFileError, match="exceeds 2 tokens"):
        read_corpus(path, encode, 2)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusFileError, match=r"nowhere\.jsonl: cannot be read"):
        read_corpus(tmp_path / "nowhere.jsonl", encode, 2)


def test_what_is_not_a_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises(CorpusFileError, match=r"cannot be read: (not a regular|Is a dir)"):
            read_corpus(path, encode, 2)


def test_a_file_far_above_the_bound_is_not_read_to_its_end(tmp_path: Path) -> None:
    assert read_corpus(write(tmp_path, b'"a"' + b" " * 61), encode, 1) == [[97]]
    with pytest.raises(CorpusFileError, match="exceeds 64 bytes; shorten it or raise"):
        read_corpus(write(tmp_path, b'"a"' + b" " * 62), encode, 1)
