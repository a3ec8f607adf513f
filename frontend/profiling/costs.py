"""``outrider profile sps``: verify steps of every size, and the cost table made of them."""

from collections.abc import Callable, Sequence
from typing import Literal

from ...engine_core.config import EngineConfig
from ...engine_core.sps_fit import Cell, fit_additive, fit_steps
from ...engine_core.sps_table import AdditiveTable, StepTable
from ...engine_core.step_bench import StepBenchReport, StepBenchSpec
from ...engine_core.table_files import TableError
from ..errors import OutriderError

Form = Literal["additive", "step"]
_TO = ((8, 2), (64, 8), (128, 16), (256, 32))  # batch sizes by steps of so many, up to each


def sweep(most: int) -> tuple[int, ...]:
    """Batch sizes to measure: 1, 2, 4, 8, by 8 to 64, by 16 to 128, by 32 to 256, then by 64; and
    ``most``, the last one.
    """
    sizes = [1]
    while sizes[-1] < most:
        last = sizes[-1]
        step = next((step for end, step in _TO if last < end), 64)
        sizes.append(2 * last if last < 8 else last + step)
    return (*sizes[:-1], most)


def profile_spec(
    config: EngineConfig, most: int, gamma: int, context: int, steps: int
) -> StepBenchSpec:
    """Every batch size of the sweep with 0 to ``gamma`` drafts a request."""
    return StepBenchSpec(
        config=config,
        batch_sizes=sweep(most),
        contexts=(context,),
        # Without 0, which would time the core's loop, too; the plain step is timed all the same.
        draft_lengths=tuple(range(1, gamma + 1)),
        steps=steps,
    )


def cells_of(report: StepBenchReport) -> list[Cell]:
    """The measured steps."""
    return [
        Cell(row.batch_size, row.batch_size * (1 + row.draft_length), row.wall_ms * 1e-3)
        for row in report.rows
        if row.mode == "device_only"
    ]


def fit_costs(cells: Sequence[Cell], form: Form) -> AdditiveTable | StepTable:
    """Raises OutriderError for cells that make no table."""
    fit: Callable[[Sequence[Cell]], AdditiveTable | StepTable]
    fit = fit_additive if form == "additive" else fit_steps
    try:
        return fit(cells)
    except TableError as error:
        raise OutriderError(f"the measured steps make no table: {error}") from None


def costs_text(cells: Sequence[Cell], table: AdditiveTable | StepTable) -> str:
    """A line a cell: what was measured, and what the table says."""
    lines = [f"{'requests':>8}{'tokens':>8}{'measured':>12}{'table':>12}"]
    worst = 0.0
    for cell in sorted(cells):
        said = table.seconds(cell.requests, cell.batch_tokens)
        worst = max(worst, abs(said / cell.seconds - 1.0))
        lines.append(
            f"{cell.requests:>8}{cell.batch_tokens:>8}{cell.seconds * 1e3:>9.3f} ms"
            f"{said * 1e3:>9.3f} ms"
        )
    lines.append(f"the table is off by {worst:.1%} at most")
    return "\n".join(lines)
