"""Small tables kept as JSON files: read whole, checked whole, never left half written."""

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import msgspec

_MOST_TOKENS = 1 << 40

S = TypeVar("S", bound=msgspec.Struct)


class TableError(ValueError):
    """A table that cannot be used; the text names the file, where there is one, and the field."""


def read_bytes(path: str) -> bytes:
    """The file's bytes. Raises TableError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise TableError(f"{path}: cannot be read: {error.strerror}") from None


def decode_table(path: str, data: bytes, kind: type[S]) -> S:
    """The table that ``data``, of ``path``, holds; fields that ``kind`` lacks are no concern.

    Raises TableError.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$.")
        field = place.rstrip("`")
        raise TableError(f"{path}: {field + ': ' if field else ''}{reason}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TableError(f"{path}: is no JSON: {error}") from None


def write_table(path: str, table: msgspec.Struct) -> None:
    """Write the table; a reader sees the old file or the new one. Raises OSError."""
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(table)) + b"\n")
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def check_rising(field: str, values: Sequence[float], least: float) -> None:
    """Raises TableError unless ``values`` rise strictly from ``least`` or more, and are some."""
    if not values:
        raise TableError(f"{field}: is empty; at least one value is needed")
    if not values[0] >= least:
        raise TableError(f"{field}: begins with {values[0]}; must be {least} or more")
    for low, high in pairwise(values):
        if not low < high:
            raise TableError(f"{field}: {high} follows {low}; values must rise, each but once")


def check_sizes(field: str, values: Sequence[float]) -> None:
    """Raises TableError for numbers of requests or tokens that no step has."""
    for value in values:
        if value > _MOST_TOKENS:
            raise TableError(f"{field}: {str(value)[:20]}… is no size of a step")


def check_length(field: str, values: Sequence[float], other: str, length: int) -> None:
    """Raises TableError unless there are ``length`` values, as there are of ``other``."""
    if len(values) != length:
        raise TableError(f"{field}: has {len(values)} values, {other} has {length}")
