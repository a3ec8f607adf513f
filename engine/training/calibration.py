"""STS for a draft with a confidence head: fitted to half the selection's rows, tried on the rest.

The file lies in the draft's folder; engine_core/sts_table.py says what it means.
"""

from pathlib import Path

import msgspec
import numpy as np

from ...engine_core.step_times import F64
from ...engine_core.sts_table import STS_FILE, StsTable, calibration_error, confidence, fit_sts
from ...engine_core.table_files import TableError
from .accept_length import whole_drafts
from .batches import RowSource
from .on_policy import Say
from .recipe import Confident

_ENOUGH = 20_000
_Parts = tuple[list[F64], list[F64]]  # logits, accepted prefixes


def calibrate(
    recipe: Confident, source: RowSource, rows: int, batch_rows: int, say: Say
) -> StsTable | None:
    """The table, whose errors are those of the rows it was not fitted to; None if there is none to
    be had, which is said. Samples are of every draft that lies in own text, or in any without such.
    """
    fitted: _Parts = ([], [])
    held: _Parts = ([], [])
    rows = min(len(source), rows)
    size = min(rows, batch_rows)
    for first in range(0, rows - rows % size, size):
        batch = source.take(first, size)
        found = recipe.confidences(batch)
        counted = whole_drafts(batch.own, found.origin, *found.agree.shape[1:])
        accepted = found.agree.cpu().cumprod(-1)
        for row in range(size):
            kept = counted[row]
            half = held if (first + row) % 2 else fitted
            half[0].append(found.logits[row].cpu()[kept].double().numpy())
            half[1].append(accepted[row][kept].double().numpy())
    if not fitted[0] or not held[0]:
        say("sts: not fitted: the selection has one row only")
        return None
    parts = [np.concatenate(part) for half in (fitted, held) for part in half]
    try:
        table = fit_sts(parts[0], parts[1])
        before = held_out_errors(parts[2], parts[3], (1.0,) * table.gamma)
        after = held_out_errors(parts[2], parts[3], table.temperatures)
    except TableError as error:
        say(f"sts: not fitted: {error}")
        return None
    made = msgspec.structs.replace(
        table, dataset="rows of the selection", ece_before=before, ece_after=after
    )
    total = len(parts[0]) + len(parts[2])
    few = "" if total >= _ENOUGH else f", fewer than the {_ENOUGH} that make it reliable"
    say(f"sts: {total} positions{few}; expected calibration error on the half not fitted to")
    for place, (temperature, *errors) in enumerate(
        zip(made.temperatures, before, after, strict=True)
    ):
        text = " -> ".join(f"{error:.4f}" for error in errors)
        say(f"sts: draft {place + 1}: temperature {temperature:.3f}: {text}")
    return made


def held_out_errors(
    logits: F64, accepted: F64, temperatures: tuple[float, ...]
) -> tuple[float, ...]:
    """Expected calibration error of the survival at each position. Raises TableError."""
    if not len(logits):
        raise TableError("logits: there are no samples")
    survival = confidence(logits, np.array(temperatures)).cumprod(axis=1)
    return tuple(calibration_error(survival[:, k], accepted[:, k]) for k in range(logits.shape[1]))


def write_sts(folder: Path, table: StsTable | None) -> None:
    """Write it, or remove one that is of other weights."""
    path = folder / STS_FILE
    if table is None:
        path.unlink(missing_ok=True)
    else:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
