"""What ``outrider check lossless`` says: its table line by line, and all of it as JSON."""

import textwrap
from collections import Counter
from collections.abc import Sequence

import msgspec

from ...engine_core.messages import CoreInfo
from .cells import Cell, Limits, Row, Status

_FEATURE, _CELL, _WIDTH = 31, 26, 109
_WORDS: dict[Status, str] = {
    "exact": "exact",
    "rounding": "within rounding",
    "lossy": "lossy",
    "refused": "refused",
    "failed": "FAILED",
}


class LosslessReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was found. ``failed``: a cell did. ``lossless``: none did, and
    none is lossy.

    ``limits``: gaps from which on a difference is no rounding. ``trace``: of the whole run, if a
    cell failed.
    """

    command: str
    model: str
    algorithm: str
    draft: str | None
    device: str
    dtype: str
    failed: bool
    lossless: bool
    prompts: str
    num_prompts: int
    max_new_tokens: int
    batches: list[int]
    rows: list[Row]
    limits: Limits
    trace: str | None
    config: dict[str, object]


def heading(info: CoreInfo, batches: Sequence[int], limits: Limits) -> str:
    """The lines above the table."""
    names = "".join(f"{f'batch {batch}':<{_CELL}}" for batch in batches)
    head = f"{'feature':<{_FEATURE}}{names}drafts accepted"
    if info.dtype == "float32":
        return head
    return (
        f"plain decoding in {info.dtype} parts from itself, by the batch, at logits up to "
        f"{limits.gap:.3g} apart\n\n{head}"
    )


def row_lines(row: Row) -> str:
    """A row of the table; below it why cells were refused, and where they failed."""
    cells = "".join(f"{_cell(cell):<{_CELL}}" for cell in row.cells)
    drafts = f"{row.accepted_drafts} of {row.proposed_drafts}" if row.proposed_drafts else "-"
    lines = [f"{row.feature:<{_FEATURE}}{cells}{drafts}"]
    for reason in dict.fromkeys(cell.reason for cell in row.cells if cell.reason):
        lines += _wrapped(f"refused: {reason}")
    for cell in row.cells:
        if cell.failure is not None:
            lines += _wrapped(f"batch {cell.batch}: {_place(cell)}")
    return "\n".join(lines)


def _cell(cell: Cell) -> str:
    words = _WORDS[cell.status]
    if cell.status == "rounding":
        return f"{words} ({cell.gap:.2g})"
    if cell.status == "lossy":
        return f"{words} ({cell.differences} outputs)"
    return f"{words} (p = {cell.p:.2g})" if cell.p is not None else words


def _place(cell: Cell) -> str:
    failure = cell.failure
    assert failure is not None
    if failure.prompt < 0:
        return failure.found
    sample = f", sample {failure.sample}" if failure.sample else ""
    more = f"; {cell.differences} outputs differ" if cell.differences > 1 else ""
    place = f"prompt {failure.prompt}{sample}, position {failure.position}"
    return f"{place}: {failure.found}{more}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="  -> ", subsequent_indent="     ")


def verdict(report: LosslessReport) -> str:
    """The last lines."""
    cells = [cell for row in report.rows for cell in row.cells]
    counts = Counter(cell.status for cell in cells)
    said = ", ".join(
        f"{counts[status]} {word}" for status, word in _WORDS.items() if counts[status]
    )
    lines = [f"{len(cells)} cells: {said}"]
    idle = [
        row.feature
        for row in report.rows
        if not row.accepted_drafts
        and any(cell.status in ("exact", "rounding", "lossy") for cell in row.cells)
    ]
    if idle:
        lines += textwrap.wrap(
            f"no draft was accepted with {', '.join(idle)}: little is shown there; give other "
            "--prompts, or a draft that fits (outrider doctor)",
            _WIDTH,
        )
    if report.trace is not None:
        lines += [f"trace: {report.trace}", f"       outrider replay {report.trace}"]
        lines += [
            f"       step {cell.failure.step}: {row.feature}, batch {cell.batch}"
            for row in report.rows
            for cell in row.cells
            if cell.failure is not None and cell.failure.step is not None
        ]
    return "\n".join(lines)
