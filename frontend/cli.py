"""The ``outrider`` command: finds the subcommand, imports only that one, reports errors.

Exit status: 0, 1 (the work failed), 2 (the command line, a configuration or the model it names is
wrong), 130 (Ctrl-C).
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "serve": "serve a model over HTTP and ZeroMQ",
    "generate": "generate one completion",
    "run": "run a JSONL file of prompts, resumably",
    "bench": "measure speed (bench offline, serve, step) beside a baseline or a floor",
    "train": "train a draft model for a target, and measure it",
    "profile": "make tables for the planner of verify lengths (profile sts, sps)",
    "plan": "show what a configuration would take of the device's memory",
    "doctor": "check a draft against its target, run it, and say what its acceptance means",
    "check": "compare outputs with and without drafts, feature by feature (check lossless)",
    "replay": "re-run a recorded trace of step plans and check every commit",
    "capabilities": "show which features work together, and what is refused",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args and args[0] in COMMANDS:
        return _run(args[0], args[1:])
    _parser().parse_args(args)  # --help, --version, and the message for anything unknown
    _parser().print_help(sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    from .. import __version__

    listing = "\n".join(f"  {name:<14}{text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="outrider",
        usage="outrider [-h] [--version] COMMAND ...",
        description="LLM inference with speculative decoding at its core.",
        epilog=f"commands:\n{listing}\n\n`outrider COMMAND --help` shows the flags of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"outrider {__version__}")
    parser.add_argument("command", nargs="?", choices=tuple(COMMANDS), help=argparse.SUPPRESS)
    return parser


def _run(command: str, args: list[str]) -> int:
    try:
        return int(import_module(f".commands.{command}", __package__).main(args))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has left, e.g. `| head`
        sys.stderr.close()
        return 1
    except Exception as error:
        status = _status(error)
        if status is None:
            raise
        print(f"outrider {command}: error: {error}", file=sys.stderr)
        return status


def _status(error: Exception) -> int | None:
    """The exit status of a user's error; None for a bug, which keeps its traceback."""
    from ..engine_core.model_path import ModelNotFound
    from ..engine_core.refusal import RefusedError
    from .errors import LaunchRefused, OutriderError
    from .flags import UsageError

    if isinstance(error, UsageError | RefusedError | LaunchRefused | ModelNotFound):
        return 2
    if isinstance(error, OutriderError | OSError):
        return 1
    return None


if __name__ == "__main__":
    sys.exit(main())
