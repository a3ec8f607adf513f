"""The text of ``docs/flags.md``: ``python -m outrider.frontend.flags_page`` prints it."""

import textwrap

from ..engine_core.config import EngineConfig
from .bench.step_flags import BENCH_STEP
from .flags import Flag, flags_of, shown_value
from .server_config import ServerConfig

_INTRODUCTION = """\
# Flags

Made by `python -m outrider.frontend.flags_page`; edit the config structs, not this page.
Engine flags work in `serve`, `generate`, `run`, `bench offline`, `bench serve` and `plan`, as
arguments of `outrider.LLM` (with underscores) and as keys of a `--config` file; where a flag has
two names, both do. A boolean flag has a `--no-` form. `--speculative-config` takes vLLM's JSON keys
instead.

What takes text needs a tokenizer: `generate`, `bench offline` and `bench serve` refuse
`--skip-tokenizer-init`."""
_STEP = (
    "`bench step` and `profile sps` take engine flags too, those of a draft model among them, but "
    "none of NGRAM (they verify random drafts) and none of {}, which they set by "
    "themselves or have no use for."
)


def docs_table() -> str:
    """The text of ``docs/flags.md``."""
    absent = ", ".join(f"`--{name.replace('_', '-')}`" for name in BENCH_STEP.not_ngram())
    parts = [_INTRODUCTION, *textwrap.wrap(_STEP.format(absent), 96, break_on_hyphens=False)]
    for title, struct in (("Engine", EngineConfig), ("Server (`serve`)", ServerConfig)):
        parts += ["", f"## {title}", "", "| flag | type | default | meaning |"]
        parts += ["| --- | --- | --- | --- |"]
        parts += [_row(flag) for flag in flags_of(struct)]
    return "\n".join(parts) + "\n"


def _row(flag: Flag) -> str:
    kind = "flag" if flag.kind is None else flag.kind.__name__
    if flag.choices:
        kind = ", ".join(f"`{c}`" for c in flag.choices)
    default = "required" if flag.required else shown_value(flag.default)
    names = ", ".join(f"`{n}`" for n in flag.names)
    return f"| {names} | {kind} | {default} | {flag.help} |"


if __name__ == "__main__":
    print(docs_table(), end="")
