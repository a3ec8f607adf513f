"""``outrider bench offline``, ``outrider bench serve`` and ``outrider bench step``."""

import argparse
import asyncio
import math
import shlex
import sys

import msgspec

from ...engine_core.drafter_spec import MAX_DRAFT_TOKENS
from ..bench.step_flags import BENCH_STEP, check_rounds
from ..flags import (
    UsageError,
    add_engine_flags,
    given_engine_flags,
    print_config,
    resolve_engine,
)
from ..json_file import JsonFile

KINDS = {
    "offline": "prompts through an engine of this process",
    "serve": "load on HTTP servers",
    "step": "single decode and verify steps beside the least time they could take",
}
_TEXT = {"skip_tokenizer_init": "the prompts are text, which needs the tokenizer; leave it out"}
_JSON = "write all results here; -: to standard output, and the table to standard error"


def main(args: list[str]) -> int:
    """Run the benchmark that the first argument names."""
    if args and args[0] == "offline":
        return _offline(args[1:])
    if args and args[0] == "serve":
        return _serve(args[1:])
    if args and args[0] == "step":
        return _step(args[1:])
    parser = argparse.ArgumentParser(
        prog="outrider bench",
        usage="outrider bench {offline,serve,step} ...",
        description="; ".join(f"{name}: {text}" for name, text in KINDS.items()),
    )
    parser.add_argument("what", choices=tuple(KINDS))
    parser.parse_args(args)
    return 2


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", required=True, metavar="FILE", help="JSON lines of prompts")
    parser.add_argument("--kind", help="only prompts of this kind (completion, edit)")
    parser.add_argument("--num-prompts", type=_positive, metavar="N", help="only the first N")
    parser.add_argument(
        "--max-new-tokens", type=_positive, metavar="N", help="instead of each prompt's own limit"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", metavar="FILE", help=_JSON)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {value}")
    return value


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _publish(target: JsonFile, report: msgspec.Struct, table: str) -> None:
    command = shlex.join(["outrider", *sys.argv[1:]])
    target.write_beside({"command": command, **msgspec.to_builtins(report)}, table)


def _offline(args: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="outrider bench offline",
        usage="outrider bench offline --model MODEL --prompts FILE [--json FILE] [flags]",
        description="Measure a model with and without speculation, in turns.",
        allow_abbrev=False,
    )
    _common(parser)
    parser.add_argument("--batch-size", type=_positive, default=1, help="requests at a time")
    parser.add_argument(
        "--repeat", type=_positive, default=5, help="rounds a side that count; one before does not"
    )
    add_engine_flags(parser, _TEXT)
    namespace = parser.parse_args(args)
    config = resolve_engine(namespace, _TEXT)
    target = JsonFile("--json", namespace.json)
    _say(print_config(config))

    from ..bench.offline import bench_offline
    from ..bench.prompts import load_prompts
    from ..bench.report import offline_table

    prompts = load_prompts(
        namespace.prompts, namespace.kind, namespace.num_prompts, namespace.max_new_tokens
    )
    report = asyncio.run(
        bench_offline(
            config,
            prompts,
            source=namespace.prompts,
            kind=namespace.kind,
            batch_size=namespace.batch_size,
            repeat=namespace.repeat,
            temperature=namespace.temperature,
            say=_say,
        )
    )
    _publish(target, report, offline_table(report))
    return 0


def _serve(args: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="outrider bench serve",
        usage="outrider bench serve --prompts FILE (--base-url URL (--baseline-url URL | "
        "--no-baseline) | --model MODEL [flags])",
        description="Load a server. With --model it starts two, with and without speculation.",
        allow_abbrev=False,
    )
    _common(parser)
    parser.add_argument("--base-url", metavar="URL", help="the server to measure")
    parser.add_argument("--baseline-url", metavar="URL", help="the same without speculation")
    parser.add_argument("--no-baseline", action="store_true", help="measure no baseline")
    parser.add_argument("--concurrency", type=_positive, metavar="N", help="requests in flight")
    parser.add_argument(
        "--request-rate", type=float, default=math.inf, help="requests a second (default: inf)"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="always generate to the limit")
    parser.add_argument("--seed", type=int, default=0, help="seed of the arrival times")
    parser.add_argument("--api-key", help="Bearer key of the servers")
    add_engine_flags(parser, _TEXT)
    namespace = parser.parse_args(args)
    _check_serve(namespace)
    return asyncio.run(_run_serve(namespace, JsonFile("--json", namespace.json)))


