"""``outrider doctor``: is a draft fit for its target? First its files, then twenty prompts."""

import argparse
import sys
from collections.abc import Callable

import msgspec

from ...engine_core.config import EngineConfig
from ...engine_core.draft_checks import check_draft
from ...engine_core.draft_finding import Finding
from ...engine_core.draft_folder import draft_folder
from ...engine_core.draft_inspection import DraftInspection, decode_inspection, encode_line
from ...engine_core.drafter_spec import find_drafter
from ...engine_core.refusal import Refused
from ..child_answer import ask_child
from ..doctor.acceptance import Run, diagnose
from ..doctor.prompts import PROMPTS, read_prompts
from ..doctor.report import DoctorReport, acceptance_table, finding_lines, verdict
from ..doctor.trial import Trial, encode, run_trial
from ..draft_flag import add_draft_flag, name_algorithm
from ..errors import LaunchError, LaunchRefused
from ..flags import UsageError, add_engine_flags, resolve_engine
from ..json_file import JsonFile
from ..launch import describe_exit

_ABSENT = {
    "simulate_survival": "would force what is to be measured; leave it out",
    "simulate_accept_length": "would force what is to be measured; leave it out",
    "skip_tokenizer_init": "the prompts are text, which needs the tokenizer; leave it out",
}
Say = Callable[[str], object]


def main(args: list[str]) -> int:
    """Check a draft and run it. The status is 1 if a check failed; warnings leave it 0."""
    parser = argparse.ArgumentParser(
        prog="outrider doctor",
        usage="outrider doctor --model MODEL [--speculative-algorithm NAME] [--draft DRAFT] "
        "[--prompts FILE] [--json FILE] [flags]",
        description="Say whether a draft fits its target: tokenizer, widths, layers, weights; then "
        "run 20 prompts, compare them with plain decoding, and read acceptance by position. Exit "
        "status: 0 no check failed (warnings may be there), 1 one did, 2 the command line or a "
        "model is wrong.",
        allow_abbrev=False,
    )
    add_draft_flag(parser)
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="instead of the 20 of its own: JSON lines with `prompt` (.jsonl), or one a line",
    )
    parser.add_argument(
        "--max-new-tokens", type=_positive, default=64, metavar="N", help="of every prompt"
    )
    parser.add_argument("--json", metavar="FILE", help="write all findings here; -: to stdout")
    add_engine_flags(parser, _ABSENT)
    namespace = parser.parse_args(args)
    name_algorithm(namespace)
    config = msgspec.structs.replace(
        resolve_engine(namespace, _ABSENT), speculative_length_policy="fixed"
    )
    if config.speculative_algorithm is None:
        raise UsageError("--speculative-algorithm: name the drafter to look at, or give --draft")
    own = namespace.prompts is None
    prompts = PROMPTS if own else read_prompts(namespace.prompts)
    target = JsonFile("--json", namespace.json)
    out = sys.stderr if namespace.json == "-" else sys.stdout

    def say(text: str) -> None:
        print(text, file=out, flush=True)

    source = "its own" if own else str(namespace.prompts)
    report = examine(config, prompts, source, own, namespace.max_new_tokens, say)
    target.write(report)
    return 0 if report.healthy else 1


def examine(
    config: EngineConfig,
    prompts: tuple[str | list[int], ...],
    source: str,
    chat: bool,
    max_new_tokens: int,
    say: Say,
) -> DoctorReport:
    """All checks, said as they are made; the run is left out once one has failed.

    ``chat``: give prompts as a user's messages where the model has a template. Raises
    RefusedError, ModelNotFound, LaunchError, EngineDead.
    """
    spec = find_drafter(config.speculative_algorithm or "")
    assert not isinstance(spec, Refused), "the configuration was checked"
    draft = _draft_folder(config) if spec.has_model else None
    say(f"{config.model}, drafts by {spec.name}" + (f" of {draft}" if draft else "") + "\n")
    findings: list[Finding] = []
    inspection = DraftInspection()

    def note(finding: Finding) -> None:
        findings.append(finding)
        say(finding_lines(finding))

    for finding in check_draft(config):
        note(finding)
    if spec.has_model and not _failed(findings):
        inspection = inspect_weights(config)
        for finding in inspection.findings:
            note(finding)
    trial: Trial | None = None
    if not _failed(findings):
        tokens = encode(config, prompts, chat)
        try:
            trial = run_trial(_sized(config, len(tokens)), tokens, max_new_tokens)
        except LaunchRefused as error:
            found, _, remedy = str(error).partition("; ")
            note(Finding("start", "failed", found, remedy))
    if trial is not None:
        note(trial.exactness)
        for finding in diagnose(_run(trial, spec.name, spec.has_model, inspection)):
            note(finding)
    report = DoctorReport(
        model=config.model,
        algorithm=spec.name,
        draft=draft,
        healthy=not _failed(findings),
        findings=findings,
        prompts=source,
        num_prompts=len(prompts),
        output_tokens=0 if trial is None else sum(map(len, trial.outputs)),
        accept_length=None if trial is None else trial.spec.accept_length,
        accept_rate=None if trial is None else trial.spec.accept_rate,
        positions=() if trial is None else trial.table,
        divergences=[] if trial is None else trial.divergences,
        config=msgspec.structs.asdict(config),
    )
    if report.positions:
        say("\n" + acceptance_table(report))
    say("\n" + verdict(report))
    return report


def inspect_weights(config: EngineConfig) -> DraftInspection:
    """Read the draft's weights in a process of the engine. Raises LaunchError."""
    out, status = ask_child("outrider.engine.inspect_draft", encode_line(config))
    try:
        answer = decode_inspection(out)
    except msgspec.MsgspecError:
        raise LaunchError(
            f"the process that reads the draft ended without an answer ({describe_exit(status)}); "
            "its messages are above"
        ) from None
    if answer.message:
        raise LaunchRefused(f"{answer.field}: {answer.message}" if answer.field else answer.message)
    return answer


def _run(trial: Trial, algorithm: str, has_model: bool, inspection: DraftInspection) -> Run:
    known: float | None = None
    tokens = [token for output in trial.outputs for token in output]
    if inspection.draft_tokens is not None and tokens:
        draft = set(inspection.draft_tokens)
        known = sum(token in draft for token in tokens) / len(tokens)
    return Run(
        algorithm=algorithm,
        has_model=has_model,
        drafted=trial.drafted,
        accepted=trial.accepted,
        ended=trial.stopped,
        looping=trial.looping,
        outputs=len(trial.outputs),
        known=known,
    )


def _failed(findings: list[Finding]) -> bool:
    return any(finding.level == "failed" for finding in findings)


def _sized(config: EngineConfig, prompts: int) -> EngineConfig:
    """Room for the prompts and no more, so that a large model's pool stays small."""
    running = min(config.max_running_requests, max(prompts, 1))
    return msgspec.structs.replace(config, max_running_requests=running)


def _draft_folder(config: EngineConfig) -> str:
    return str(draft_folder(config, config.speculative_algorithm or ""))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {value}")
    return value
