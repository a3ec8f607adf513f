"""``outrider check``: promises that a user can test with models of their own."""

import argparse
import shlex
import sys
from collections.abc import Callable

import msgspec

from ...engine_core.accept_rules import rule_notes
from ...engine_core.config import EngineConfig
from ...engine_core.draft_folder import draft_folder
from ...engine_core.drafter_spec import find_drafter
from ...engine_core.refusal import Refused, RefusedError
from ..doctor.prompts import PROMPTS, read_prompts
from ..doctor.trial import encode
from ..draft_flag import add_draft_flag, name_algorithm
from ..engine_handle import load_tokenizer
from ..errors import LaunchError
from ..flags import UsageError, add_engine_flags, resolve_engine
from ..json_file import JsonFile
from ..llm import LLM
from ..lossless.features import Feature, processed
from ..lossless.matrix import ROUNDING, Matrix
from ..lossless.recording import Recording
from ..lossless.report import LosslessReport, heading, row_lines, verdict
from ..sampling_flags import processor_calls, refuse_unloaded_calls

KINDS = {"lossless": "does speculation change any output, feature by feature"}
_ABSENT = {
    "simulate_survival": "forces what is to be checked; leave it out",
    "simulate_accept_length": "forces what is to be checked; leave it out",
    "skip_tokenizer_init": "the prompts are text, which needs the tokenizer; leave it out",
}


def main(args: list[str]) -> int:
    """Check what the first argument names."""
    if args and args[0] == "lossless":
        return _lossless(args[1:])
    parser = argparse.ArgumentParser(
        prog="outrider check",
        usage="outrider check lossless ...",
        description="; ".join(f"{name}: {text}" for name, text in KINDS.items()),
    )
    parser.add_argument("what", choices=tuple(KINDS))
    parser.parse_args(args)
    return 2


def _lossless(args: list[str]) -> int:
    """The status is 1 if a cell failed; refused and lossy ones leave it 0."""
    parser = argparse.ArgumentParser(
        prog="outrider check lossless",
        usage="outrider check lossless --model MODEL [--speculative-algorithm NAME] "
        "[--draft DRAFT] [--prompts FILE] [--traces DIR] [--json FILE] [flags]",
        description="Run all kinds of requests without drafts at batch 1 and with drafts at "
        "batch 1 and 8, and compare tokens, texts and log-probabilities. Exit status: 0 all exact, "
        "within rounding, refused or lossy by your flags, 1 a cell failed, 2 the command line or a "
        "model is wrong.",
        allow_abbrev=False,
    )
    add_draft_flag(parser)
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="instead of the doctor's 20: JSON lines with `prompt` (.jsonl), or one a line",
    )
    parser.add_argument(
        "--max-new-tokens", type=_positive, default=24, metavar="N", help="of every prompt"
    )
    parser.add_argument(
        "--traces",
        metavar="DIR",
        help="folder for the trace of a failure; a temporary one if unset",
    )
    parser.add_argument("--json", metavar="FILE", help="write all cells here; -: to stdout")
    parser.add_argument(
        "--logits-processor-args",
        metavar="JSON",
        help="also run requests with these custom logits processors, e.g. "
        """'{"two_back": {"strength": 3}}'""",
    )
    add_engine_flags(parser, _ABSENT)
    namespace = parser.parse_args(args)
    name_algorithm(namespace)
    config = resolve_engine(namespace, _ABSENT)
    if config.speculative_algorithm is None:
        raise UsageError("--speculative-algorithm: name the drafter to check, or give --draft")
    prompts = PROMPTS if namespace.prompts is None else read_prompts(namespace.prompts)
    given = namespace.logits_processor_args
    calls = {} if given is None else processor_calls(given)
    if given is not None and not calls:
        raise UsageError("--logits-processor-args: names no processor to check; leave it out")
    refuse_unloaded_calls(config, calls)
    more = processed(calls) if calls else ()
    target = JsonFile("--json", namespace.json)
    out = sys.stderr if namespace.json == "-" else sys.stdout

    def say(text: str) -> None:
        print(text, file=out, flush=True)

    report = check(
        _sized(config),
        prompts,
        namespace.prompts,
        namespace.max_new_tokens,
        Recording(namespace.traces),
        say,
        more,
    )
    target.write(report)
    return 1 if report.failed else 0


def check(
    config: EngineConfig,
    prompts: tuple[str | list[int], ...],
    source: str | None,
    max_new_tokens: int,
    recording: Recording,
    say: Callable[[str], object],
    more: tuple[Feature, ...] = (),
) -> LosslessReport:
    """The whole matrix, said row by row, with ``more`` rows. ``source``: of the prompts, None: its
    own.

    The trace is kept where a cell failed or the engine died. Raises ModelNotFound, RefusedError,
    LaunchError, EngineDead.
    """
    spec = find_drafter(config.speculative_algorithm or "")
    assert not isinstance(spec, Refused), "the configuration was checked"
    draft = str(draft_folder(config, spec.name)) if spec.has_model else None
    try:
        # Its own prompts are a user's messages where the model has a template for them.
        tokens = encode(config, prompts, chat=source is None)
        say(f"{config.model}, drafts by {spec.name}" + (f" of {draft}" if draft else ""))
        with LLM.from_config(config, trace=str(recording.path)) as llm:
            matrix = Matrix(llm, load_tokenizer(config), config, tokens, max_new_tokens, more)
            say(
                f"{len(tokens)} prompts, {matrix.plain_tokens:,} tokens without drafts, "
                f"{llm.info.dtype} on {llm.info.device}\n"
            )
            for note in rule_notes(config):
                say(f"{note}\n")
            say(heading(llm.info, matrix.batches, matrix.limits))
            rows = []
            for row in matrix.rows():
                rows.append(row)
                say(row_lines(row))
            info = llm.info
    except (RefusedError, LaunchError):
        recording.drop()
        raise
    except Exception:
        say(f"trace: {recording.path}")
        raise
    statuses = {cell.status for row in rows for cell in row.cells}
    failed = "failed" in statuses
    if failed:
        rows = matrix.located(rows, str(recording.path))
    else:
        recording.drop()
    report = LosslessReport(
        command=shlex.join(["outrider", *sys.argv[1:]]),
        model=config.model,
        algorithm=spec.name,
        draft=draft,
        device=info.device,
        dtype=info.dtype,
        failed=failed,
        lossless=statuses.isdisjoint(("failed", "lossy")),
        prompts=source or "its own",
        num_prompts=len(tokens),
        max_new_tokens=max_new_tokens,
        batches=matrix.batches,
        rows=rows,
        limits=matrix.limits,
        trace=str(recording.path) if failed else None,
        config=msgspec.structs.asdict(config),
    )
    say("\n" + verdict(report))
    return report


def _sized(config: EngineConfig) -> EngineConfig:
    """Drafts at fixed length, and room for what runs at a time and no more."""
    running = min(config.max_running_requests, max(ROUNDING))
    return msgspec.structs.replace(
        config, max_running_requests=running, speculative_length_policy="fixed"
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {value}")
    return value
