"""``outrider generate``: one prompt, one completion."""

import argparse
import sys
from pathlib import Path

import msgspec

from ..flags import UsageError, add_engine_flags, print_config, resolve_engine
from ..sampling_flags import add_sampling_flags, params_from_flags, refuse_unloaded_calls
from ..simulated import warn_if_simulated

_ABSENT = {
    "skip_tokenizer_init": "`generate` takes text and prints text; use `outrider run` with token "
    "ids (--skip-tokenizer-init)"
}


def main(args: list[str]) -> int:
    """Generate from ``--prompt``, ``--prompt-file`` or standard input."""
    parser = argparse.ArgumentParser(
        prog="outrider generate",
        usage="outrider generate --model MODEL [--prompt P | --prompt-file F] [--json] [flags]",
        description="Generate one completion.",
        allow_abbrev=False,
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="the prompt; standard input if neither is given")
    source.add_argument("--prompt-file", metavar="FILE", help="file with the prompt, - for stdin")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    add_sampling_flags(parser)
    add_engine_flags(parser, _ABSENT)
    namespace = parser.parse_args(args)
    config = resolve_engine(namespace, _ABSENT)
    params = params_from_flags(namespace)
    refuse_unloaded_calls(config, params.logits_processors)
    for flag, wanted in (
        ("--logprobs", params.logprobs),
        ("--prompt-logprobs", params.prompt_logprobs),
    ):
        if wanted is not None and not namespace.json:
            raise UsageError(f"{flag}: is printed by --json only; add --json or leave it out")
    prompt = _prompt(namespace)
    print(print_config(config), file=sys.stderr)

    from ..llm import LLM  # starts ZeroMQ and the tokenizer: not for --help

    with LLM.from_config(config) as llm:
        warn_if_simulated(llm.info)
        if namespace.json:
            [result] = llm.generate(prompt, params)
            sys.stdout.write(msgspec.json.encode(result.summary()).decode() + "\n")
            return 0
        for chunk in llm.stream(prompt, params):
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
        sys.stdout.write("\n")
    return 0


def _prompt(namespace: argparse.Namespace) -> str:
    if namespace.prompt is not None:
        return str(namespace.prompt)
    file = namespace.prompt_file
    try:
        if file is None or file == "-":
            if file is None and sys.stdin.isatty():
                raise UsageError("give --prompt, --prompt-file or a prompt on standard input")
            return sys.stdin.buffer.read().decode("utf-8")
        return Path(file).read_bytes().decode("utf-8")
    except OSError as error:
        raise UsageError(f"--prompt-file: cannot read {file!r}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt is not UTF-8 text: {error}") from None
