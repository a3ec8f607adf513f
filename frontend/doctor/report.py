"""What ``outrider doctor`` says: its findings as lines of text, and all of it as JSON."""

import textwrap

import msgspec

from ...engine_core.divergence import Divergence
from ...engine_core.draft_finding import Finding
from .acceptance import Position

_WORDS = {"ok": "ok", "warning": "warning", "failed": "FAILED"}
_WIDTH, _INDENT = 100, 28


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was found. ``healthy``: no check failed.

    ``accept_length`` and ``positions`` are None and empty where the run was left out, because a
    check before it had failed. ``divergences``: outputs that differ from plain decoding, ties too.
    """

    model: str
    algorithm: str
    draft: str | None
    healthy: bool
    findings: list[Finding]
    prompts: str
    num_prompts: int
    output_tokens: int
    accept_length: float | None
    accept_rate: float | None
    positions: tuple[Position, ...]
    divergences: list[Divergence]
    config: dict[str, object]


def finding_lines(finding: Finding) -> str:
    """``FAILED   weights   what was found``, and the remedy below it."""
    head = f"{_WORDS[finding.level]:<9}{finding.check:<{_INDENT - 10}} "
    lines = textwrap.wrap(finding.found, _WIDTH - _INDENT) or [""]
    if finding.remedy:
        first, *rest = textwrap.wrap(f"-> {finding.remedy}", _WIDTH - _INDENT)
        lines += [first, *(f"   {line}" for line in rest)]
    return head + ("\n" + " " * _INDENT).join(lines)


def acceptance_table(report: DoctorReport) -> str:
    """Acceptance by position, one column a position."""
    shown = report.positions[:10]
    rows = [
        ("position", [str(row.position) for row in shown]),
        ("drafted", [str(row.drafted) for row in shown]),
        ("accepted", [f"{row.rate:.2f}" for row in shown]),
        ("  if the one before was", ["-" if r.given is None else f"{r.given:.2f}" for r in shown]),
    ]
    lines = [f"{name:<{_INDENT}}" + "".join(f"{cell:>7}" for cell in cells) for name, cells in rows]
    return "\n".join(lines)


def verdict(report: DoctorReport) -> str:
    """The last line."""
    counts = {level: sum(finding.level == level for finding in report.findings) for level in _WORDS}
    length = "" if report.accept_length is None else f"accept length {report.accept_length:.2f}; "
    if report.healthy:
        warnings = counts["warning"]
        more = f", {warnings} warning{'s' * (warnings != 1)}" if warnings else ""
        return f"{length}no check failed{more}"
    run = "" if report.accept_length is not None else ", and nothing was run"
    return f"{length}{counts['failed']} of {len(report.findings)} checks failed{run}"
