"""Which matmul runs a linear layer of few rows: measured once a device and kept on disk.

The key is the weight's shape, the tier of rows (a tile's height), the dtype and the epilogue. A
tier has one choice, so that a row's bits do not depend on how many rows of the tier a step has.
What a choice is worth depends on its neighbours, into whose time its weights' loads reach: each is
measured among the choices made so far.
"""

import contextlib
import math
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from triton.errors import TritonError

from ..kernels.linear_config import MAX_ROWS, SkinnyConfig, row_tier
from ..kernels.linear_gpu import LinearConfig
from ..kernels.stream_config import StreamConfig

CACHE_VARIABLE = "OUTRIDER_CACHE_DIR"
_VERSION = 4
# cuBLAS has to be so much faster: it takes no part in dependent launch, so that in a step the norm
# ahead of it and the kernel behind it, which are not measured here, wait in full. For a choice by
# 0.3 % of a layer's matmuls a Qwen3-8B step of 8 rows paid 4 %. With more than MARGIN_ROWS rows
# arithmetic takes over from the weights' loads, and what was measured is what a step takes.
CUBLAS_MARGIN = 0.03
MARGIN_ROWS = 64

# What a configuration that cannot run raises.
REFUSALS = (RuntimeError, ValueError, TritonError)

Epilogue = Literal["none", "residual", "silu_mul"]


class GemmKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A weight [n, k] with up to ``m_tier`` rows of input."""

    n: int
    k: int
    m_tier: int
    dtype: str
    epilogue: Epilogue = "none"


class CublasChoice(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="cublas"
):
    """The library's matmul, and a second kernel where the epilogue needs one."""


class TritonChoice(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="triton"
):
    """The weight-streaming kernel; the fields are ``SkinnyConfig``'s."""

    block_n: int
    block_k: int
    split_k: int
    warps: int
    stages: int
    tma: bool

    def __post_init__(self) -> None:
        self.config()  # refuses what no kernel can run

    @classmethod
    def of(cls, config: SkinnyConfig) -> "TritonChoice":
        """The choice of ``config``."""
        return cls(**{name: getattr(config, name) for name in cls.__struct_fields__})

    def config(self) -> SkinnyConfig:
        """The kernel's configuration. Raises ValueError on values no kernel can run."""
        return SkinnyConfig(**msgspec.structs.asdict(self))


class StreamChoice(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="stream"
):
    """The Hopper kernel; the fields are ``StreamConfig``'s."""

    tiles: int
    block_k: int
    stages: int
    warps: int
    split: int
    programs: int

    def __post_init__(self) -> None:
        self.config()  # refuses what no kernel can run

    @classmethod
    def of(cls, config: StreamConfig) -> "StreamChoice":
        """The choice of ``config``."""
        return cls(**{name: getattr(config, name) for name in cls.__struct_fields__})

    def config(self) -> StreamConfig:
        """The kernel's configuration. Raises ValueError on values no kernel can run."""
        return StreamConfig(**msgspec.structs.asdict(self))


class GemmEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The choice for a key, and the microseconds of its layer's matmuls with it and with cuBLAS."""

    key: GemmKey
    choice: CublasChoice | TritonChoice | StreamChoice
    microseconds: float
    cublas_microseconds: float


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the measurements depend on besides the key."""

    device: str
    torch: str
    triton: str

    def file_name(self) -> str:
        """A file name of the three, other characters than letters, digits, . and + replaced."""
        parts = (re.sub(r"[^A-Za-z0-9.+]+", "_", p) for p in (self.device, self.torch, self.triton))
        return "-".join(parts) + ".json"


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    machine: Machine
    entries: list[GemmEntry]


Choices = Mapping[GemmKey, LinearConfig | None]
# Seconds of the layer of a key's matmul: with a configuration, or with cuBLAS where it is None, and
# with the choices of the other matmuls.
Measure = Callable[[GemmKey, LinearConfig | None, Choices], float]
# The configurations of a key that are worth measuring.
Candidates = Callable[[GemmKey], Sequence[LinearConfig]]


def cache_directory() -> Path:
    """Where measured tables lie: ``gemm`` in $OUTRIDER_CACHE_DIR or in ~/.cache/outrider."""
    root = os.environ.get(CACHE_VARIABLE)
    return (Path(root) if root else Path.home() / ".cache" / "outrider") / "gemm"


class GemmTable:
    """The choices of one machine; a key without one goes to cuBLAS."""

    def __init__(self, machine: Machine, directory: Path | None = None) -> None:
        """Read the file of ``machine``; one that is damaged or stale is ignored with a warning."""
        self._machine = machine
        self.path = (directory or cache_directory()) / machine.file_name()
        self._entries: dict[GemmKey, GemmEntry] = {}
        try:
            self._entries = {entry.key: entry for entry in _read(self.path, machine)}
        except RuntimeError as reason:
            warnings.warn(
                f"the matmul table {self.path} is ignored and measured again: {reason}",
                RuntimeWarning,
                stacklevel=2,
            )

    def entries(self) -> list[GemmEntry]:
        """Everything known, in the order it was measured."""
        return list(self._entries.values())

    def config(
        self, n: int, k: int, rows: int, dtype: str, epilogue: Epilogue = "none"
    ) -> LinearConfig | None:
        """The configuration for ``rows`` of input, None for cuBLAS."""
        if not 0 < rows <= MAX_ROWS:
            return None
        entry = self._entries.get(GemmKey(n, k, row_tier(rows), dtype, epilogue))
        return None if entry is None else _config(entry)

    def fill(self, keys: Iterable[GemmKey], candidates: Candidates, measure: Measure) -> int:
        """Measure the keys that have no entry and write the file; how many there were.

        A configuration that ``measure`` refuses (RuntimeError, ValueError or Triton's errors, such
        as too little shared memory) is left out. A file that cannot be written is a warning: the
        choices hold for this process.
        """
        keys = list(dict.fromkeys(keys))
        missing = [key for key in keys if key not in self._entries]
        if not missing:
            return 0
        choices: dict[GemmKey, LinearConfig | None] = {
            key: _first(key, candidates(key), measure) for key in missing
        }
        choices |= {key: _config(self._entries[key]) for key in keys if key in self._entries}
        for key in missing:
            self._entries[key] = _fastest(key, candidates(key), measure, choices)
            choices[key] = _config(self._entries[key])
        self._write()
        return len(missing)

    def _write(self) -> None:
        entries = dict(self._entries)
        with contextlib.suppress(RuntimeError):  # a file that is no use is replaced
            # What another process has measured meanwhile stays.
            entries = {entry.key: entry for entry in _read(self.path, self._machine)} | entries
        content = _File(_VERSION, self._machine, list(entries.values()))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Renamed into place: a reader sees the old file or the new one, never a part.
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=".gemm-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(msgspec.json.format(msgspec.json.encode(content), indent=1))
                os.replace(name, self.path)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            warnings.warn(f"the matmul table is not kept: {error}", RuntimeWarning, stacklevel=3)


def _config(entry: GemmEntry) -> LinearConfig | None:
    return None if isinstance(entry.choice, CublasChoice) else entry.choice.config()


def _first(
    key: GemmKey, candidates: Iterable[LinearConfig], measure: Measure
) -> LinearConfig | None:
    """What stands beside the others until it is the key's turn: one that runs, else cuBLAS."""
    for config in candidates:
        try:
            measure(key, config, {})
        except REFUSALS:
            continue
        return config
    return None


def _fastest(
    key: GemmKey, candidates: Iterable[LinearConfig], measure: Measure, others: Choices
) -> GemmEntry:
    cublas = measure(key, None, others)
    best, fastest = math.inf, None
    for config in candidates:
        try:
            seconds = measure(key, config, others)
        except REFUSALS:
            continue
        if seconds < best:
            best, fastest = seconds, config
    choice: CublasChoice | TritonChoice | StreamChoice
    margin = CUBLAS_MARGIN if key.m_tier <= MARGIN_ROWS else 0.0
    if fastest is None or cublas <= best * (1 - margin):
        best, choice = cublas, CublasChoice()
    elif isinstance(fastest, StreamConfig):
        choice = StreamChoice.of(fastest)
    else:
        choice = TritonChoice.of(fastest)
    return GemmEntry(key, choice, round(best * 1e6, 3), round(cublas * 1e6, 3))


def _read(path: Path, machine: Machine) -> list[GemmEntry]:
    """The entries in a file; RuntimeError says why it is no use."""
    try:
        content = msgspec.json.decode(path.read_bytes(), type=_File)
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RuntimeError(str(error)) from error
    if content.version != _VERSION:
        raise RuntimeError(f"version {content.version}, not {_VERSION}")
    if content.machine != machine:
        raise RuntimeError(f"measured on {content.machine}")
    return content.entries
