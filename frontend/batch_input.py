"""Lines of a batch input file: prompts with sampling fields, or OpenAI batch requests."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..engine_core.refusal import RefusedError
from ..engine_core.sampling_params import SamplingParams
from .errors import refused_by
from .sampling_flags import params_from

MAX_LINE_BYTES = 64 * 1024 * 1024
BATCH_URLS = ("/v1/completions", "/v1/chat/completions")
ItemId = int | str
_PLAIN_EXTRAS = ("id", "prompt", "priority", "cache_salt", "speculative")


class PromptItem(NamedTuple):
    """A line ``{"prompt": ...}``. ``prompt``: text, or token ids."""

    line: int
    id: ItemId
    prompt: str | tuple[int, ...]
    params: SamplingParams
    priority: int
    cache_salt: str
    speculative: bool


class OpenAIItem(NamedTuple):
    """A line of an OpenAI batch file; ``body`` is the request as it was written."""

    line: int
    id: str
    url: str
    body: bytes


class BadItem(NamedTuple):
    """A line that cannot be run, and why. ``openai``: it looks like an OpenAI batch line."""

    line: int
    id: ItemId
    error: str
    openai: bool


Item = PromptItem | OpenAIItem | BadItem


class _OpenAILine(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Body(msgspec.Struct):
    stream: bool | None = None


class _Extras(msgspec.Struct):
    prompt: str | tuple[int, ...]
    id: int | str | None = None
    priority: int = 0
    cache_salt: str = ""
    speculative: bool = True


def read_items(path: Path, base: SamplingParams) -> Iterator[Item]:
    """Read a batch file line by line; line numbers start at 1, blank lines are passed over.

    ``base`` holds the sampling parameters that a line does not set.
    """
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                yield BadItem(number, number, f"the line exceeds {MAX_LINE_BYTES} bytes", False)
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE_BYTES)
            elif line.strip():
                yield parse_line(number, line, base)


def parse_line(number: int, line: bytes, base: SamplingParams) -> Item:
    """Parse one line; what cannot be run becomes a BadItem."""
    try:
        raw = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return BadItem(number, number, f"not a JSON object: {error}", False)
    if "custom_id" in raw or ("url" in raw and "body" in raw):
        return _openai_item(number, line, raw)
    return _prompt_item(number, line, raw, base)


def _openai_item(number: int, line: bytes, raw: dict[str, msgspec.Raw]) -> Item:
    custom_id = _text(raw.get("custom_id"))
    known = custom_id if custom_id is not None else str(number)
    try:
        parsed = msgspec.json.decode(line, type=_OpenAILine)
    except msgspec.MsgspecError as error:
        return BadItem(number, known, f"not an OpenAI batch line: {error}", True)
    try:
        streams = msgspec.json.decode(parsed.body, type=_Body).stream
    except msgspec.MsgspecError as error:
        return BadItem(number, known, f"body: {error}", True)
    if streams:
        return BadItem(number, known, "stream: a batch line cannot stream; leave it out", True)
    if parsed.method != "POST":
        return BadItem(number, known, f"method: must be POST, got {parsed.method!r}", True)
    if parsed.url not in BATCH_URLS:
        urls = " or ".join(BATCH_URLS)
        return BadItem(number, known, f"url: must be {urls}, got {parsed.url!r}", True)
    return OpenAIItem(number, parsed.custom_id, parsed.url, bytes(parsed.body))


def _text(raw: msgspec.Raw | None) -> str | None:
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=str)
    except msgspec.MsgspecError:
        return None


def _prompt_item(
    number: int, line: bytes, raw: dict[str, msgspec.Raw], base: SamplingParams
) -> Item:
    known = _known_id(raw.get("id"), number)
    if "prompt" not in raw:
        return BadItem(number, known, 'prompt: is missing; a line is {"prompt": ...}', False)
    try:
        extras = msgspec.json.decode(line, type=_Extras)
        values = {k: msgspec.json.decode(v) for k, v in raw.items() if k not in _PLAIN_EXTRAS}
        params = params_from(values, base)
    except msgspec.DecodeError as error:
        return BadItem(number, known, str(refused_by(error, "line")), False)
    except (RefusedError, RecursionError) as error:
        return BadItem(number, known, str(error), False)
    return PromptItem(
        line=number,
        id=known,
        prompt=extras.prompt,
        params=params,
        priority=extras.priority,
        cache_salt=extras.cache_salt,
        speculative=extras.speculative,
    )


def _known_id(raw: msgspec.Raw | None, number: int) -> ItemId:
    if raw is None:
        return number
    try:
        found = msgspec.json.decode(raw, type=int | str | None)
    except msgspec.MsgspecError:
        return number
    return number if found is None else found


def count_lines(path: Path) -> int:
    """Lines of a file that are not blank, for the progress bar."""
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())
