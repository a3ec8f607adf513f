"""The formats of calls by name, and the machine that finds calls in an answer as it comes."""

import secrets
import string
import uuid
from collections.abc import Callable, Collection
from typing import Final, NamedTuple

from . import hermes, llama3_json, mistral, pythonic
from .reader import Piece, Reader, Steps

Parse = Callable[[Reader, Collection[str]], Steps[None]]


def call_id() -> str:
    """A fresh id as OpenAI's look."""
    return f"call_{uuid.uuid4().hex[:24]}"


def mistral_id() -> str:
    """A fresh id of the form that Mistral's chat templates insist on."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class CallFormat(NamedTuple):
    """How a model writes calls. ``markers``: what of it a tokenizer may hold as special tokens.

    ``tag``: what stands before the name of a call, between that and its arguments, and behind
    them, where a grammar can hold the arguments of calls to a schema while other text is free;
    calls begin with the first of ``markers`` then, and with nothing else.
    """

    parse: Parse
    markers: tuple[str, ...]
    new_id: Callable[[], str] = call_id
    tag: tuple[str, str, str] | None = None


FORMATS: Final = {
    "hermes": CallFormat(hermes.hermes, (hermes.BEGIN, hermes.END), tag=hermes.TAG),
    "llama3_json": CallFormat(llama3_json.llama3_json, (llama3_json.MARKER,)),
    "mistral": CallFormat(
        mistral.mistral, (mistral.MARKER, mistral.ARGUMENTS), mistral_id, mistral.TAG
    ),
    "pythonic": CallFormat(pythonic.pythonic, (pythonic.BEGIN, pythonic.END)),
}


class ToolParser:
    """Finds calls in one answer; the pieces do not depend on how the text is split.

    A call has begun when its name is one of ``names`` and its arguments begin; what only looked
    like one is text. Where arguments stop being JSON the call stays as it is and the rest is text.
    """

    def __init__(self, parse: Parse, names: Collection[str], limit: int | None = None) -> None:
        self._reader = Reader(limit)
        self._steps: Steps[None] | None = parse(self._reader, names)
        self._advance()

    def push(self, text: str) -> list[Piece]:
        """The pieces that more text makes certain."""
        self._reader.add(text)
        return self._advance()

    def finish(self) -> list[Piece]:
        """The last pieces."""
        self._reader.end()
        return self._advance()

    @property
    def cut(self) -> bool:
        """Whether the text ended within the arguments of its last call."""
        return self._reader.cut

    def _advance(self) -> list[Piece]:
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None
        return self._reader.pieces()
