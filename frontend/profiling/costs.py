"""``outrider profile sps``: verify steps of every size, and the cost table made of them."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from ...engine_core.config import EngineConfig
from ...engine_core.sps_fit import Cell, fit_additive, fit_steps
from ...engine_core.sps_table import AdditiveTable, StepTable
from ...engine_core.step_bench import StepBenchReport, StepBenchSpec, StepRow
from ...engine_core.table_files import TableError
from ..errors import OutriderError

Form = Literal["additive", "step"]
_TO = ((8, 2), (64, 8), (128, 16), (256, 32))  # batch sizes by steps of so many, up to each


def batch_sizes(most: int) -> tuple[int, ...]:
    """Batch sizes to measure: 1, 2, 4, 8, by 8 to 64, by 16 to 128, by 32 to 256, then by 64; and
    ``most``, the last one.
    """
    sizes = [1]
    while sizes[-1] < most:
        last = sizes[-1]
        step = next((step for end, step in _TO if last < end), 64)
        sizes.append(2 * last if last < 8 else last + step)
    return (*sizes[:-1], most)


class Sweep(NamedTuple):
    """Batch sizes up to ``most``, prompts of ``context`` tokens, ``steps`` timed of each length."""

    most: int
    context: int
    steps: int

    def spec(self, config: EngineConfig, lengths: tuple[int, ...]) -> StepBenchSpec:
        """What the measuring process is asked."""
        return StepBenchSpec(
            config=config,
            batch_sizes=batch_sizes(self.most),
            contexts=(self.context,),
            draft_lengths=lengths,
            steps=self.steps,
        )


def measure_costs(
    config: EngineConfig,
    sweep: Sweep,
    gamma: int,
    measure: Callable[[StepBenchSpec], StepBenchReport],
) -> tuple[list[Cell], EngineConfig]:
    """Verify steps with 0 to ``gamma`` drafts a request, and the configuration that ran them.

    With a draft model gamma is what it drafts, and each cell has the time that drafting adds to a
    step of its batch size. ``measure``: ``bench_steps``, whose errors are raised.
    """
    rounds: list[StepRow] = []
    if config.speculative_algorithm is not None:
        rounds = measure(sweep.spec(config, (0,))).rows
        gamma = rounds[0].draft_length
        config = config.without_speculation()
    # Without 0, which would time the core's loop, too; the plain step is timed all the same.
    report = measure(sweep.spec(config, tuple(range(1, gamma + 1))))
    return cells_of(report.rows, rounds), report.config


def cells_of(steps: Sequence[StepRow], rounds: Sequence[StepRow]) -> list[Cell]:
    """The cells of verify steps, each with what a round of its batch size takes over the verify
    step of the same length; a round that took less adds nothing.
    """
    walls = {(row.batch_size, row.draft_length): row.wall_ms * 1e-3 for row in steps}
    drafting = {
        row.batch_size: max(0.0, row.wall_ms * 1e-3 - walls[row.batch_size, row.draft_length])
        for row in rounds
    }
    return [
        Cell(requests, requests * (1 + drafts), seconds + drafting.get(requests, 0.0))
        for (requests, drafts), seconds in walls.items()
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
