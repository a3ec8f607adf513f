"""Stop strings over tokens: a request keeps the tail of what it generated and decodes only that.

The prompt never enters the tail, so it cannot match. A character whose bytes are spread over
several tokens decodes to U+FFFD until its last byte is there; such an unfinished end is cut before
matching, so a stop is found with the token that completes its last character.
"""

from collections.abc import Sequence
from typing import Protocol, final

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
SLACK_TOKENS = 5  # the newest token, and up to 4 that the window's edge may cut a character in
SUFFIX_CHARS = 8  # a cheap first look compares this much of each stop string's end


class TailDecoder(Protocol):
    """Text of a few tokens, as the display shows it inside a longer text."""

    def visible(self, token: int, skip_special_tokens: bool) -> bool:
        """Whether the token adds at least one byte of text."""
        ...

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of the tokens; unfinished characters appear as U+FFFD."""
        ...


@final
class TokenizersTail:
    """:class:`TailDecoder` on a ``tokenizer.json``.

    SentencePiece-like decoders strip the space of a text's first word. Generated text is never
    the first word, so one fixed token stands in front and its letter is cut off again.
    Raises FileNotFoundError if there is no such file, ValueError if it cannot be read.
    """

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            content = file.read()
        try:
            self._tokenizer = Tokenizer.from_buffer(content)
        except Exception as error:  # the Rust library raises bare Exception
            raise ValueError(f"{path} is not a tokenizer.json: {error}") from error
        self._special = frozenset(
            token
            for token, added in self._tokenizer.get_added_tokens_decoder().items()
            if added.special
        )
        ids = self._tokenizer.encode("a", add_special_tokens=False).ids
        anchored = len(ids) == 1 and self._tokenizer.decode(ids) == "a"
        self._anchor: list[int] = ids if anchored else []

    def visible(self, token: int, skip_special_tokens: bool) -> bool:
        """Whether the token adds at least one byte of text."""
        if skip_special_tokens and token in self._special:
            return False
        return bool(self._tokenizer.id_to_token(token))

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of the tokens; unfinished characters appear as U+FFFD."""
        text = self._tokenizer.decode(
            [*self._anchor, *tokens], skip_special_tokens=skip_special_tokens
        )
        return text[len(self._anchor) :]


@final
class StopTail:
    """Finds stop strings in one request's generated text, one token at a time.

    Every visible token is at least one byte, so a stop of B bytes lies within the last B visible
    tokens. A short window is decoded first; the long one only if a stop's end is in sight. A
    window's edge may cut a character, which then looks like U+FFFD: only what ends in the newest
    token's text counts.
    """

    __slots__ = ("_decoder", "_long", "_short", "_skip", "_stops", "_tokens")

    def __init__(
        self, decoder: TailDecoder, stops: Sequence[str], skip_special_tokens: bool
    ) -> None:
        self._decoder = decoder
        self._stops = tuple((stop, stop[-SUFFIX_CHARS:]) for stop in stops)
        self._skip = skip_special_tokens
        self._short = SLACK_TOKENS + max(len(end.encode()) for _, end in self._stops)
        self._long = SLACK_TOKENS + max(len(stop.encode()) for stop, _ in self._stops)
        self._tokens: list[int] = []

    def push(self, token: int, may_stop: bool) -> str | None:
        """Append a token; return the stop string that it completes, the one that starts first.

        With ``may_stop`` false nothing matches, and what this token completes never will.
        """
        if not self._decoder.visible(token, self._skip):
            return None
        tokens = self._tokens
        tokens.append(token)
        if len(tokens) > 2 * self._long:
            del tokens[: -self._long]
        if not may_stop:
            return None
        near = self._text(tokens[-self._short :])
        candidates = [stop for stop, end in self._stops if end in near]
        return self._first(candidates) if candidates else None

    def _first(self, candidates: list[str]) -> str | None:
        window = self._tokens[-self._long :]
        done = len(self._text(window[:-1]))
        text = self._text(window)
        best: tuple[int, str] | None = None
        for stop in candidates:
            at = text.find(stop, max(0, done - len(stop) + 1))
            if at >= 0 and (best is None or at < best[0]):
                best = (at, stop)
        return None if best is None else best[1]

    def _text(self, tokens: list[int]) -> str:
        return self._decoder.decode(tokens, self._skip).rstrip(REPLACEMENT)
