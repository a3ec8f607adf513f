"""Prompts of a benchmark: JSON lines ``{"id", "kind", "prompt", "max_tokens", "json_schema"}``.

``prompt`` is text or a list of token ids; the last two may be missing.
"""

from pathlib import Path

import msgspec

from ...engine_core.grammar_spec import GrammarSpec
from ..flags import UsageError


class BenchPrompt(msgspec.Struct, frozen=True):
    """One prompt; ``max_tokens`` is its own limit of generated tokens, ``json_schema`` an object
    that its output must match, if any.
    """

    id: str
    kind: str
    prompt: str | list[int]
    max_tokens: int = 128
    json_schema: dict[str, object] | None = None

    @property
    def grammar(self) -> GrammarSpec | None:
        """``json_schema`` as requests have it."""
        if self.json_schema is None:
            return None
        text = msgspec.json.encode(self.json_schema).decode()
        return GrammarSpec("json_schema", text, "json_schema")


def load_prompts(
    path: str, kind: str | None, limit: int | None, max_new_tokens: int | None
) -> list[BenchPrompt]:
    """Read the prompts of one ``kind`` (None: all), at most ``limit`` of them.

    ``max_new_tokens`` replaces every prompt's own limit. Raises UsageError.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"--prompts: cannot read {path!r}: {error.strerror}") from None
    prompts: list[BenchPrompt] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                prompts.append(msgspec.json.decode(line, type=BenchPrompt))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise UsageError(f"--prompts: {path!r}, line {number}: {error}") from None
    kinds = sorted({p.kind for p in prompts})
    chosen = [p for p in prompts if kind is None or p.kind == kind][:limit]
    if not chosen:
        raise UsageError(f"--kind: no prompt of kind {kind!r} in {path!r}; it has {kinds}")
    if max_new_tokens is None:
        return chosen
    return [msgspec.structs.replace(p, max_tokens=max_new_tokens) for p in chosen]
