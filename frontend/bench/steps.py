"""``outrider bench step``: a child process measures, so that its memory and its GPU are fresh."""

import msgspec

from ...engine_core.memory_report import memory_line
from ...engine_core.step_bench import (
    PrefillRow,
    StepBenchReport,
    StepBenchSpec,
    StepRow,
    decode_answer,
    encode_line,
    shown_rate,
)
from ..child_answer import ask_child
from ..errors import LaunchError, LaunchRefused
from ..launch import describe_exit

_HEADER = (
    f"{'mode':<12}{'batch':>6}{'context':>9}{'drafts':>7}{'wall':>9}{'p90':>9}{'device':>9}"
    f"{'gap':>8}{'floor':>9}{'ratio':>7}{'replays':>9}{'of bare':>9}{'of plain':>9}"
)
_PREFILL_HEADER = (
    f"{'mode':<12}{'batch':>6}{'tokens':>9}{'chunk':>7}{'steps':>9}{'wall':>9}{'device':>9}"
    f"{'tokens/s':>12}{'TFLOP/s':>9}{'of matmul':>11}{'replays':>9}"
)


def bench_steps(spec: StepBenchSpec) -> StepBenchReport:
    """Measure in a child process, whose messages go to standard error.

    Raises LaunchRefused for a setting that the model or the machine does not allow, LaunchError
    when the child ends without an answer.
    """
    out, status = ask_child("outrider.engine.bench_step", encode_line(spec))
    try:
        answer = decode_answer(out)
    except msgspec.MsgspecError:
        raise LaunchError(
            f"the measuring process ended without an answer ({describe_exit(status)}); "
            "its messages are above"
        ) from None
    if answer.report is None:
        prefix = f"{answer.field}: " if answer.field else ""
        raise (LaunchRefused if answer.field else LaunchError)(prefix + answer.message)
    return answer.report


def bench_rounds(spec: StepBenchSpec) -> StepBenchReport:
    """Measure rounds of a draft model in a child process, and then plain steps in another, so that
    both engines have the device to themselves.

    The report is that of the rounds, with the plain rows before them. Raises as ``bench_steps``.
    """
    report = bench_steps(spec)
    if not spec.contexts:
        return report
    config = spec.config.without_speculation()
    plain = bench_steps(msgspec.structs.replace(spec, config=config, prefill_lengths=()))
    walls = {(row.batch_size, row.context): row.wall_ms for row in plain.rows}
    rounds = [
        msgspec.structs.replace(
            row, verify_over_plain=row.wall_ms / walls[row.batch_size, row.context]
        )
        for row in report.rows
    ]
    return msgspec.structs.replace(report, rows=plain.rows + rounds)


def steps_table(report: StepBenchReport) -> str:
    """The rates, a line a row with times in milliseconds, and the device's memory."""
    lines = [
        f"{report.model} in {report.dtype} on {report.device_name}: copy "
        f"{report.copy_gb_per_s:.0f} GB/s, matmul {shown_rate(report.matmul_tflop_per_s)} TFLOP/s, "
        f"{report.streamed_bytes / 1e9:.2f} GB of weights a step",
    ]
    if report.rows:
        lines.append(_HEADER)
    lines += [_line(row) for row in report.rows]
    lines += [_round_line(row) for row in report.rows if row.mode == "round"]
    if report.prefills:
        lines.append(_PREFILL_HEADER)
    lines += [_prefill_line(row) for row in report.prefills]
    if report.memory is not None:
        lines.append(memory_line(report.memory))
    return "\n".join(lines)


def _line(row: StepRow) -> str:
    return (
        f"{row.mode:<12}{row.batch_size:>6}{row.mean_context:>9.0f}{row.draft_length:>7}"
        f"{row.wall_ms:>9.3f}{row.wall_p90_ms:>9.3f}{row.device_ms:>9.3f}"
        f"{_optional(row.gap_ms):>8}{row.floor_ms:>9.3f}{row.ratio:>7.2f}"
        f"{_optional(row.replay_share):>9}{_optional(row.share_of_bare):>9}"
        f"{_optional(row.verify_over_plain):>9}"
    )


def _round_line(row: StepRow) -> str:
    mark = ", simulated: it says nothing of the models" if row.simulated else ""
    return (
        f"round of batch {row.batch_size} at {row.mean_context:.0f} tokens: "
        f"{row.wall_ms:.3f} ms, {row.ratio:.2f} of its floor, {row.tokens_per_s:.0f} tokens/s at "
        f"accept length {row.accept_length:.2f}{mark}"
    )


def _prefill_line(row: PrefillRow) -> str:
    replays = None if row.graph_replays is None else row.graph_replays / row.steps
    return (
        f"{'prefill':<12}{row.batch_size:>6}{row.prompt_tokens:>9}{row.chunk_tokens:>7}"
        f"{row.steps:>9.1f}{row.wall_ms:>9.2f}{row.device_ms:>9.2f}{row.tokens_per_s:>12.0f}"
        f"{shown_rate(row.tflop_per_s):>9}{row.matmul_share:>11.3f}"
        f"{_optional(replays):>9}"
    )


def _optional(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
