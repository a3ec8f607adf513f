"""``outrider profile sts``: samples of a confidence head, and the table fitted to them."""

import zipfile
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...engine_core.sts_table import StsTable, fit_sts
from ...engine_core.table_files import TableError
from ..flags import UsageError

_FIELDS = ("logits", "prefix_mask")
Array = npt.NDArray[np.float64]


def fit_files(paths: Sequence[str], bins: int, gamma: int | None, dataset: str | None) -> StsTable:
    """Fit a table to the samples of all files, which must have ``gamma`` positions, if given.

    Raises UsageError naming the file and the field.
    """
    shards = [_read(path) for path in paths]
    first = shards[0][0].shape
    for path, (logits, _) in zip(paths, shards, strict=True):
        wanted = first[1:] if gamma is None else (gamma,)
        if logits.shape[1:] != wanted:
            raise UsageError(
                f"--logits: {path}: logits: is {list(logits.shape)}; there must be "
                f"{list(wanted)} positions"
            )
    logits, mask = (np.concatenate(parts) for parts in zip(*shards, strict=True))
    try:
        return fit_sts(logits, mask, bins, dataset)
    except TableError as error:
        raise UsageError(f"--logits: {error}") from None


def _read(path: str) -> tuple[Array, Array]:
    """Logits and prefix mask, both float64[n, gamma]."""
    try:
        file = np.load(path, allow_pickle=False)
    except OSError as error:
        raise UsageError(f"--logits: cannot read {path!r}: {error.strerror or error}") from None
    except (ValueError, EOFError, zipfile.BadZipFile):
        raise UsageError(f"--logits: {path!r} is no .npz file") from None
    if not isinstance(file, np.lib.npyio.NpzFile):
        raise UsageError(f"--logits: {path!r} holds one array; must be an .npz of {_both()}")
    with file:
        missing = [name for name in _FIELDS if name not in file.files]
        if missing:
            raise UsageError(f"--logits: {path}: {missing[0]}: missing; must hold {_both()}")
        logits, mask = (_numbers(path, name, file) for name in _FIELDS)
    if logits.ndim != 2 or logits.shape != mask.shape:
        raise UsageError(
            f"--logits: {path}: {_both()} must be [samples, positions], are {list(logits.shape)} "
            f"and {list(mask.shape)}"
        )
    return logits, mask


def _numbers(path: str, name: str, file: "np.lib.npyio.NpzFile") -> Array:
    try:
        return np.asarray(file[name], dtype=np.float64)
    except (ValueError, TypeError, OSError, zipfile.BadZipFile) as error:
        raise UsageError(f"--logits: {path}: {name}: cannot be read: {error}") from None


def _both() -> str:
    return " and ".join(_FIELDS)


def calibration_text(table: StsTable) -> str:
    """A line a position: its temperature, and the error before and after."""
    lines = [
        f"{table.num_samples} samples of {table.gamma} draft positions",
        f"{'position':<10}{'temperature':>12}{'ECE before':>12}{'ECE after':>12}",
    ]
    parts = zip(table.temperatures, table.ece_before or (), table.ece_after or (), strict=True)
    for position, (temperature, before, after) in enumerate(parts):
        lines.append(f"{position:<10}{temperature:>12.4f}{before:>12.4f}{after:>12.4f}")
    return "\n".join(lines)
