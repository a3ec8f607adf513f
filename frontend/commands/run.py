"""``outrider run``: a JSONL file of prompts or OpenAI batch requests, resumably."""

import argparse
import asyncio
import sys
from pathlib import Path

from ...engine_core.config import EngineConfig
from ...engine_core.sampling_params import SamplingParams
from ..flags import UsageError, add_engine_flags, print_config, resolve_engine
from ..json_file import JsonFile
from ..sampling_flags import add_sampling_flags, params_from_flags, refuse_unloaded_calls
from ..simulated import warn_if_simulated


def main(args: list[str]) -> int:
    """Run ``--input`` and append one line for each of its lines to ``--output``."""
    parser = argparse.ArgumentParser(
        prog="outrider run",
        usage="outrider run --model MODEL --input FILE --output FILE [flags]",
        description='Run a JSONL file: lines {"prompt": ...} with any sampling fields, or lines '
        "of an OpenAI batch file. Started again with the same files it skips what is finished.",
        allow_abbrev=False,
    )
    parser.add_argument("--input", required=True, metavar="FILE")
    parser.add_argument("--output", required=True, metavar="FILE", help="appended to")
    parser.add_argument(
        "--summary-json",
        metavar="FILE",
        help="write counts and speed here; -: to standard output",
    )
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    add_sampling_flags(parser)
    add_engine_flags(parser)
    namespace = parser.parse_args(args)
    config = resolve_engine(namespace)
    base = params_from_flags(namespace)
    refuse_unloaded_calls(config, base.logits_processors)
    source, target = Path(namespace.input), Path(namespace.output)
    _check_paths(source, target)
    summary_file = JsonFile("--summary-json", namespace.summary_json)
    print(print_config(config), file=sys.stderr)
    return asyncio.run(_run(config, base, source, target, summary_file, not namespace.no_progress))


def _check_paths(source: Path, target: Path) -> None:
    if not source.is_file():
        raise UsageError(f"--input: {str(source)!r} is not a file")
    if target.is_dir():
        raise UsageError(f"--output: {str(target)!r} is a folder; name a file")
    if not target.parent.is_dir():
        raise UsageError(f"--output: the folder {str(target.parent)!r} does not exist")
    if target.exists() and target.samefile(source):
        raise UsageError("--output: is the same file as --input")


async def _run(
    config: EngineConfig,
    base: SamplingParams,
    source: Path,
    target: Path,
    summary_file: JsonFile,
    show_progress: bool,
) -> int:
    from tqdm import tqdm

    from ..batch_input import count_lines
    from ..batch_output import open_output
    from ..batch_run import BatchRun, BatchSummary
    from ..engine_handle import start_engine

    simulated = config.simulated
    with open_output(target, simulated) as output:
        summary = BatchSummary(
            model=config.model,
            input=str(source),
            output=str(target),
            simulated=simulated,
            repaired_bytes=output.repaired_bytes,
        )
        engine = await start_engine(config)
        warn_if_simulated(engine.service.info)
        try:
            with tqdm(
                total=count_lines(source), unit="line", disable=not show_progress, file=sys.stderr
            ) as bar:
                batch = BatchRun(engine, output, summary, bar.update)
                await batch.run(source, base)
        finally:
            await engine.stop()
    print(
        f"outrider run: {summary.completed} completed, {summary.errors} errors, "
        f"{summary.skipped} skipped; {summary.output_tokens_per_s:.1f} output tokens/s",
        file=sys.stderr,
    )
    summary_file.write(summary)
    return 0
