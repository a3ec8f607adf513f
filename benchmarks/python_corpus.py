"""Python sources of this machine as token ids, split by the hash of each file.

Every .py, .pyi and .pyx file of the standard library and of site-packages is read once, filtered as
models/pycoder-11m/RECIPE.md says, and encoded, by many processes. Files whose SHA-1 begins with the
validation byte are left out, those of the selection byte go to selection.npy; the rest, in a
shuffled order, goes to train.npy until it holds enough. Each file ends with EOS.

    python benchmarks/python_corpus.py --tokenizer models/pycoder-11m/tokenizer.json \
        --output work/corpus --megabytes 200
"""

import argparse
import glob
import hashlib
import json
import os
import random
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

VALIDATION, SELECTION, EOS = 7, 8, 0
ENDINGS = (".py", ".pyi", ".pyx")
# Machine-made files, and those that a model of this size learns nothing from.
SKIPPED_TOPS = ("nvidia", "cuda", "triton_kernels")
SKIPPED_PARTS = (
    "nvidia",
    "cuda",
    "_pytest/assertion",
    "idna",
    "pip/_vendor",
    "encodings",
    "unicode",
    "tests/data",
    "cupy_backends",
)
SMALLEST, LARGEST, LONGEST_LINE = 200, 400_000, 1000
CHUNK = 64


class Document(NamedTuple):
    digest: bytes
    size: int
    ids: NDArray[np.uint16]


def default_roots() -> list[str]:
    paths = sysconfig.get_paths()
    roots = [paths["stdlib"], paths["purelib"], paths["platlib"]]
    roots += glob.glob("/opt/*/lib/python3*/site-packages")
    roots += glob.glob("/opt/*/.venv/lib/python3*/site-packages")
    roots += glob.glob("/usr/lib/python3*")
    return list(dict.fromkeys(os.path.realpath(root) for root in roots if os.path.isdir(root)))


def source_files(roots: list[str]) -> Iterator[str]:
    for root in roots:
        for folder, folders, names in os.walk(root):
            relative = os.path.relpath(folder, root)
            top = relative.split(os.sep)[0].lower()
            if top.startswith(SKIPPED_TOPS) or any(part in relative for part in SKIPPED_PARTS):
                folders.clear()
                continue
            for name in names:
                if name.endswith(ENDINGS):
                    yield os.path.join(folder, name)


def read_source(path: str) -> str | None:
    """The text of a file that is fit to learn from."""
    try:
        if not SMALLEST <= os.path.getsize(path) <= LARGEST:
            return None
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError):
        return None
    if max(len(line) for line in text.split("\n")) > LONGEST_LINE:
        return None
    head = text[:20_000]
    return None if sum(map(str.isdigit, head)) > 0.25 * len(head) else text


_TOKENIZERS: dict[str, object] = {}


def encode_files(tokenizer_file: str, paths: list[str]) -> list[Document]:
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = _TOKENIZERS.get(tokenizer_file)
    if tokenizer is None:
        tokenizer = _TOKENIZERS[tokenizer_file] = Tokenizer.from_file(tokenizer_file)
    assert isinstance(tokenizer, Tokenizer)
    documents = []
    for path in paths:
        text = read_source(path)
        if text is None:
            continue
        digest = hashlib.sha1(text.encode(), usedforsecurity=False).digest()
        if digest[0] != VALIDATION:
            ids = np.array([*tokenizer.encode(text).ids, EOS], dtype=np.uint16)
            documents.append(Document(digest, len(text), ids))
    return documents


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--megabytes", type=float, default=200.0, help="text to learn from")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--roots", nargs="*", default=None)
    options = parser.parse_args()
    begun = time.monotonic()
    paths = sorted(source_files(options.roots or default_roots()))
    random.Random(0).shuffle(paths)
    print(f"{len(paths)} files found in {time.monotonic() - begun:.1f} s", flush=True)
    chunks = [paths[at : at + CHUNK] for at in range(0, len(paths), CHUNK)]
    seen: set[bytes] = set()
    parts: dict[bool, list[NDArray[np.uint16]]] = {True: [], False: []}
    size = 0
    wanted = options.megabytes * 1e6
    with ProcessPoolExecutor(options.processes) as pool:
        # Files of the selection are few: all chunks are read for them while text is wanted.
        for documents in pool.map(encode_files, [options.tokenizer] * len(chunks), chunks):
            for document in documents:
                if document.digest in seen:
                    continue
                seen.add(document.digest)
                selection = document.digest[0] == SELECTION
                parts[selection].append(document.ids)
                size += 0 if selection else document.size
            if size >= wanted:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    options.output.mkdir(parents=True, exist_ok=True)
    made = {}
    for name, selection in (("train", False), ("selection", True)):
        ids = np.concatenate(parts[selection] or [np.empty(0, dtype=np.uint16)])
        np.save(options.output / f"{name}.npy", ids)
        made[name] = {"files": len(parts[selection]), "tokens": len(ids)}
    report = {**made, "megabytes": size / 1e6, "seconds": round(time.monotonic() - begun, 1)}
    (options.output / "corpus.json").write_text(json.dumps(report) + "\n")
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
