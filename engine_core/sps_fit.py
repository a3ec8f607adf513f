"""Cost tables of measured steps: cells of (requests, batch tokens, seconds)."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .nonnegative_fit import fit_nonnegative
from .sps_table import AdditiveTable, StepTable
from .step_times import F64, knot_sizes
from .table_files import TableError

TOKEN_BIN = 64  # cells whose batch tokens lie in one bin share a probe of the additive form;
_SMALL_BINS = knot_sizes(TOKEN_BIN)  # below, where each token counts, bins end at these
MIN_CELLS = 4


class Cell(NamedTuple):
    """A measured step: ``batch_tokens`` are ``requests`` and their drafts."""

    requests: int
    batch_tokens: int
    seconds: float


def fit_steps(cells: Sequence[Cell]) -> StepTable:
    """Form A: a probe for each number of batch tokens, its median time; more tokens never count as
    faster, as in ``StepTimes``. Raises TableError.
    """
    _check(cells, 1)
    by_tokens: defaultdict[int, list[float]] = defaultdict(list)
    for cell in cells:
        by_tokens[cell.batch_tokens].append(cell.seconds)
    sizes = sorted(by_tokens)
    medians = [float(np.median(by_tokens[size])) for size in sizes]
    seconds = np.maximum.accumulate(medians)
    return StepTable(tuple(sizes), tuple(float(1.0 / s) for s in seconds), sizes[-1])


def fit_additive(cells: Sequence[Cell]) -> AdditiveTable:
    """Form B, by least squares over what the table itself would answer for each cell, relative to
    what was measured; neither part ever falls.

    Probes are the batch sizes, and the most batch tokens of each bin: 64 wide, the first of them
    split. The parts of the first
    ones are 0: that cell's time is the bias. Raises TableError for fewer than four cells, or cells
    that do not tell the two parts apart.
    """
    _check(cells, MIN_CELLS)
    requests = np.array([cell.requests for cell in cells], dtype=np.float64)
    tokens = np.array([cell.batch_tokens for cell in cells], dtype=np.float64)
    seconds = np.array([cell.seconds for cell in cells], dtype=np.float64)
    bs_probes = np.unique(requests)
    bins = _bins(tokens)
    m_probes = np.array([float(tokens[bins == b].max()) for b in np.unique(bins)])
    design = np.hstack(
        [
            np.ones((len(cells), 1)),
            _rises(requests, bs_probes),
            _rises(tokens, m_probes),
        ]
    )
    if np.linalg.matrix_rank(design) < design.shape[1]:
        raise TableError(
            f"cells: {len(cells)} do not tell what requests cost from what tokens cost; measure "
            "each batch size with more draft lengths"
        )
    solved = fit_nonnegative(design / seconds[:, None], np.ones(len(cells)))
    alpha, theta = (np.cumsum(part) for part in np.split(solved[1:], [len(bs_probes) - 1]))
    return AdditiveTable(
        float(solved[0]),
        tuple(int(n) for n in bs_probes),
        (0.0, *map(float, alpha)),
        tuple(int(m) for m in m_probes),
        (0.0, *map(float, theta)),
    )


def _bins(tokens: F64) -> F64:
    """The number of each size's bin; they rise with the sizes."""
    small: F64 = np.searchsorted(_SMALL_BINS, tokens).astype(np.float64)
    return np.where(tokens <= TOKEN_BIN, small, len(_SMALL_BINS) + np.ceil(tokens / TOKEN_BIN))


def _rises(values: F64, probes: F64) -> F64:
    """float64[values, probes - 1]: how much of each rise, from one probe to the next, linear
    interpolation adds up at each value.
    """
    rises = [np.interp(values, probes, rise) for rise in np.tri(len(probes)).T[1:]]
    return np.array(rises).reshape(len(rises), len(values)).T


def _check(cells: Sequence[Cell], least: int) -> None:
    if len(cells) < least:
        raise TableError(f"cells: {len(cells)} were measured; at least {least} are needed")
    for cell in cells:
        if not 1 <= cell.requests <= cell.batch_tokens or not 0.0 < cell.seconds < float("inf"):
            raise TableError(f"cells: {cell} is no step of some requests' tokens and seconds")
