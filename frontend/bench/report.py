"""The tables that benchmarks print."""

from ..simulated import SIMULATED
from .measure import Speculation, Spread
from .offline import OfflineReport, Side
from .serving import ServingReport, ServingResult

_WIDTH = 34


def offline_table(report: OfflineReport) -> str:
    """Baseline and speculative side by side."""
    sides = [("baseline", report.baseline)]
    if report.speculative is not None:
        sides.append((report.speculative.drafter or "forced drafts", report.speculative))
    rows = [
        ("output tokens/s (median)", [f"{s.output_tokens_per_s:.1f}" for _, s in sides]),
        ("  of the rounds", [_range(s.output_tokens_per_s_rounds) for _, s in sides]),
        ("TTFT p50 / p90 / p99 (ms)", [_three(s.ttft_ms) for _, s in sides]),
        ("inter-token p50 / p90 / p99 (ms)", [_three(s.inter_token_ms) for _, s in sides]),
        ("core CPU a step, plan (us)", [f"{s.core.plan_us:.0f}" for _, s in sides]),
        ("core CPU a step, commit (us)", [f"{s.core.commit_us:.0f}" for _, s in sides]),
        ("core CPU a step, propose (us)", [f"{s.core.propose_us:.0f}" for _, s in sides]),
        ("steps", [str(s.core.steps) for _, s in sides]),
        ("accept length", [_optional(s.speculation.accept_length) for _, s in sides]),
        ("accept rate", [_optional(s.speculation.accept_rate) for _, s in sides]),
        ("length-0 share of decode rows", [_share(s) for _, s in sides]),
    ]
    head = f"{report.num_prompts} prompts of kind {report.kind or 'any'}, batch size "
    lines = [
        f"{report.model}: {head}{report.batch_size}, {report.repeat} rounds",
        " " * _WIDTH + "".join(f"{name:>32}" for name, _ in sides),
    ]
    lines += [f"{name:<{_WIDTH}}" + "".join(f"{cell:>32}" for cell in row) for name, row in rows]
    if report.speculative is None:
        lines.append(
            "no --speculative-algorithm was given and no prompt has a grammar: only the baseline "
            "was measured"
        )
    else:
        lines.append(f"{'speedup (median of the rounds)':<{_WIDTH}}{report.speedup:>24.3f}")
        if report.simulated:
            lines.append(SIMULATED)
        positions = report.speculative.speculation.accept_rate_per_position
        shown = " ".join(f"{rate:.2f}" for rate in positions[:8]) or "-"
        lines.append(f"{'accept rate by position':<{_WIDTH}}{shown:>32}")
        if report.differing_outputs is not None:
            lines.append(f"{'outputs that differ':<{_WIDTH}}{report.differing_outputs:>32}")
    return "\n".join(lines)


def serving_table(report: ServingReport) -> str:
    """The customary table of a serving benchmark, one block a server."""
    blocks = [_serving_block("Server", report, report.measured)]
    if report.baseline is None:
        blocks.append("no baseline was measured (--no-baseline)")
    else:
        blocks.append(_serving_block("Baseline", report, report.baseline))
    if report.speedup is not None:
        blocks.append(_line("Speedup (output throughput)", f"{report.speedup:.3f}"))
    return "\n".join(blocks)


def _serving_block(title: str, report: ServingReport, found: ServingResult) -> str:
    rate = "inf" if report.request_rate is None else f"{report.request_rate:g}"
    lines = [
        f"==== {title}: {found.base_url} ".ljust(60, "="),
        _line("Traffic request rate", rate),
        _line("Max request concurrency", str(report.max_concurrency or "not set")),
        _line("Successful requests", str(found.completed)),
        _line("Failed requests", str(found.failed)),
        _line("Benchmark duration (s)", f"{found.duration_s:.2f}"),
        _line("Total input tokens", str(found.total_input_tokens)),
        _line("Total generated tokens", str(found.total_output_tokens)),
        _line("Request throughput (req/s)", f"{found.request_throughput:.2f}"),
        _line("Input token throughput (tok/s)", f"{found.input_throughput:.2f}"),
        _line("Output token throughput (tok/s)", f"{found.output_throughput:.2f}"),
        _line("Total token throughput (tok/s)", f"{found.total_throughput:.2f}"),
        _line("Concurrency", f"{found.concurrency:.2f}"),
    ]
    if found.simulated:
        lines.append(SIMULATED)
    if found.first_error is not None:
        lines.append(_line("First error", found.first_error))
    for name, times in (
        ("E2E latency", found.e2e_ms),
        ("TTFT", found.ttft_ms),
        ("TPOT", found.tpot_ms),
        ("ITL", found.itl_ms),
    ):
        if times is not None:
            shown = f"{times.mean:.2f} / {times.p50:.2f} / {times.p90:.2f} / {times.p99:.2f}"
            lines.append(_line(f"{name} mean/p50/p90/p99 (ms)", shown))
    if found.speculation is not None:
        lines += _speculation_lines(found.speculation)
    if found.core is not None:
        cost = found.core
        parts = (cost.plan_us, cost.commit_us, cost.propose_us)
        shown = " / ".join(f"{part:.0f}" for part in parts)
        lines.append(_line("Core CPU a step plan/commit/propose (us)", shown))
    return "\n".join(lines)


def _speculation_lines(found: Speculation) -> list[str]:
    rates = " ".join(f"{rate:.3f}" for rate in found.accept_rate_per_position) or "-"
    return [
        _line("Accept length", _optional(found.accept_length)),
        _line("Accept rate", _optional(found.accept_rate)),
        _line("Drafts", str(found.drafts)),
        _line("Draft tokens", str(found.draft_tokens)),
        _line("Accepted tokens", str(found.accepted_tokens)),
        _line("Per-position acceptance", rates),
        _line("Length-0 share of decode rows", f"{found.length_0_share:.3f}"),
    ]


def _line(name: str, value: str) -> str:
    return f"{name + ':':<42}{value}"


def _three(found: Spread | None) -> str:
    return "-" if found is None else f"{found.p50:.2f} / {found.p90:.2f} / {found.p99:.2f}"


def _range(values: list[float]) -> str:
    return f"{min(values):.1f} .. {max(values):.1f}"


def _optional(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _share(side: Side) -> str:
    return f"{side.speculation.length_0_share:.3f}"