def _check_serve(namespace: argparse.Namespace) -> None:
    if not namespace.request_rate > 0:
        raise UsageError(f"--request-rate: must be above 0, got {namespace.request_rate}")
    starts = "model" in vars(namespace) or namespace.config is not None
    if (namespace.base_url is None) == (not starts):
        raise UsageError("give --base-url of a running server, or --model to start one, not both")
    if not starts and (given := given_engine_flags(namespace)):
        raise UsageError(f"{given[0]}: is for --model; a running server has its own configuration")
    if starts and namespace.baseline_url is not None:
        raise UsageError("--baseline-url goes with --base-url; with --model one is started")
    if namespace.baseline_url is not None and namespace.no_baseline:
        raise UsageError("--baseline-url and --no-baseline contradict each other")
    if namespace.base_url is not None and not (namespace.baseline_url or namespace.no_baseline):
        raise UsageError(
            "a speculative server is compared with a plain one: give its --baseline-url, or say "
            "--no-baseline"
        )


async def _run_serve(namespace: argparse.Namespace, target: JsonFile) -> int:
    import contextlib

    from ..bench.prompts import load_prompts
    from ..bench.report import serving_table
    from ..bench.serving import Load, bench_serving, served

    prompts = load_prompts(
        namespace.prompts, namespace.kind, namespace.num_prompts, namespace.max_new_tokens
    )
    load = Load(
        prompts=tuple(prompts),
        concurrency=namespace.concurrency,
        request_rate=namespace.request_rate,
        temperature=namespace.temperature,
        ignore_eos=namespace.ignore_eos,
        seed=namespace.seed,
        api_key=namespace.api_key,
    )
    async with contextlib.AsyncExitStack() as stack:
        measured, baseline = namespace.base_url, namespace.baseline_url
        if measured is None:
            config = resolve_engine(namespace, _TEXT)
            _say(print_config(config))
            measured = await stack.enter_async_context(served(config))
            if not namespace.no_baseline:
                plain = config.without_speculation()
                baseline = await stack.enter_async_context(served(plain))
        report = await bench_serving(
            measured, baseline, load, source=namespace.prompts, kind=namespace.kind, say=_say
        )
    _publish(target, report, serving_table(report))
    return 1 if report.measured.completed == 0 else 0


def _step(args: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="outrider bench step",
        usage="outrider bench step --model MODEL [--batch-size N ...] [--context N ...] "
        "[--draft-lengths N ...] [--prefill-lengths N ...] [--steps N] [--json FILE] [flags]",
        description="Time decode steps through the engine's loop, and verify steps through its "
        "worker, beside the floor: bytes and operations at rates measured in the same run. With a "
        "draft model (--speculative-algorithm EAGLE3, ...) its rounds are timed instead, beside "
        "the plain step of an engine without it; --simulate-accept-length forces how much of "
        "random weights' drafts is accepted. "
        "Prefill of whole prompts is timed beside the matmul rate, alone unless --context or "
        "--draft-lengths is given too.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--batch-size", type=_positive, nargs="+", default=[1], metavar="N", help="requests"
    )
    parser.add_argument(
        "--context", type=_positive, nargs="+", metavar="N", help="prompt tokens (default: 512)"
    )
    parser.add_argument(
        "--draft-lengths",
        type=_draft_length,
        nargs="+",
        metavar="N",
        help="drafts verified a request; 0: plain decoding (default: 0)",
    )
    parser.add_argument(
        "--prefill-lengths",
        type=_positive,
        nargs="+",
        default=[],
        metavar="N",
        help="tokens of prompts to prefill, in steps of --chunked-prefill-size tokens",
    )
    parser.add_argument("--steps", type=_positive, default=64, metavar="N", help="steps timed")
    parser.add_argument("--json", metavar="FILE", help=_JSON)
    add_engine_flags(parser, BENCH_STEP.absent())
    namespace = parser.parse_args(args)
    config = resolve_engine(namespace, BENCH_STEP.absent())
    check_rounds(BENCH_STEP, config, namespace.draft_lengths is not None)
    target = JsonFile("--json", namespace.json)

    from ...engine_core.step_bench import StepBenchSpec
    from ..bench.steps import bench_rounds, bench_steps, steps_table

    contexts, drafts = namespace.context or [512], namespace.draft_lengths or [0]
    if namespace.prefill_lengths and namespace.context is namespace.draft_lengths is None:
        contexts = []
    measure = bench_steps if config.speculative_algorithm is None else bench_rounds
    report = measure(
        StepBenchSpec(
            config=config,
            batch_sizes=tuple(dict.fromkeys(namespace.batch_size)),
            contexts=tuple(dict.fromkeys(contexts)),
            draft_lengths=tuple(dict.fromkeys(drafts)),
            steps=namespace.steps,
            prefill_lengths=tuple(dict.fromkeys(namespace.prefill_lengths)),
        )
    )
    _say(print_config(report.config))
    _publish(target, report, steps_table(report))
    return 0


def _draft_length(text: str) -> int:
    value = int(text)
    if not 0 <= value < MAX_DRAFT_TOKENS:
        raise argparse.ArgumentTypeError(f"must be between 0 and {MAX_DRAFT_TOKENS - 1}, is {text}")
    return value
