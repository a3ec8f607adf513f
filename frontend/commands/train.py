"""``outrider train``: make a draft for a target, and measure it through the engine."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from ...engine_core.train_checks import refuse_train
from ...engine_core.train_spec import TrainSpec
from ..flags import UsageError
from ..train_flags import FLAGS, GROUPS, Flag


def main(args: list[str]) -> int:
    """Train; status 1 if the engine refuses the draft that it is to measure, 130 if a signal ended
    the training.
    """
    namespace = _parser().parse_args(args)
    spec = spec_from(namespace)
    refused = refuse_train(spec)
    if refused is not None:
        raise UsageError(f"--{refused.field.replace('_', '-')}: {refused.reason}")

    from ..launch import run_training

    def generate(prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        from ..train_engine import answer_prompts

        return answer_prompts(spec, prompts, new_tokens)

    report = run_training(spec, generate)
    if not report.outcome.finished:
        _say(f"stopped before the schedule's end; {spec.output} has its state: go on with --resume")
    if report.outcome.interrupted:
        return 130
    if namespace.measure and report.prompts:
        from ..train_engine import measure_draft

        measured = measure_draft(spec, report.prompts)
        if isinstance(measured, str):
            _say(f"accept length through the engine: not measured: {measured}")
            return 1
        _say(
            f"accept length through the engine: {measured.accept_length:.3f} "
            f"({measured.tokens} tokens of {len(report.prompts)} selection prompts)"
        )
    return 0


def spec_from(namespace: argparse.Namespace) -> TrainSpec:
    """The spec of parsed flags. Raises UsageError naming the flag."""
    given = {
        flag.name: getattr(namespace, flag.name)
        for flag in FLAGS
        if getattr(namespace, flag.name) is not None
    }
    try:
        return msgspec.convert(given, TrainSpec)
    except msgspec.ValidationError as error:
        raise UsageError(str(error)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outrider train",
        usage="outrider train --algorithm ALGORITHM --model MODEL --data PATH... --output FOLDER "
        "(--minutes N | --steps N) [flags]",
        description="Train a draft model for a target; the output folder serves as "
        "--speculative-draft-model-path.",
        allow_abbrev=False,
    )
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    for flag in FLAGS:
        _add(groups[flag.group], flag)
    parser.add_argument(
        "--no-measure",
        dest="measure",
        action="store_false",
        help="do not measure the accept length through the engine at the end",
    )
    return parser


def _add(group: Any, flag: Flag) -> None:
    options: dict[str, Any] = {"help": flag.help, "default": None, "dest": flag.name}
    if flag.kind is bool:
        options["action"] = argparse.BooleanOptionalAction if flag.both_ways else "store_true"
    else:
        options |= {"type": flag.kind, "metavar": flag.metavar, "choices": flag.choices}
        if flag.many:
            options["nargs"] = "+"
        options["required"] = flag.required
    group.add_argument(f"--{flag.name.replace('_', '-')}", **options)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
