"""``outrider profile sts`` and ``sps``: tables for the planner of verify lengths."""

import argparse
import sys

from ...engine_core.drafter_spec import MAX_DRAFT_TOKENS
from ..bench.step_flags import PROFILE_SPS, check_rounds
from ..flags import add_engine_flags, print_config, resolve_engine
from ..json_file import JsonFile

KINDS = {
    "sts": "fit the temperatures of a confidence head to collected logits",
    "sps": "measure what verify steps cost by requests and tokens, on this machine and model",
}
_GAMMA = 7
_OUT = "write the table here, as SGLang's JSON; -: to standard output"


def main(args: list[str]) -> int:
    """Make the table that the first argument names."""
    if args and args[0] == "sts":
        return _sts(args[1:])
    if args and args[0] == "sps":
        return _sps(args[1:])
    parser = argparse.ArgumentParser(
        prog="outrider profile",
        usage="outrider profile {sts,sps} ...",
        description="; ".join(f"{name}: {text}" for name, text in KINDS.items()),
    )
    parser.add_argument("what", choices=tuple(KINDS))
    parser.parse_args(args)
    return 2


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {value}")
    return value


def _gamma(text: str) -> int:
    value = int(text)
    if not 1 <= value < MAX_DRAFT_TOKENS:
        raise argparse.ArgumentTypeError(f"must be between 1 and {MAX_DRAFT_TOKENS - 1}, is {text}")
    return value


def _sts(args: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="outrider profile sts",
        usage="outrider profile sts --logits FILE [FILE ...] --out FILE [flags]",
        description="Fit one temperature a draft position, so that the product of a confidence "
        "head's sigmoids up to a position is the chance that the draft there is accepted.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--logits",
        nargs="+",
        required=True,
        metavar="FILE",
        help=".npz with logits [n, gamma], raw, and prefix_mask [n, gamma], 1 within the accepted "
        "drafts; several files are one set of samples",
    )
    parser.add_argument("--out", required=True, metavar="FILE", help=_OUT)
    parser.add_argument(
        "--num-bins", type=_positive, default=15, metavar="N", help="bins of the error (default 15)"
    )
    parser.add_argument(
        "--gamma", type=_gamma, metavar="N", help="refuse files of another number of positions"
    )
    parser.add_argument("--dataset", metavar="NAME", help="kept in the file, for whoever reads it")
    namespace = parser.parse_args(args)
    target = JsonFile("--out", namespace.out)

    from ..profiling.calibration import calibration_text, fit_files

    table = fit_files(namespace.logits, namespace.num_bins, namespace.gamma, namespace.dataset)
    target.write_beside(table, calibration_text(table))
    return 0


def _sps(args: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="outrider profile sps",
        usage="outrider profile sps --model MODEL --out FILE [--max-batch-size N] [--gamma N] "
        "[--context N] [--steps N] [--form {additive,step}] [flags]",
        description="Time verify steps of 0 to gamma random drafts a request at batch sizes 1, 2, "
        "4, 8, 16, ... and fit a cost table to them. With a draft model (--speculative-algorithm "
        "EAGLE3, ...) its rounds are timed, too: gamma is theirs, and what drafting takes counts.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", required=True, metavar="FILE", help=_OUT)
    parser.add_argument(
        "--max-batch-size", type=_positive, default=64, metavar="N", help="requests (default 64)"
    )
    parser.add_argument(
        "--gamma", type=_gamma, metavar="N", help="random drafts a request (default 7)"
    )
    parser.add_argument(
        "--context", type=_positive, default=128, metavar="N", help="prompt tokens (default 128)"
    )
    parser.add_argument(
        "--steps", type=_positive, default=32, metavar="N", help="steps timed a cell (default 32)"
    )
    parser.add_argument(
        "--form",
        choices=("additive", "step"),
        default="additive",
        help="additive: seconds by requests and by tokens; step: steps a second by tokens alone",
    )
    add_engine_flags(parser, PROFILE_SPS.absent())
    namespace = parser.parse_args(args)
    config = resolve_engine(namespace, PROFILE_SPS.absent())
    check_rounds(PROFILE_SPS, config, namespace.gamma is not None)
    target = JsonFile("--out", namespace.out)

    from ..bench.steps import bench_steps
    from ..profiling.costs import Sweep, costs_text, fit_costs, measure_costs

    sizes = Sweep(namespace.max_batch_size, namespace.context, namespace.steps)
    cells, measured = measure_costs(config, sizes, namespace.gamma or _GAMMA, bench_steps)
    print(print_config(measured), file=sys.stderr, flush=True)
    table = fit_costs(cells, namespace.form)
    target.write_beside(table, costs_text(cells, table))
    return 0
